"""What a reader of a predicted peak could misread, as notes in whole sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.probe.result import Measurement, phase_name
from autotune.units import format_gib

_AMONG_LARGEST = 3
_MASK_SHARE = 0.1
"""Share of the peak from which a mask is worth a note."""


def note_on_decision(measured: Measurement, limit_bytes: int) -> str:
    """Return where the verdict's peak was, if a make-up of the allocated peak does not show it.

    Args:
        measured: A prediction over its limit.
        limit_bytes: What may be reserved.

    Returns:
        A note; empty if the peak of allocated memory is over the limit in the same phase.
    """
    allocated, decides = _allocated_phase(measured), measured.peak_phase
    shown, peak = measured.phases[allocated].allocated_bytes, measured.phases[decides]
    if shown is None or peak.allocated_bytes is None:
        return ""
    if decides == allocated and shown > limit_bytes:
        return ""
    return (
        f"make-up and chart show the peak of allocated memory, {format_gib(shown)} in"
        f" {phase_name(allocated)}. What decides the verdict is reserved memory and context, whose"
        f" peak is in {phase_name(decides)}: {format_gib(peak.reserved_bytes)} reserved there, for"
        f" at most {format_gib(peak.allocated_bytes)} allocated at once. The rest is"
        " fragmentation: free parts of what the allocator holds, into which the requests did not"
        " fit."
    )


def mask_bytes(config: Mapping[str, Any], makeup: Mapping[str, Any] | None) -> int:
    """Return the bytes of attention masks among the largest groups of a peak; 0 if there is none.

    Args:
        config: The configuration, which must join its rows into one and use PyTorch's attention.
        makeup: What its peak is made of.
    """
    joined = config.get("padding_free") or config.get("packing")
    if not joined or config.get("attn_implementation", "sdpa") != "sdpa" or makeup is None:
        return 0
    groups = makeup["largest"][:_AMONG_LARGEST]
    found = sum(group["bytes"] for group in groups if _is_mask(group))
    return int(found) if found >= _MASK_SHARE * makeup["peak_bytes"] else 0


def note_on_mask(nbytes: int, labels: list[str]) -> str:
    """Return that FlashAttention would do without a mask of so many bytes on these cards."""
    return (
        f"{format_gib(nbytes)} of the peak are the attention mask of rows joined into one."
        f" attn_implementation: flash_attention_2 has none; {', '.join(labels)} can run it, with"
        " the package flash-attn installed there."
    )


def _is_mask(group: Mapping[str, Any]) -> bool:
    # transformers joins a mask's conditions, and PyTorch's attention converts it to numbers.
    in_attention = "attn" in group["module"] or "attention" in group["module"]
    return group["op"] == "bitwise_and" or (group["op"] == "where" and in_attention)


def _allocated_phase(measured: Measurement) -> str:
    return max(measured.phases, key=lambda name: measured.phases[name].allocated_bytes or 0)
