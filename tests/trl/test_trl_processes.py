"""Several processes: what is probed, what is exported, and that trl runs it so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trl_kit as kit

from autotune.cli import main as cli
from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import Plan
from autotune.probe import accelerate_config
from autotune.probe.result import Outcome, ProbeResult
from autotune.report.trial import Trial
from autotune.space.space import SearchSpace
from autotune.worker import demo

pytestmark = pytest.mark.trl

SHIM = Path(__file__).with_name("sharding_on_cpu")
TRL = Path(sys.executable).with_name("trl")
GLOBAL_BATCH = 8
WAIT_S = 300


@dataclass(frozen=True)
class Pair:
    """What runs probes of two processes, and a search's plan."""

    executor: SubprocessExecutor
    plan: Plan


@pytest.fixture(scope="module")
def pair(made: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return an executor whose probes may shard on the CPU, which accelerate else passes over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SHIM))
        executor = SubprocessExecutor(("cpu",), processes=2)
        plan = kit.plan_of(
            executor,
            tmp_path_factory.mktemp("plan"),
            made["model"],
            made["dataset"],
            processes=2,
            global_batch=GLOBAL_BATCH,
        )
        yield Pair(executor, plan)
        executor.shutdown()


def candidate(plan: Plan) -> dict[str, Any]:
    return {**plan.space.baseline, "per_device_train_batch_size": 1, "max_length": 128}


