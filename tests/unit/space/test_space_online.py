"""Knobs of trainers that generate, and of KTO's loss: rules, keys and each trainer's defaults."""

from __future__ import annotations

from typing import Any

import pytest
from knob_kit import refusal, written

from autotune.errors import SpaceError
from autotune.space.context import Context
from autotune.space.knob import registry
from autotune.space.knobs.batching import with_loss
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context, make_gpu

pytest.importorskip("trl")


def of(trainer: str, **changes: Any) -> Context:
    return make_context(trainer=trainer, device=make_gpu(), lengths=(20,) * 64, **changes)


def test_defaults_are_the_trainers_own() -> None:
    knob = registry.get("num_generations")
    assert knob.of("grpo") is knob
    assert knob.of("rloo").baseline == 2
    assert registry.get("max_length").of("online_dpo").baseline == 512
    assert registry.get("max_length").of("dpo").baseline == 1024


@pytest.mark.parametrize(
    ("trainer", "values"),
    [
        ("grpo", {"num_generations": 8, "max_completion_length": 512}),
        ("rloo", {"num_generations": 2, "max_completion_length": 512}),
        ("online_dpo", {"max_new_tokens": 64, "max_length": 512, "generation_cache": "default"}),
    ],
)
def test_the_baseline_is_trls_default(trainer: str, values: dict[str, Any]) -> None:
    space = SearchSpace.load(trainer).resolve(of(trainer))
    assert values.items() <= space.baseline.items()
    assert not [note for note in space.notices if any(name in note for name in values)]
    config = space.config(space.baseline)
    assert "steps_per_generation" not in config
    assert "generation_kwargs" not in config


def test_a_knob_that_a_space_is_silent_about_is_at_the_trainers_default() -> None:
    (checkpointing,) = [
        knob for knob in SearchSpace.load("online_dpo").knobs if knob.name == "checkpointing"
    ]
    space = SearchSpace((checkpointing,), trainer="online_dpo").resolve(of("online_dpo"))
    assert space.baseline["max_length"] == 512


@pytest.mark.parametrize(
    ("value", "micro_batch", "num_generations", "reason"),
    [
        (1, 4, 8, None),
        (2, 4, 8, None),
        (4, 4, 4, None),
        (4, 4, 8, "8 completions per prompt do not divide a generation of 4"),
        (2, 16, 8, "a step of 1 micro-batches can't be divided into 2 generations"),
        (8, 4, 2, "a step of 4 micro-batches can't be divided into 8 generations"),
    ],
)
def test_a_step_is_divided_evenly(
    value: int, micro_batch: int, num_generations: int, reason: str | None
) -> None:
    drawn = {"per_device_train_batch_size": micro_batch, "num_generations": num_generations}
    assert refusal("generations_per_step", value, of("grpo"), **drawn) == reason
    if reason is None and value > 1:
        keys = written("generations_per_step", value, of("grpo"), **drawn)
        assert keys == {"steps_per_generation": 16 // micro_batch // value}


def test_generations_of_processes_add_up_to_the_global_batch() -> None:
    context = of("rloo", num_processes=2)
    drawn = {"per_device_train_batch_size": 2}
    assert refusal("generations_per_step", 4, context, **drawn) is None
    keys = written("generations_per_step", 4, context, **drawn)
    assert keys == {"steps_per_generation": 1}


def test_what_makes_a_generation_serve_several_steps_cannot_be_fixed() -> None:
    space = SearchSpace.load("grpo")
    for key in ("num_iterations", "steps_per_generation", "generation_batch_size"):
        with pytest.raises(SpaceError, match="generations_per_step"):
            SearchSpace(space.knobs, trainer="grpo", fixed={key: 2})


def test_completions_leave_room_for_prompts() -> None:
    assert refusal("max_new_tokens", 64, of("online_dpo"), max_length=512) is None
    reason = refusal("max_new_tokens", 512, of("online_dpo"), max_length=512)
    assert reason is not None
    assert "prompts would be cut away" in reason
    assert refusal("max_new_tokens", 512, of("online_dpo")) == reason


def test_a_cache_is_written_beside_other_settings_of_generating() -> None:
    assert written("generation_cache", "on") == {"generation_kwargs": {"use_cache": True}}
    assert written("generation_cache", "off") == {"generation_kwargs": {"use_cache": False}}
    space = SearchSpace.load("grpo")
    fixed = {**space.fixed, "generation_kwargs": {"typical_p": 0.9}}
    space = SearchSpace(space.knobs, trainer="grpo", fixed=fixed)
    found = space.resolve(of("grpo"), {"generation_cache": "off"})
    config = found.config(found.baseline)
    assert config["generation_kwargs"] == {"typical_p": 0.9, "use_cache": False}


def test_a_head_in_float32_is_another_only_beside_16_bits() -> None:
    knob = registry.get("cast_lm_head_to_fp32")
    assert knob.no_effect is not None
    assert knob.no_effect("on", {"dtype": "bfloat16"}, of("grpo")) is None
    assert knob.no_effect("on", {"dtype": "float32"}, of("grpo")) is not None
    assert knob.no_effect("off", {"dtype": "float32"}, of("grpo")) is None
    assert knob.change("on") == "method"
    assert not knob.is_for("rloo")


def test_the_loss_decides_whether_a_micro_batch_may_be_one_row() -> None:
    context = of("kto", refusals={with_loss("kto"): {"1": "TRL says no"}})
    assert refusal("per_device_train_batch_size", 1, context) == "TRL says no"
    assert refusal("per_device_train_batch_size", 2, context) is None
    other = {"loss_type": "apo_zero_unpaired"}
    assert refusal("per_device_train_batch_size", 1, context, **other) is None
    space = SearchSpace.load("kto").resolve(context, {"loss_type": "apo_zero_unpaired"})
    assert space.leanest["per_device_train_batch_size"] == 1
    assert SearchSpace.load("kto").resolve(context).leanest["per_device_train_batch_size"] == 2


def test_the_knob_of_ktos_loss_is_for_no_other_trainer() -> None:
    knob = registry.get("loss_type")
    assert [name for name in ("sft", "dpo", "kto", "grpo", "cpo") if knob.is_for(name)] == ["kto"]
    with pytest.raises(SpaceError, match="'loss_type' is for kto, not for 'dpo'"):
        SearchSpace((knob,), trainer="dpo")
    # Others may still fix the key.
    assert SearchSpace.load("dpo")
    SearchSpace(SearchSpace.load("dpo").knobs, trainer="dpo", fixed={"loss_type": ["ipo"]})
