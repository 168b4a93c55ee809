"""A space in a context: pins, and what is left of it here."""

from __future__ import annotations

from typing import Any

import pytest
from space_kit import FULL, QUICK, knob, resolve, space_of

from autotune.errors import SpaceError, UnknownNameError
from autotune.space.context import Context
from autotune.space.domains import IntRange
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context, make_cpu, make_gpu

# -- pins ----------------------------------------------------------------------------------------


def test_pins_are_read_as_the_knob_s_type() -> None:
    space = resolve(
        per_device_train_batch_size="4",
        batching="bfd",
        max_length="2048",
        torch_compile="true",
        pad_to_multiple_of="none",
    )
    assert space.pins == {
        "per_device_train_batch_size": 4,
        "batching": "bfd",
        "max_length": 2048,
        "torch_compile": "on",
        "pad_to_multiple_of": "none",
    }
    for candidate in space.enumerate(200):
        assert candidate["per_device_train_batch_size"] == 4
        assert candidate["batching"] == "bfd"
        assert candidate["max_length"] == 2048
        assert candidate["torch_compile"] == "on"


def test_a_pin_may_go_beyond_the_space() -> None:
    space = resolve(
        space=QUICK, batching="padding_free", adaptation="lora_4bit", optim="adafactor"
    )
    assert space.baseline == {
        "batching": "padding_free",
        "adaptation": "lora_4bit",
        "lora_r": 16,
        "lora_target_modules": "all-linear",
        "dtype": "float32",
        "checkpointing": "full",
        "per_device_train_batch_size": 8,
        "optim": "adafactor",
    }


def test_unknown_pins() -> None:
    with pytest.raises(UnknownNameError, match=r"pins: unknown knob 'batchin'.*'batching'"):
        resolve(batchin="bfd")


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"batching": "bdf"}, "padded, padding_free, bfd, bfd_split, wrapped.*'bfd'"),
        ({"lora_r": "x"}, "whole number"),
        ({"lora_r": 0}, "1 to 4096"),
        ({"max_length": None}, "whole number"),
        ({"dtype": "float8"}, "float32, bfloat16, float16"),
    ],
)
def test_values_that_no_pin_can_have(pin: dict[str, Any], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        resolve(**pin)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"batching": "padding_free", "max_length": 512}, ["max_length: null"]),
        ({"batching": "padding_free", "max_length": 1024}, ["max_length: null"]),
        ({"adaptation": "full", "lora_r": 8}, ["adaptation is full"]),
        ({"adaptation": "full", "lora_r": 16}, ["adaptation is full"]),
        ({"checkpointing": "selective", "adaptation": "lora"}, ["adapters"]),
        ({"checkpointing": "selective", "attn_implementation": "eager"}, ["eager"]),
        ({"pad_to_multiple_of": 64, "batching": "bfd"}, ["pad"]),
    ],
)
def test_pins_that_contradict_each_other(pins: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpaceError, match="contradict each other") as caught:
        resolve(**pins)
    for word in [*words, *(f"{name}={value}" for name, value in pins.items())]:
        assert word in str(caught.value)
    assert caught.value.hint == "Drop one of them."


def test_only_the_guilty_pin_is_named() -> None:
    pins = {"checkpointing": "selective", "adaptation": "lora", "attn_implementation": "sdpa"}
    with pytest.raises(SpaceError) as caught:
        resolve(**pins)
    assert "adaptation=lora" in str(caught.value)
    assert "attn_implementation" not in str(caught.value)


@pytest.mark.parametrize(
    ("pins", "changes", "message"),
    [
        ({"activation_offloading": "on"}, {}, "activation_offloading=on is not possible here"),
        ({"adaptation": "lora_4bit"}, {"packages": {"peft": "0.21"}}, "bitsandbytes"),
        ({"per_device_train_batch_size": 3}, {}, "global batch of 16"),
        ({"max_length": 128}, {"min_coverage": 0.99}, None),
        ({"max_length": 128, "batching": "padded"}, {"min_coverage": 0.99}, "128 tokens keeps"),
        ({"attn_implementation": "flash_attention_2"}, {}, "CUDA"),
    ],
)
def test_pins_that_the_context_forbids(
    pins: dict[str, Any], changes: dict[str, Any], message: str | None
) -> None:
    context = make_context(**changes)
    if message is None:
        # bfd_split and wrapped lose nothing, so that the pin leaves those.
        layouts = {c["batching"] for c in resolve(context, **pins).enumerate(100_000)}
        assert layouts == {"bfd_split", "wrapped"}
        return
    with pytest.raises(SpaceError, match=message):
        resolve(context, **pins)