def on_cpu(sharding: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as the shim needs it: DeepSpeed is passed over beside use_cpu."""
    return {**config, "use_cpu": not sharding.startswith("zero"), "bf16": False}


def needed(sharding: str) -> None:
    if sharding.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the package deepspeed is not installed")


def probe(pair: Pair, folder: Path, sharding: str, **changes: Any) -> ProbeResult:
    chosen = candidate(pair.plan)
    config = on_cpu(sharding, pair.plan.config(chosen))
    spec = kit.spec_of(
        pair.plan,
        folder,
        chosen,
        config=config,
        overlay={"use_cpu": config["use_cpu"]},
        processes=2,
        accelerate=accelerate_config.written(sharding, device_kind="cpu", processes=2)
        | {"use_cpu": config["use_cpu"]},
        **changes,
    )
    return pair.executor.submit(spec).result(WAIT_S)


@pytest.mark.parametrize("sharding", accelerate_config.SHARDINGS)
def test_each_process_trains_on_its_part_and_the_worst_batch(
    pair: Pair, tmp_path: Path, sharding: str
) -> None:
    needed(sharding)
    result = probe(pair, tmp_path / "0001", sharding)
    assert result.outcome is Outcome.OK, (result.detail, result.traceback)
    measurement = result.measurement
    assert measurement is not None
    assert measurement.num_processes == 2
    assert measurement.accumulation_steps == GLOBAL_BATCH // 2
    longest = min(128, pair.plan.context.data.longest)
    for rank in measurement.ranks:
        assert rank.worst_batch == (1, longest)
        # The first step holds the longest row in each of them.
        assert rank.warmup_steps[0].num_tokens >= longest
        assert {"load", "first_step", "later_steps"} <= rank.phases.keys()
    first, second = (rank.steps for rank in measurement.ranks)
    for step, one, other in zip(measurement.steps, first, second, strict=True):
        assert step.num_tokens == one.num_tokens + other.num_tokens
        assert step.num_rows == one.num_rows + other.num_rows
    assert first[0].num_tokens != second[0].num_tokens  # they do not train on the same rows
    assert measurement.peak_bytes == max(rank.peak_bytes for rank in measurement.ranks)


@pytest.mark.parametrize("sharding", accelerate_config.SHARDINGS)
def test_trl_runs_the_exported_files(pair: Pair, tmp_path: Path, sharding: str) -> None:
    needed(sharding)
    config = on_cpu(sharding, pair.plan.config(candidate(pair.plan)))
    trial = Trial(
        number=1,
        candidate={},
        config={**config, "output_dir": str(tmp_path / "out")},
        outcome=Outcome.OK,
        accelerate=accelerate_config.written(sharding, device_kind="cpu", processes=2)
        | {"use_cpu": config["use_cpu"]},
        facts={"trainer": "sft"},
    )
    path = trial.export(tmp_path / "best.yaml")
    text = path.read_text()
    command = re.search(r"run it with\s+trl (.*)$", text, re.MULTILINE)
    assert command is not None
    assert command[1] == "sft --config best.yaml --accelerate_config best.accelerate.yaml"
    more = ["--max_steps", "3", "--report_to", "none", "--save_strategy", "no"]
    done = subprocess.run(
        [str(TRL), *command[1].split(), *more, "--main_process_port", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SHIM), *sys.path])},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # A process alone would have got half as far with the same accumulation.
    epoch = float(re.findall(r"'epoch': '?([\d.e-]+)", done.stdout + done.stderr)[-1])
    assert epoch == pytest.approx(3 * GLOBAL_BATCH / pair.plan.context.data.num_rows, rel=0.2)


def test_what_accelerate_passes_over_is_not_measured(
    made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the shim accelerate trains FSDP on the CPU as DDP, and says nothing."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(SHIM)])
    executor = SubprocessExecutor(("cpu",), processes=2)
    try:
        plan = kit.plan_of(
            executor, tmp_path / "plan", made["model"], made["dataset"], processes=2
        )
        assert ("sharding", "fsdp2") in {(name, value) for name, value, _ in plan.space.removed}
        result = probe(Pair(executor, plan), tmp_path / "0001", "fsdp2")
    finally:
        executor.shutdown()
    assert result.outcome is Outcome.UNSUPPORTED, result
    assert "does not shard as fsdp2 here: it trains as MULTI_CPU" in result.detail


def test_a_search_in_two_processes(
    made: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    asked = ["search", made["model"], made["dataset"], "--device", "cpu", "--space", "quick"]
    asked += ["--processes", "2", "--measured-steps", "1", "--pin", "max_length=128"]
    asked += ["--min-coverage", "0"]
    code = cli.main([*asked, "--trials", "1", "--run-dir", str(run), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    report = json.loads(out)
    assert any("2 processes" in notice for notice in report["notices"])
    best = run / "configs" / "best.yaml"
    assert f"--config {best} --accelerate_config {accelerate_config.beside(best)}" in err
    assert accelerate_config.beside(best).exists()
    measured = report["trials"][0]["results"][0]["measurement"]
    assert len(measured["ranks"]) == 2
    assert report["trials"][0]["accelerate"]["num_processes"] == 2
    alone = [word for word in asked if word not in ("--processes", "2")]
    code = cli.main([*alone, "--trials", "2", "--resume", "--run-dir", str(run)])
    _, err = capsys.readouterr()
    assert code == 2
    assert "--processes: 2 before, not given now" in err


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_deepspeed_s_own_schema_takes_the_config(sharding: str) -> None:
    needed(sharding)
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = accelerate_config.written(sharding, device_kind="cuda", processes=2)
    given = config["deepspeed_config"]
    plugin = DeepSpeedPlugin(
        zero_stage=given["zero_stage"],
        offload_optimizer_device=given["offload_optimizer_device"],
        offload_param_device=given["offload_param_device"],
        zero3_init_flag=given["zero3_init_flag"],
        zero3_save_16bit_model=given.get("zero3_save_16bit_model"),
    )
    zero = DeepSpeedZeroConfig(**plugin.hf_ds_config.config["zero_optimization"])
    assert zero.stage == given["zero_stage"]
    assert bool(zero.gather_16bit_weights_on_model_save) is (sharding == "zero3")


def probe_of(
    pair: Pair, made: dict[str, str], folder: Path, trainer: str, sharding: str, **keys: Any
) -> ProbeResult:
    """Probe a trainer in two processes, in micro-batches of 2 rows each."""
    data = kit.write_jsonl(folder / "rows.jsonl", ROWS.get(trainer, demo.prompts)(24))
    space = SearchSpace.load(trainer)
    if trainer == "distillation":
        fixed = {**space.fixed, "teacher_model_name_or_path": made["model"]}
        space = replace(space, fixed=fixed)
    plan = kit.plan_of(
        pair.executor,
        folder / "plan",
        made["model"],
        data,
        space=space,
        trainer=trainer,
        processes=2,
        global_batch=8,
        pins=SHORT.get(trainer, {"max_length": 128}),
    )
    chosen = {**plan.space.baseline, "per_device_train_batch_size": 2}
    config = {**on_cpu(sharding, plan.config(chosen)), **keys}
    spec = kit.spec_of(
        plan,
        folder / "0001",
        chosen,
        trainer=trainer,
        config=config,
        overlay={"use_cpu": config["use_cpu"]},
        processes=2,
        accelerate=accelerate_config.written(sharding, device_kind="cpu", processes=2)
        | {"use_cpu": config["use_cpu"]},
        timeout_s=240.0,
    )
    return pair.executor.submit(spec).result(WAIT_S)


ROWS = {"dpo": demo.preferences, "reward": demo.preferences, "kto": demo.unpaired}
SHORT = {
    "grpo": {"num_generations": 2, "max_completion_length": 8},
    "rloo": {"num_generations": 2, "max_completion_length": 8},
    "online_dpo": {"max_new_tokens": 8},
    "distillation": {"max_completion_length": 8},
}
COMPLETIONS = {"grpo": 8, "rloo": 8, "online_dpo": 16, "distillation": 8}
"""Of a global batch of 8 rows: online DPO makes two of each prompt."""


@pytest.mark.parametrize(
    ("trainer", "sharding"), [*((name, "ddp") for name in SHORT), ("grpo", "zero3")]
)
def test_both_processes_generate(
    pair: Pair, made: dict[str, str], tmp_path: Path, trainer: str, sharding: str
) -> None:
    needed(sharding)
    keys = {"ds3_gather_for_generation": True} if sharding == "zero3" else {}
    result = probe_of(pair, made, tmp_path, trainer, sharding, **keys)
    assert result.outcome is Outcome.OK, (result.detail, result.traceback)
    measurement = result.measurement
    assert measurement is not None
    whole = 8 * COMPLETIONS[trainer]
    for rank in measurement.ranks:
        assert "generation" in rank.phases
        # Half of the completions of 8 tokens are each one's.
        assert [step.num_tokens for step in rank.steps] == [whole // 2] * len(rank.steps)
    assert measurement.steps[0].num_tokens == whole


@pytest.mark.parametrize("trainer", ROWS)
def test_preferences_are_divided_among_processes(
    pair: Pair, made: dict[str, str], tmp_path: Path, trainer: str
) -> None:
    result = probe_of(pair, made, tmp_path, trainer, "ddp")
    assert result.outcome is Outcome.OK, (result.detail, result.traceback)
    measurement = result.measurement
    assert measurement is not None
    each = [rank.steps[0].num_rows for rank in measurement.ranks]
    assert each == [4, 4]
    assert measurement.steps[0].num_rows == 8


def test_generating_without_gathering_fails_as_the_knob_says(
    pair: Pair, made: dict[str, str], tmp_path: Path
) -> None:
    """Where it passes, ``ds3_gather_for_generation`` can be searched as it is, off and on."""
    needed("zero3")
    result = probe_of(pair, made, tmp_path, "grpo", "zero3", ds3_gather_for_generation=False)
    assert result.outcome is Outcome.CRASHED, (result.detail, result.traceback)
