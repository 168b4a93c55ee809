"""The memory that a model's weights take at the very least, whatever else a candidate needs."""

from __future__ import annotations

from dataclasses import replace

from autotune.space.context import Context
from autotune.space.knob import Refusal, Remedy
from autotune.space.knobs.packages import missing
from autotune.units import format_gib_apart, format_gib_up

BYTES_PER_PARAMETER = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "8 bits": 1.0,
    "4 bits": 0.5,
}
"""Quantised models keep some layers and the scales in more, so that these are lower bounds."""

_ANY_VERSION = "9999"
"""Of a package that may be installed: later than any that a rule asks for."""

_QUANTISED = {"lora_8bit": "8 bits", "lora_4bit": "4 bits", "lora_4bit_nested": "4 bits"}


def least_bytes(num_parameters: int, form: str) -> int:
    """Return the least bytes of so many parameters in a form of ``BYTES_PER_PARAMETER``."""
    return round(num_parameters * BYTES_PER_PARAMETER[form])


def num_shares(context: Context) -> int:
    """Return among how many processes the weights may be divided; 1 where each holds all."""
    whole = context.device.kind == "cpu" or context.sharding in ("ddp", "zero1", "zero2")
    return 1 if whole else context.num_processes


def smallest_dtype(context: Context, adaptation: str) -> str:
    """Return the smallest value of the knob ``dtype`` that weights can be trained in here."""
    if context.device.supports_bf16:
        return "bfloat16"
    # PyTorch's gradient scaler refuses gradients in float16, which all weights would have.
    # Adapters are kept in a wider dtype by PEFT and TRL.
    return "float16" if context.device.trains_in_fp16 and adaptation != "full" else "float32"


def smallest_form(context: Context) -> str:
    """Return the smallest form of ``BYTES_PER_PARAMETER`` that can be trained on here."""
    adapts = missing(context, ("peft",)) is None
    quantises = adapts and missing(context, ("bitsandbytes",)) is None
    # TRL's adapters on quantised weights have bfloat16 gradients, which fp16's scaler refuses.
    if context.model.quantized or (quantises and not context.device.trains_in_fp16):
        return "4 bits"
    return smallest_dtype(context, "lora" if adapts else "full")


def excess(context: Context, adaptation: str, dtype: str) -> Refusal | None:
    """Return why weights cannot fit the budget even alone; None if they may, or if not known.

    Args:
        context: Its model's parameters and its budget decide.
        adaptation: Value of the knob ``adaptation``; it decides what is quantised.
        dtype: Value of the knob ``dtype``, for weights that are not.
    """
    budget = context.budget_bytes
    if budget is None or context.model.quantized:
        return None  # a quantised checkpoint's parameters take what it says, not what dtype says
    form = _QUANTISED.get(adaptation, dtype)
    shares = num_shares(context)
    least = least_bytes(context.model.num_parameters, form) // shares
    if least <= budget:
        return None
    needed, there = format_gib_apart(least, budget)
    what = (
        f"the weights alone, divided by {shares}, take" if shares > 1 else "the weights alone take"
    )
    return Refusal(
        f"{what} {needed} in {form}, more than the budget of {there}",
        remedies=remedies(context),
    )


def remedies(context: Context) -> tuple[Remedy, ...]:
    """Return all that can make weights fit or be trained, the least change first.

    Which of it helps depends on the device, the packages and the pins.
    """
    device, quantised = context.device, {"adaptation": "lora_4bit"}
    tiny = replace(context.model, num_parameters=1)
    packages = {**context.packages, **dict.fromkeys(("peft", "bitsandbytes"), _ANY_VERSION)}
    found = [
        *(
            Remedy(
                text=f"choose a smaller dtype (dtype={dtype})", pins={"dtype": dtype}, kind="dtype"
            )
            for dtype in ("bfloat16", "float16")
        ),
        Remedy(
            text="train adapters on float16 weights (adaptation=lora, dtype=float16)",
            pins={"adaptation": "lora", "dtype": "float16"},
            kind="dtype",
        ),
        Remedy(
            text="choose 4-bit weights (adaptation=lora_4bit)", pins=quantised, kind="quantised"
        ),
        Remedy(
            text="install peft and bitsandbytes for 4-bit weights (adaptation=lora_4bit)",
            pins=quantised,
            context={"packages": packages},
            kind="quantised",
        ),
        *_larger_budgets(context),
        Remedy(
            text="take a smaller model",
            context={"model": tiny},
            kind="smaller",
            changes="model",
        ),
        Remedy(
            text="take a smaller model and train adapters on its float16 weights (adaptation=lora,"
            " dtype=float16)",
            pins={"adaptation": "lora", "dtype": "float16"},
            context={"model": tiny},
            kind="smaller",
            changes="model",
        ),
    ]
    if device.trains_in_fp16:
        able = replace(device, supports_bf16=True)
        found.append(
            Remedy(
                text="a card with bfloat16, which trains adapters on 4-bit weights",
                pins={**quantised, "dtype": "bfloat16"},
                context={"device": able, "packages": packages},
                changes="device",
            )
        )
    ample = {"budget_bytes": least_bytes(context.model.num_parameters, "float32")}
    whose = "machine" if device.kind == "cpu" else "card"
    found.append(
        Remedy(text=f"a {whose} with more memory", context=ample, changes="device"),
    )
    return tuple(found)


def _larger_budgets(context: Context) -> list[Remedy]:
    """Return the budgets above the present one that hold weights and that the device has."""
    budget, total = context.budget_bytes, context.device.total_bytes
    if budget is None:
        return []
    shares = num_shares(context)
    sizes = {
        least_bytes(context.model.num_parameters, form) // shares for form in BYTES_PER_PARAMETER
    }
    return [
        Remedy(
            text=f"raise --memory-budget above the {format_gib_up(size)} of the weights",
            context={"budget_bytes": size},
            kind="budget",
        )
        for size in sorted(sizes)
        if budget < size and (not total or size < total)
    ]
