"""GRPO and RLOO with vLLM beside them, on cards that are not there."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest
import yaml
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments
from trl_kit import plan_of

from autotune.estimate import Estimator
from autotune.executors.base import Executor
from autotune.probe import trl_file, trl_yaml
from autotune.probe.result import Measurement, Outcome, ProbeResult
from autotune.report import estimated_text
from autotune.space.space import SearchSpace
from autotune.trainers.base import load
from autotune.virtual import cards, engine

pytestmark = pytest.mark.trl

CARD = "virtual:h100-80gb"
TRAINERS = ("grpo", "rloo")
SHORT = {"max_completion_length": 16, "num_generations": 2}
WITH_VLLM = {"use_vllm": True, "vllm_max_model_length": 64}
ASLEEP = {**WITH_VLLM, "vllm_enable_sleep_mode": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def rows(folder: Path) -> Path:
    """Return a file of prompts of 5 to 20 words."""
    draw = random.Random(11)
    path = folder / "rows.jsonl"
    lengths = [draw.randint(5, 20) for _ in range(24)]
    prompts = [" ".join(f"w{draw.randrange(2, 900)}" for _ in range(n)) for n in lengths]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def keys_of(trainer: str, tiny: str, rows: Path) -> dict[str, Any]:
    named = {"path": "json", "data_files": str(rows), "split": "train"}
    fixed = SearchSpace.load(trainer).fixed
    return {"model_name_or_path": tiny, "datasets": [named], **fixed, **SHORT}


@pytest.fixture(scope="module")
def prepared(folder: Path, tiny: str, rows: Path) -> dict[str, str]:
    """Return the folder of each trainer's prepared rows."""
    found = {}
    for name in TRAINERS:
        work = folder / name
        work.mkdir()
        request = {"trainer": name, "config": keys_of(name, tiny, rows), "folder": str(work)}
        found[name] = load(name).prepare({**request, "max_lengths": []})["data_folder"]
    return found


@pytest.fixture
def probe(virtual: Executor, tmp_path: Path, tiny: str, prepared: dict[str, str]) -> Any:
    """Return a function that probes a trainer with some keys."""

    def run(trainer: str, name: str, keys: Mapping[str, Any]) -> ProbeResult:
        config = {**SearchSpace.load(trainer).fixed, **SHORT, "bf16": True, **keys}
        spec = kit.make_spec(
            tmp_path / name,
            tiny,
            prepared[trainer],
            config,
            trainer=trainer,
            device=CARD,
            overlay={},
            timeline_points=20,
        )
        return virtual.submit(spec).result(timeout=180)

    return run


def measured(result: ProbeResult) -> Measurement:
    assert result.outcome is Outcome.OK, result.traceback
    assert result.measurement is not None
    return result.measurement


def reserved(found: Measurement, phase: str) -> int:
    return found.phases[phase].reserved_bytes or 0


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_engine_is_its_share_awake_and_its_graphs_asleep(trainer: str, probe: Any) -> None:
    without = measured(probe(trainer, "off", {}))
    awake = measured(probe(trainer, "awake", WITH_VLLM))
    asleep = measured(probe(trainer, "asleep", ASLEEP))
    share = round(0.3 * cards.find("h100-80gb").memory_bytes)
    slack = 64 << 20  # pools of the trainer's own, whose weights are tiny
    for found in (awake, asleep):
        assert reserved(found, "generation") == pytest.approx(share, abs=4 * slack)
    assert reserved(awake, "later_steps") == pytest.approx(share, abs=4 * slack)
    left = reserved(asleep, "later_steps") - reserved(without, "later_steps")
    assert left == pytest.approx(engine.GRAPHS_BYTES, abs=slack)
    assert asleep.peak_phase in ("load", "generation")
    assert without.makeup is not None
    assert "modelled" not in without.makeup
    assert asleep.makeup is not None
    assert asleep.makeup["modelled"]["vllm"]["sleeps"] is True
    assert asleep.makeup["at_peak"]["vllm_modelled"] > share - 4 * slack


def test_the_same_is_trained_on(probe: Any) -> None:
    """As many tokens, of the same prompts: completions have the full length either way."""
    without, awake = (measured(probe("grpo", name, keys)) for name, keys in CASES.items())
    assert [step.num_tokens for step in awake.steps] == [s.num_tokens for s in without.steps]
    assert awake.worst_batch == without.worst_batch
    # No Python per token and operator: what vLLM has its graphs for.
    assert 0 < awake.steps[0].generation_time_s < without.steps[0].generation_time_s


