"""What a search plans differently where every figure is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune import membudget
from autotune.errors import UsageError
from autotune.plan import Plan
from autotune.probe.prediction import MEMORY_MARGIN
from autotune.space.knobs.kernels import TORCH_COMPILE
from autotune.testing.contexts import make_context, make_gpu
from autotune.testing.searches import make_fake_plan
from autotune.units import GIB
from autotune.virtual import cards


def plan_for(folder: Path, card: str, **options: Any) -> Plan:
    device = f"virtual:{card}"
    context = make_context(device=cards.device_info(cards.find(card), device))
    return make_fake_plan(folder, context=context, device=device, **options)


def removed(plan: Plan, knob: str) -> dict[Any, str]:
    return {value: reason for name, value, reason in plan.space.removed if name == knob}


def test_predicted_steps_need_neither_warm_up_nor_repetition(tmp_path: Path) -> None:
    plan = plan_for(tmp_path / "1", "rtx-4090", warmup_steps=3, measured_steps=5)
    # A typical micro-batch in a step of its own, or one beside each of the largest.
    assert plan.steps(1) == (0, 1)
    assert plan.steps(2) == plan.steps(16) == (0, 0)
    assert plan.first_worst_steps == 1
    assert plan.rows_per_step == 2
    fewer = plan_for(tmp_path / "2", "rtx-4090", measured_steps=1)
    assert fewer.steps(1) == (0, 1)


def test_measured_steps_are_as_asked_for(tmp_path: Path) -> None:
    context = make_context(device=make_gpu())
    plan = make_fake_plan(tmp_path, context=context, warmup_steps=3, measured_steps=5)
    assert plan.steps(1) == plan.steps(4) == (3, 5)
    assert plan.first_worst_steps == 2
    assert plan.rows_per_step == 8


@pytest.mark.parametrize("card", ["rtx-4090", "t4", "24GiB", "mi300x"])
def test_the_default_budget_leaves_the_margin_of_a_prediction(card: str, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, card)
    total = plan.context.device.total_bytes
    assert plan.budget_bytes == round(total * (1 - MEMORY_MARGIN))
    assert plan.budget_source == f"the memory of {plan.context.device.label}, less 5%"
    assert not plan.enforced


def test_a_budget_that_was_asked_for_or_kept_stands() -> None:
    device = cards.device_info(cards.find("t4"), "virtual:t4")
    assert membudget.decide(7 * GIB, device, 3 * GIB) == (7 * GIB, "--memory-budget", True)
    assert membudget.decide(None, device, 3 * GIB)[0] == 3 * GIB
    budget, source, enforced = membudget.decide(None, make_gpu(), None)
    assert (budget, enforced) == (round(79 * GIB * 0.9), False)
    assert source == "what Test GPU had free, less 10%"


def test_a_model_that_no_card_of_that_size_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="below the weights"):
        plan_for(tmp_path, "600MiB", memory_budget_bytes=GIB // 4)


def test_a_card_without_bfloat16_trains_in_float16(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "t4", space="sft")
    config = plan.config(plan.space.baseline)
    assert (config["bf16"], config["fp16"]) == (False, True)
    assert removed(plan, "dtype")["bfloat16"] == "Tesla T4 (virtual) does not support bfloat16"
    for seed in range(30):
        candidate = plan.space.draw(
            lambda name, values, ordered, at=seed: values[at % len(values)]
        )
        drawn = plan.config(candidate)
        assert drawn.get("dtype") != "bfloat16"
        assert (drawn["bf16"], drawn["fp16"]) == (False, True)


def test_a_card_with_bfloat16_uses_it(tmp_path: Path) -> None:
    config = (plan := plan_for(tmp_path, "a10g", space="sft")).config(plan.space.baseline)
    assert config["bf16"] is True
    assert "fp16" not in config
    # float16 is for cards without it.
    assert removed(plan, "dtype").keys() == {"float16"}


@pytest.mark.parametrize(
    ("card", "two", "three"),
    [
        (
            "t4",
            "FlashAttention needs compute capability 8.0, and this is 7.5",
            "FlashAttention 3 is built for compute capability 9.0, and this is 7.5",
        ),
        ("4090", None, "FlashAttention 3 is built for compute capability 9.0, and this is 8.9"),
        ("h100", None, None),
    ],
)
def test_flash_attention_is_for_cards_that_have_it(
    card: str, two: str | None, three: str | None, tmp_path: Path
) -> None:
    reasons = removed(plan_for(tmp_path, card, space="sft"), "attn_implementation")
    assert reasons.get("flash_attention_2") == two
    assert reasons.get("flash_attention_3") == three
    # What is installed here is no reason: the card's machine has its own packages.
    assert not any("flash-attn" in reason for reason in reasons.values())


def test_what_needs_a_real_card_is_refused_with_a_reason(tmp_path: Path) -> None:
    plan = plan_for(tmp_path / "1", "h100", space="sft")
    reason = "compiled code can't be run on a card that is not there"
    assert TORCH_COMPILE.refuse is not None
    assert TORCH_COMPILE.refuse("on", {}, plan.context) == reason
    assert TORCH_COMPILE.refuse("on", {}, make_context(device=make_gpu())) is None
    hub = removed(plan, "attn_implementation")["kernels-community/flash-attn2"]
    assert "fetched from the Hub" in hub


def test_a_pin_to_what_the_card_lacks_is_refused(tmp_path: Path) -> None:
    pins = {"attn_implementation": "flash_attention_2"}
    with pytest.raises(UsageError, match=r"needs compute capability 8\.0, and this is 7\.5"):
        plan_for(tmp_path, "t4", space="sft", pins=pins)
