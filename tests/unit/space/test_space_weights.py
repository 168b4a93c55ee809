"""Weights that cannot fit the budget even alone are not drawn, and the reason is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from space_kit import FULL, QUICK, differing, resolve, space_of

from autotune.errors import SpaceError
from autotune.space.context import Context
from autotune.space.weights import excess, least_bytes
from autotune.testing.contexts import make_context, make_gpu, make_model
from autotune.units import GIB

EIGHT_BILLION = 8_190_735_360
BUDGET = round(22.8 * GIB)
OLD = make_gpu(supports_bf16=False, capability=(7, 5))
IN_FLOAT32 = "the weights alone take 30.51 GiB in float32, more than the budget of 22.80 GiB"


def context_of(
    num_parameters: int = EIGHT_BILLION, budget: int | None = BUDGET, **changes: Any
) -> Context:
    values = {"device": make_gpu(), "global_batch": 8, **changes}
    model = make_model(num_parameters=num_parameters)
    return make_context(model=model, budget_bytes=budget, **values)


@pytest.mark.parametrize("space", [FULL, QUICK])
def test_unquantised_float32_weights_above_the_budget_are_not_drawn(space: Any) -> None:
    found = resolve(context_of(), space)
    assert found.baseline["adaptation"] == "full"
    assert found.baseline["dtype"] == "bfloat16"
    assert f"The baseline uses dtype=bfloat16 instead of float32: {IN_FLOAT32}." in found.notices
    drawn = {(item["adaptation"], item["dtype"]) for item in found.enumerate(50_000)}
    assert ("full", "float32") not in drawn
    assert ("lora", "float32") not in drawn
    assert ("lora_4bit", "float32") in {
        (item["adaptation"], item["dtype"])
        for item in [differing(found, adaptation="lora_4bit", dtype="float32")]
    }


@pytest.mark.parametrize(
    ("adaptation", "dtype", "bytes_per_parameter"),
    [
        ("full", "float32", 4),
        ("lora", "float32", 4),
        ("full", "bfloat16", 2),
        ("lora", "float16", 2),
        ("lora_8bit", "float32", 1),
        ("lora_8bit", "bfloat16", 1),
        ("lora_4bit", "float32", 0.5),
        ("lora_4bit_nested", "bfloat16", 0.5),
    ],
)
def test_only_what_surely_does_not_fit_is_refused(
    adaptation: str, dtype: str, bytes_per_parameter: float
) -> None:
    least = int(1_000_000 * bytes_per_parameter)
    assert excess(context_of(1_000_000, least), adaptation, dtype) is None
    reason = excess(context_of(1_000_000, least - 1), adaptation, dtype)
    assert reason is not None
    assert "more than the budget" in reason
    assert all(remedy.text for remedy in reason.remedies)


def test_nothing_is_refused_without_a_budget_or_for_a_quantised_checkpoint() -> None:
    assert excess(context_of(budget=None), "full", "float32") is None
    quantised = replace(context_of(), model=make_model(num_parameters=10**12, quantized=True))
    assert excess(quantised, "lora", "float32") is None
    assert resolve(context_of(budget=None)).baseline["dtype"] == "float32"


def test_a_space_that_does_not_name_dtype_goes_on_with_the_nearest() -> None:
    space = space_of("batching", "max_length", "adaptation")
    assert resolve(context_of(1_000_000_000), space).baseline["dtype"] == "float32"
    found = resolve(context_of(), space)
    assert found.baseline["dtype"] == "bfloat16"
    assert any(IN_FLOAT32 in notice for notice in found.notices)


def test_a_pinned_dtype_takes_adaptations_away_with_its_reason() -> None:
    found = resolve(context_of(), QUICK, dtype="float32")
    assert found.values()["adaptation"] == ("lora_4bit",)
    reasons = {(name, value): reason for name, value, reason in found.removed}
    assert IN_FLOAT32 in reasons["adaptation", "full"]


@pytest.mark.parametrize(
    ("pins", "num_parameters", "named"),
    [
        (
            {"dtype": "float32", "adaptation": "full"},
            EIGHT_BILLION,
            (
                "contradict each other",
                IN_FLOAT32,
                "dtype=bfloat16",
                "lora_4bit",
                "--memory-budget",
            ),
        ),
        (
            {"adaptation": "full"},
            14_000_000_000,
            ("adaptation=full is not possible", "in bfloat16", "lora_4bit", "--memory-budget"),
        ),
        (
            {"adaptation": "lora_4bit"},
            70_000_000_000,
            ("in 4 bits", "--memory-budget", "smaller model"),
        ),
    ],
)
def test_an_error_says_what_would_help(
    pins: dict[str, str], num_parameters: int, named: tuple[str, ...]
) -> None:
    with pytest.raises(SpaceError) as caught:
        resolve(context_of(num_parameters), QUICK, **pins)
    for text in named:
        assert text in f"{caught.value.message} {caught.value.hint}"


def hint_with(context: Context, **pins: Any) -> str:
    """Return the hint of the error that the pins end in."""
    with pytest.raises(SpaceError) as caught:
        resolve(context, QUICK, **pins)
    return caught.value.hint


def test_a_remedy_that_the_device_lacks_is_not_named() -> None:
    hint = hint_with(context_of(device=OLD), adaptation="full", dtype="float32")
    assert "dtype=bfloat16" not in hint
    assert "lora_4bit" not in hint


T4 = make_gpu(
    label="Tesla T4",
    supports_bf16=False,
    capability=(7, 5),
    total_bytes=round(14.56 * GIB),
    free_bytes=round(14.56 * GIB),
)
"""The card of the hints that led from one to the next and back."""


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"adaptation": "lora", "dtype": "float16"},
        {"adaptation": "full"},
    ],
)
def test_where_nothing_helps_on_the_card_no_hint_says_that_it_would(pins: dict[str, str]) -> None:
    context = context_of(device=T4, budget=round(13.83 * GIB))
    assert hint_with(context, **pins) == (
        "Take a smaller model, or a card with bfloat16, which trains adapters on 4-bit weights,"
        " or a card with more memory."
    )


def test_what_no_model_makes_possible_is_left_out_of_the_hint() -> None:
    context = context_of(device=T4, budget=round(13.83 * GIB))
    assert hint_with(context, adaptation="lora_4bit") == (
        "Take a smaller model and train adapters on its float16 weights (adaptation=lora,"
        " dtype=float16), or a card with bfloat16, which trains adapters on 4-bit weights."
    )


def test_a_hint_names_only_what_can_be_drawn() -> None:
    three = context_of(3_000_000_000, round(13.83 * GIB), device=T4)
    assert hint_with(three, adaptation="lora_4bit").startswith(
        "Train adapters on float16 weights (adaptation=lora, dtype=float16)"
    )
    assert resolve(three, QUICK, adaptation="lora", dtype="float16").size()
    # A budget is named with its figure, and only up to what the device has.
    small = context_of(3_000_000_000, 5 * GIB, device=T4)
    assert hint_with(small, adaptation="lora") == (
        "Raise --memory-budget above the 5.59 GiB of the weights, or take a smaller model."
    )
    assert resolve(replace(small, budget_bytes=round(5.59 * GIB)), QUICK, adaptation="lora").size()
    without = context_of(packages={"peft": "0.21.2"}, budget=10 * GIB)
    hint = hint_with(without, adaptation="lora_4bit")
    assert hint.startswith("Install peft and bitsandbytes for 4-bit weights")


def test_only_pins_that_help_are_to_be_dropped() -> None:
    context = context_of(1_000_000, device=OLD)
    hint = hint_with(context, adaptation="full", dtype="float16")
    assert hint.startswith("Drop one of them.")
    context = context_of(1_000_000, device=OLD, packages={"torch": "2.13.0"})
    assert hint_with(context, adaptation="full", dtype="float16").startswith("Drop dtype=float16.")


@pytest.mark.parametrize("space", [FULL, QUICK])
def test_a_device_without_bfloat16_draws_float16_with_adapters_alone(space: Any) -> None:
    found = resolve(context_of(1_000_000, device=OLD), space)
    drawn = {item["dtype"] for item in found.enumerate(5_000) if item["adaptation"] == "full"}
    assert drawn == {"float32"}
    assert found.values()["dtype"] == ("float32", "float16")
    half = differing(found, adaptation="lora", dtype="float16")
    config = found.config(half)
    assert (config["dtype"], config["bf16"], config["fp16"]) == ("float16", False, True)


def test_without_bfloat16_float16_lets_adapters_fit() -> None:
    found = resolve(context_of(device=OLD), QUICK)
    assert found.values()["adaptation"] == ("lora",)
    assert found.baseline["dtype"] == "float16"
    removed = {(name, value): reason for name, value, reason in found.removed}
    assert "adapters in bfloat16" in removed["adaptation", "lora_4bit"]
    assert "more than the budget" in removed["adaptation", "full"]


def test_float16_is_named_where_it_would_help() -> None:
    hint = hint_with(context_of(device=OLD), adaptation="full")
    assert "adaptation=lora, dtype=float16" in hint
    hint = hint_with(context_of(device=OLD), adaptation="lora", dtype="float32")
    assert "(dtype=float16)" in hint
    assert "adaptation=lora, dtype" not in hint


def test_with_bfloat16_nothing_but_the_reason_is_new() -> None:
    found = resolve(context_of(1_000_000), QUICK)
    assert found.values()["dtype"] == ("float32", "bfloat16")
    with pytest.raises(SpaceError, match="supports bfloat16"):
        resolve(context_of(), QUICK, dtype="float16", adaptation="lora")


def test_least_bytes() -> None:
    assert least_bytes(10, "float32") == 40
    assert least_bytes(10, "4 bits") == 5


# --- the leanest candidate ----------------------------------------------------------------------


def test_the_leanest_candidate_takes_every_knob_s_leanest_legal_value() -> None:
    lean = resolve(context_of(min_coverage=0.95)).leanest
    assert lean["adaptation"] == "lora_4bit_nested"
    assert lean["dtype"] == "bfloat16"
    assert lean["checkpointing"] == "full"
    assert lean["per_device_train_batch_size"] == 1
    assert lean["optim"] == "adamw_8bit"
    assert lean["allocator"] == "expandable_segments"
    assert lean["lora_r"] == 8
    lengths = resolve(context_of(min_coverage=0.95)).values()["max_length"]
    assert lean["max_length"] >= min(lengths)


@pytest.mark.parametrize("min_coverage", [0.0, 0.5, 0.95])
def test_the_leanest_candidate_keeps_the_coverage(min_coverage: float) -> None:
    space = resolve(context_of(min_coverage=min_coverage))
    legal = {
        item["max_length"]
        for item in resolve(context_of(min_coverage=min_coverage), QUICK).enumerate()
        if item["batching"] == "padded"
    }
    assert space.coverage(space.leanest) >= min_coverage
    assert space.leanest["max_length"] <= min(legal)


def test_the_leanest_candidate_is_legal_and_keeps_pins() -> None:
    pins = {"adaptation": "full", "per_device_train_batch_size": "4", "optim": "adamw_torch"}
    space = resolve(context_of(), FULL, **pins)
    params = space.params(space.leanest)
    assert space.draw(lambda name, values, ordered: params[name]) == space.leanest
    assert space.leanest["adaptation"] == "full"
    assert space.leanest["per_device_train_batch_size"] == 4
    assert space.leanest["optim"] == "adamw_torch"


def test_without_bitsandbytes_the_leanest_candidate_does_without() -> None:
    packages = {"peft": "0.21.2", "torch": "2.13.0"}
    lean = resolve(context_of(packages=packages)).leanest
    assert lean["adaptation"] == "lora"
    assert lean["optim"] == "adafactor"


# --- what loading needs -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "failed", "implied"),
    [
        ({"adaptation": "lora"}, {}, True),
        ({"adaptation": "lora", "lora_r": 64}, {"optim": "adafactor"}, True),
        ({"checkpointing": "none", "optim": "adamw_8bit"}, {"max_length": 512}, True),
        ({"per_device_train_batch_size": 1, "batching": "bfd"}, {}, True),
        ({}, {"adaptation": "lora"}, True),  # gradients of all weights outweigh adapters
        ({}, {"dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16"}, {}, False),
        ({"adaptation": "lora_8bit"}, {}, False),
        ({"adaptation": "lora_4bit"}, {"adaptation": "lora_4bit_nested"}, False),
        ({"allocator": "expandable_segments"}, {}, False),
        ({"adaptation": "lora", "lora_r": 8}, {"adaptation": "lora", "lora_r": 16}, False),
        ({"adaptation": "lora", "lora_r": 16}, {"adaptation": "lora", "lora_r": 8}, True),
        (
            {"adaptation": "lora_4bit", "dtype": "float32"},
            {"adaptation": "lora_4bit", "dtype": "bfloat16"},
            False,  # what is not quantised is cast while it is loaded
        ),
    ],
)
def test_what_fails_to_load_proves_that_the_same_weights_do(
    candidate: dict[str, Any], failed: dict[str, Any], implied: bool
) -> None:
    space = resolve(context_of(budget=None))
    one, other = differing(space, **candidate), differing(space, **failed)
    assert space.loads_at_least(one, other) is implied


def test_on_a_cpu_the_rows_are_loaded_beside_the_weights() -> None:
    space = resolve(make_context())
    assert not space.loads_at_least(differing(space, batching="bfd"), space.baseline)
    assert space.loads_at_least(differing(space, checkpointing="none"), space.baseline)


def test_a_knob_that_says_nothing_of_loading_must_be_equal() -> None:
    space = resolve(context_of(budget=None))
    compiled = {**space.baseline, "torch_compile": "on"}
    assert not space.loads_at_least(compiled, space.baseline)
    assert space.loads_at_least(compiled, compiled)
