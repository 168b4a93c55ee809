"""GRPO, RLOO and distillation: what is generated, counted and taken."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest

from autotune.errors import UsageError
from autotune.space.context import DataProfile
from autotune.space.space import SearchSpace
from autotune.trainers.base import load

pytestmark = [pytest.mark.trl, pytest.mark.usefixtures("quick")]

TOLERANCE = 0.005
SLACK_BYTES = 2048
NUM_ROWS = 40
TRAINERS = ("grpo", "rloo")
SHORT = {"max_completion_length": 12, "num_generations": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("online")


def rows() -> list[dict[str, Any]]:
    """Return prompts of 5 to 20 words."""
    draw = random.Random(11)
    return [
        {"prompt": " ".join(f"w{draw.randrange(2, 900)}" for _ in range(draw.randint(5, 20)))}
        for _ in range(NUM_ROWS)
    ]


def request_for(
    trainer: str, model: str, work: Path, data: list[dict[str, Any]], **keys: Any
) -> dict[str, Any]:
    """Write the data and return what asks to prepare it."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    named = {"path": "json", "data_files": str(path), "split": "train"}
    fixed = SearchSpace.load(trainer).fixed
    return {
        "trainer": trainer,
        "config": {"model_name_or_path": model, "datasets": [named], **fixed, **SHORT, **keys},
        "folder": str(work),
        "max_lengths": [],
    }


@pytest.fixture(scope="module")
def prepared(folder: Path, tiny: str) -> dict[str, dict[str, Any]]:
    """Return each trainer's answer to preparing its rows."""
    return {
        name: load(name).prepare(request_for(name, tiny, folder / name, rows()))
        for name in TRAINERS
    }


def spec_for(
    trainer: str, path: Path, tiny: str, answer: Mapping[str, Any], config: Mapping[str, Any]
) -> Any:
    keys = {**SearchSpace.load(trainer).fixed, **SHORT, **config}
    return kit.make_spec(path, tiny, answer["data_folder"], keys, trainer=trainer)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_profile_is_of_prompts_with_whole_completions(
    trainer: str, prepared: dict[str, dict[str, Any]]
) -> None:
    data = DataProfile.from_dict(prepared[trainer]["data"])
    lengths = [len(row["prompt"].split()) for row in rows()]
    assert data.num_rows == NUM_ROWS
    assert data.longest == max(lengths) + SHORT["max_completion_length"]
    assert sum(data.column_counts["prompt"].values()) == NUM_ROWS


