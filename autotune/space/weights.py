"""The memory that a model's weights take at the very least, whatever else a candidate needs."""

from __future__ import annotations

from autotune.space.context import Context
from autotune.space.knob import Refusal
from autotune.units import format_gib

BYTES_PER_PARAMETER = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "8 bits": 1.0,
    "4 bits": 0.5,
}
"""Quantised models keep some layers and the scales in more, so that these are lower bounds."""

_QUANTISED = {"lora_8bit": "8 bits", "lora_4bit": "4 bits", "lora_4bit_nested": "4 bits"}


def least_bytes(num_parameters: int, form: str) -> int:
    """Return the least bytes of so many parameters in a form of ``BYTES_PER_PARAMETER``."""
    return round(num_parameters * BYTES_PER_PARAMETER[form])


def smallest_dtype(context: Context, adaptation: str) -> str:
    """Return the smallest value of the knob ``dtype`` that weights can be trained in here."""
    if context.device.supports_bf16:
        return "bfloat16"
    # PyTorch's gradient scaler refuses gradients in float16, which all weights would have.
    # Adapters are kept in a wider dtype by PEFT and TRL.
    return "float16" if context.device.trains_in_fp16 and adaptation != "full" else "float32"


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
    least = least_bytes(context.model.num_parameters, form)
    if least <= budget:
        return None
    remedies = ["raise --memory-budget", "take a smaller model"]
    if form != "4 bits":
        remedies.insert(0, "choose 4-bit weights (adaptation=lora_4bit)")
    smaller = smallest_dtype(context, adaptation)
    if form == "float32" and smaller != form:
        remedies.insert(0, f"choose a smaller dtype (dtype={smaller})")
    elif form == "float32" and smallest_dtype(context, "lora") != form:
        remedies.insert(0, "train adapters on float16 weights (adaptation=lora, dtype=float16)")
    hint = ", or ".join(remedies)
    return Refusal(
        f"the weights alone take {format_gib(least)} in {form}, more than the budget of"
        f" {format_gib(budget)}",
        hint=f"{hint[:1].upper()}{hint[1:]}.",
    )