CASES: dict[str, dict[str, Any]] = {"off": {}, "awake": WITH_VLLM}


def test_adapters_are_merged_before_weights_are_handed_over(probe: Any) -> None:
    plain = measured(probe("grpo", "full", ASLEEP))
    adapted = measured(probe("grpo", "lora", {**ASLEEP, "use_peft": True}))
    # TRL merges and unmerges by PEFT, which reads and writes every weight of an adapter once more.
    assert adapted.steps[0].generation_time_s > plain.steps[0].generation_time_s


@pytest.mark.parametrize(
    ("keys", "outcome", "words"),
    [
        ({"vllm_gpu_memory_utilization": 0.999}, Outcome.DEVICE_OOM, "out of memory"),
        ({"vllm_gpu_memory_utilization": 0.004}, Outcome.UNSUPPORTED, "vLLM would not start"),
        ({"vllm_mode": "server"}, Outcome.UNSUPPORTED, "another process"),
        ({"use_peft": True, "load_in_8bit": True}, Outcome.UNSUPPORTED, "8-bit quantization"),
        ({"use_peft": True, "load_in_4bit": True}, Outcome.UNSUPPORTED, "not modelled"),
        ({"vllm_structured_outputs_regex": "a+"}, Outcome.UNSUPPORTED, "grammar"),
    ],
)
def test_what_cannot_be(probe: Any, keys: dict[str, Any], outcome: Outcome, words: str) -> None:
    result = probe("grpo", "refused", {**WITH_VLLM, **keys})
    assert result.outcome is outcome, result.traceback
    assert words in result.detail


def test_an_estimate_says_what_is_modelled(
    virtual: Executor, tmp_path: Path, tiny: str, rows: Path
) -> None:
    path = tmp_path / "grpo.yaml"
    config = {**keys_of("grpo", tiny, rows), **ASLEEP, "output_dir": "grpo", "bf16": True}
    config["env"] = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    path.write_text(f"# trl grpo --config {path.name}\n" + yaml.safe_dump(config))
    found = Estimator(trl_file.read(path), (CARD,), executor=virtual).run()
    (card,) = found.cards
    assert card.outcome is Outcome.OK, card.detail
    share = round(0.3 * card.memory_bytes)
    assert card.used_bytes is not None
    assert card.used_bytes > share
    (note,) = [note for note in found.notes if "neither measured nor traced" in note]
    assert "stay while it sleeps" in note
    assert any("PYTORCH_CUDA_ALLOC_CONF" in note for note in found.notes)
    assert found.to_dict()["cards"][0]["makeup"]["modelled"]["vllm"]["vllm"] == "0.31.0"
    text = estimated_text.render(found, 100).plain
    assert "vLLM (modelled)" in text
    assert "vLLM's share modelled and the rest within about 1%" in " ".join(text.split())
    assert "tokens/s predicted, vLLM's time modelled" in " ".join(text.split())
    assert "neither measured nor traced" in " ".join(text.split())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trl_reads_what_a_search_exports(
    trainer: str, virtual: Executor, tmp_path: Path, tiny: str, rows: Path
) -> None:
    plan = plan_of(
        virtual,
        tmp_path / "run",
        tiny,
        str(rows),
        space=trainer,
        trainer=trainer,
        device=CARD,
        global_batch=8,
        pins={"max_completion_length": 16, "num_generations": 2, "use_vllm": "colocate"},
    )
    candidate = {**plan.space.baseline, "vllm_enable_sleep_mode": "on"}
    plan.space.params(candidate)
    path = tmp_path / "exported.yaml"
    path.write_text(trl_yaml.render(plan.config(candidate), {}, file_name=path.name))
    written = yaml.safe_load(path.read_text())
    longest = max(len(json.loads(line)["prompt"].split()) for line in rows.open())
    assert written["vllm_max_model_length"] >= longest + 16
    kinds = {"grpo": (GRPOScriptArguments, GRPOConfig), "rloo": (RLOOScriptArguments, RLOOConfig)}
    parser = TrlParser((*kinds[trainer], ModelConfig, DatasetMixtureConfig))
    _, args, _, _ = parser.parse_args_and_config(
        args=["--config", str(path), "--use_cpu", "true", "--bf16", "false"],
        fail_with_unknown_args=True,
    )
    assert args.use_vllm
    assert args.vllm_enable_sleep_mode
    assert args.vllm_mode == "colocate"
    assert args.vllm_gpu_memory_utilization == 0.3