@pytest.mark.parametrize("trainer", TRAINERS)
def test_which_ways_of_checkpointing_work_is_found_out(
    trainer: str, prepared: dict[str, dict[str, Any]]
) -> None:
    refused = prepared[trainer]["refusals"]["checkpointing"]
    assert "every_2_layers" in refused
    assert all(reason.startswith("TRL 1.") for reason in refused.values())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_generation_begins_each_step(
    trainer: str, tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    spec = spec_for(trainer, tmp_path, tiny, prepared[trainer], {"gradient_accumulation_steps": 2})
    steps, _ = kit.run_virtual(spec)
    assert len(steps.after_bytes) == 2
    assert steps.num_generations == 2


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_step_may_hold_several_generations(
    trainer: str, tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    keys = {"gradient_accumulation_steps": 4, "steps_per_generation": 2}
    spec = spec_for(trainer, tmp_path, tiny, prepared[trainer], keys)
    steps, _ = kit.run_virtual(spec)
    assert len(steps.after_bytes) == 2
    assert steps.num_generations == 4


@pytest.mark.parametrize("keys", [{"steps_per_generation": 4}, {"num_iterations": 2}])
def test_a_generation_for_several_steps_is_refused(
    keys: dict[str, int], tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    spec = spec_for("grpo", tmp_path, tiny, prepared["grpo"], keys)
    with pytest.raises(ValueError, match="a generation serves several steps"):
        kit.run_virtual(spec)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_reference_model_is_a_second_copy_of_the_weights(
    trainer: str, tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    loaded = {}
    for beta in (0.0, 0.04):
        spec = spec_for(trainer, tmp_path / str(beta), tiny, prepared[trainer], {"beta": beta})
        loaded[beta] = kit.run_virtual(spec)[0].loaded_bytes
    assert loaded[0.04] == pytest.approx(2 * loaded[0.0], rel=0.01)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "no_checkpointing": {"gradient_checkpointing": False},
    "lora": {"use_peft": True},
    "nf4": {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "multiple": {"pad_to_multiple_of": 8},
    "reference": {"beta": 0.04},
    "no_reference": {"beta": 0.0},
    "more": {"num_generations": 4, "gradient_accumulation_steps": 2},
    "no_cache": {"generation_kwargs": {"use_cache": False}},
    "two_generations": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_pretend_device_counts_what_real_tensors_take(
    trainer: str,
    kind: str,
    tmp_path: Path,
    tiny: str,
    prepared: dict[str, dict[str, Any]],
) -> None:
    answer, config = prepared[trainer], CONFIGS[kind]
    real, _ = kit.run_real(spec_for(trainer, tmp_path / "real", tiny, answer, config))
    virtual, _ = kit.run_virtual(spec_for(trainer, tmp_path / "virtual", tiny, answer, config))
    kit.compare(real, virtual, tolerance=TOLERANCE, slack_bytes=SLACK_BYTES)


@pytest.mark.parametrize("more", [{}, {"beta": 0.04}, {"use_peft": True}])
def test_a_head_in_float32_is_counted(
    more: dict[str, Any], tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    config = {"dtype": "bfloat16", "cast_lm_head_to_fp32": True, **more}
    answer = prepared["grpo"]
    real, _ = kit.run_real(spec_for("grpo", tmp_path / "real", tiny, answer, config))
    virtual, _ = kit.run_virtual(spec_for("grpo", tmp_path / "virtual", tiny, answer, config))
    kit.compare(real, virtual, tolerance=TOLERANCE, slack_bytes=SLACK_BYTES)
    plain = spec_for("grpo", tmp_path / "plain", tiny, answer, {"dtype": "bfloat16", **more})
    assert kit.run_virtual(plain)[0].loaded_bytes < virtual.loaded_bytes


@pytest.fixture(scope="module")
def distilled(folder: Path, tiny: str) -> dict[str, Any]:
    """Return the answer to preparing prompts for distillation."""
    request = request_for("distillation", tiny, folder / "distillation", rows())
    del request["config"]["num_generations"]
    request["config"]["teacher_model_name_or_path"] = tiny
    return load("distillation").prepare(request)


TAUGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_checkpointing": {"gradient_checkpointing": False},
    "lora": {"use_peft": True},
    "nf4": {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "two_micro_batches": {"gradient_accumulation_steps": 2, "optim": "adafactor"},
    "two_bytes": {"dtype": "bfloat16"},
    "forward_kl": {"beta": 0.0},
}


@pytest.mark.parametrize("kind", TAUGHT)
def test_a_student_takes_what_real_tensors_take(
    kind: str, tmp_path: Path, tiny: str, distilled: dict[str, Any]
) -> None:
    config = {"max_completion_length": 12, "teacher_model_name_or_path": tiny, **TAUGHT[kind]}
    data = distilled["data_folder"]

    def spec(name: str) -> Any:
        return kit.make_spec(tmp_path / name, tiny, data, config, trainer="distillation")

    real, _ = kit.run_real(spec("real"))
    virtual, _ = kit.run_virtual(spec("virtual"))
    kit.compare(real, virtual, tolerance=TOLERANCE, slack_bytes=SLACK_BYTES)
    assert virtual.num_generations == real.num_generations == 2


def test_a_student_needs_a_teacher(tiny: str, tmp_path: Path) -> None:
    request = request_for("distillation", tiny, tmp_path, rows())
    del request["config"]["num_generations"]
    with pytest.raises(UsageError, match="needs a teacher"):
        load("distillation").prepare(request)
    request["config"]["teacher_model_name_or_path"] = "./nosuch"
    with pytest.raises(UsageError, match=r"the teacher: .*nosuch"):
        load("distillation").prepare(request)


def test_eight_bit_weights_generate_on_the_pretend_device(
    tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    """Not against real tensors: those take a card's way through bitsandbytes, without its values
    (``realtrace._like_a_card``), and no token can be drawn from what comes out."""
    peaks = {}
    for name, keys in (("whole", {}), ("int8", {"load_in_8bit": True})):
        spec = spec_for(
            "grpo", tmp_path / name, tiny, prepared["grpo"], {"use_peft": True, **keys}
        )
        peaks[name] = kit.run_virtual(spec)[0].loaded_bytes
    assert peaks["int8"] < 0.8 * peaks["whole"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reward_funcs": []}, "needs a reward"),
        ({"reward_funcs": ["nosuch_reward"]}, "no reward function 'nosuch_reward'"),
        ({"reward_funcs": ["nosuch.module"]}, "cannot be loaded"),
    ],
)
def test_a_reward_that_is_not_there(
    keys: dict[str, Any], message: str, tiny: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        load("grpo").prepare(request_for("grpo", tiny, tmp_path, rows(), **keys))