def test_a_pin_takes_out_what_it_cannot_go_with() -> None:
    space = resolve(checkpointing="selective")
    assert {c["adaptation"] for c in space.enumerate()} == {"full"}
    assert {c["attn_implementation"] for c in space.enumerate()} == {"sdpa"}
    space = resolve(space=QUICK, max_length=512, checkpointing="full")
    assert {c["batching"] for c in space.enumerate()} == {"padded", "bfd"}
    space = resolve(max_length=512, checkpointing="full", optim="adafactor", lora_r=8)
    layouts = {c["batching"] for c in space.enumerate()}
    assert layouts == {"padded", "bfd", "bfd_split", "wrapped"}


def test_a_pin_on_a_conditional_knob_holds_where_it_applies() -> None:
    space = resolve(space=QUICK, lora_r=8)
    assert {c.get("lora_r") for c in space.enumerate()} == {None, 8}
    assert space.baseline["adaptation"] == "full"


def test_pins_without_effect_are_told() -> None:
    space = resolve(optim="paged_adamw_8bit", allocator="expandable_segments")
    assert len(space.notices) == 2
    assert any("allocator=expandable_segments has no effect here" in n for n in space.notices)
    assert any("optim=paged_adamw_8bit: its paging has no effect" in n for n in space.notices)
    assert space.config(space.baseline)["optim"] == "paged_adamw_8bit"
    assert "env" not in space.config(space.baseline)
    gpu = make_context(device=make_gpu())
    assert resolve(gpu, optim="paged_adamw_8bit").notices == ()


def test_pinning_what_happens_anyway_is_fine() -> None:
    assert resolve(activation_offloading="off", allocator="default").notices == ()


# -- what is left here ---------------------------------------------------------------------------


def test_what_cannot_be_drawn_is_told_with_the_reason() -> None:
    space = resolve(make_context(packages={}))
    removed = {(name, value): reason for name, value, reason in space.removed}
    assert "peft" in removed["adaptation", "lora"]
    assert "paging" not in removed["optim", "paged_adamw_8bit"]
    assert "bitsandbytes" in removed["optim", "paged_adamw_8bit"]
    inactive = dict(space.inactive)
    assert "full is the only value left" in inactive["adaptation"]
    assert "needs adapters" in inactive["lora_r"]
    assert "CPU" in inactive["activation_offloading"]
    assert "torch_compile" not in inactive  # held by the space, not by the machine
    assert "batching" not in inactive


def test_paging_is_not_searched_on_a_cpu() -> None:
    removed = {(name, value) for name, value, _ in resolve().removed}
    assert ("optim", "paged_adamw_8bit") in removed
    removed = {(n, v) for n, v, _ in resolve(make_context(device=make_gpu())).removed}
    assert ("optim", "paged_adamw_8bit") not in removed


@pytest.mark.parametrize(
    ("space", "context", "message"),
    [
        (FULL, make_context(global_batch=15, num_processes=2), "per_device_train_batch_size"),
        (
            space_of(dtype=["bfloat16"]),
            make_context(device=make_cpu(supports_bf16=False)),
            "dtype",
        ),
        (space_of(optim=["paged_adamw_8bit"]), make_context(), "no effect on a CPU"),
        (
            space_of(adaptation=["lora"], checkpointing=["selective"]),
            make_context(),
            "selective: selective checkpointing raises with adapters",
        ),
        (space_of(batching=["padded"]), make_context(min_coverage=1.0), None),
    ],
)
def test_a_space_without_candidates(
    space: SearchSpace, context: Context, message: str | None
) -> None:
    if message is None:
        # The smallest sufficient length stands in where a space does not mention max_length.
        assert space.resolve(context).baseline["max_length"] == 3072
        return
    with pytest.raises(SpaceError, match=message):
        space.resolve(context)


def test_the_trainer_must_agree() -> None:
    with pytest.raises(SpaceError, match="not for 'dpo'"):
        resolve(make_context(trainer="dpo"))


def test_a_custom_knob_without_values() -> None:
    empty = knob("mine", 1, domain=None, accepts=IntRange(1, 2), default_values=lambda c, q: ())
    with pytest.raises(SpaceError, match="'mine' has no values"):
        SearchSpace((empty,)).resolve(make_context())


def test_size_and_micro_batch_are_part_of_every_space() -> None:
    space = space_of(dtype=["float32", "bfloat16"]).resolve(make_context())
    assert space.size() == 2
    assert space.baseline == {
        "dtype": "float32",
        "max_length": 1024,
        "per_device_train_batch_size": 8,
    }
    assert space.config(space.baseline)["gradient_accumulation_steps"] == 2
    assert space.inactive == space.removed == ()
