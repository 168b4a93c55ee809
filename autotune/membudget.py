"""The memory that a candidate may take: how much it is, and whether anything fits in it at all."""

from __future__ import annotations

from autotune.errors import TooSmallError, UsageError
from autotune.probe.prediction import MEMORY_MARGIN
from autotune.report.compare import ASKED
from autotune.space.context import Context, DeviceInfo
from autotune.space.weights import least_bytes, num_shares, smallest_form
from autotune.units import MIB, format_gib, format_gib_apart, format_gib_up

HEADROOM = 0.10
"""Share of the free memory that the default budget leaves alone."""

LEAST_BYTES = MIB
"""Less than this was meant in another unit."""

MOST_GIB = 1 << 14
"""A bare number up to this may have been meant in GiB."""


def check_asked(num_bytes: int | None) -> None:
    """Refuse a budget that can only be a slip: a number without its unit.

    Raises:
        UsageError: Naming what may have been meant.
    """
    if num_bytes is None or num_bytes >= LEAST_BYTES:
        return
    meant = f"Did you mean {num_bytes}GiB? " if 0 < num_bytes <= MOST_GIB else ""
    raise UsageError(
        f"a memory budget of {num_bytes:,} bytes holds nothing.",
        hint=f"{meant}Without a unit, a size is in bytes.",
    )


def decide(asked: int | None, device: DeviceInfo, kept: int | None) -> tuple[int, str, bool]:
    """Return the budget in bytes, how it came about, and whether it limits allocations.

    Args:
        asked: Bytes that the user asked for; None for what is free.
        device: What the probes run on.
        kept: Budget of the search being resumed; None for a new one.

    Raises:
        UsageError: If more is asked for than the device has.
    """
    if asked is not None:
        return _within(asked, device), ASKED, True
    share = MEMORY_MARGIN if device.is_virtual else HEADROOM
    budget = kept or round(device.free_bytes * (1.0 - share))
    whose = "the memory of {}" if device.is_virtual else "what {} had free"
    source = f"{whose.format(device.label)}, less {share:.0%}"
    # On the host an unlimited probe could take the search and the machine down with it.
    return budget, source, device.kind == "cpu"


def _within(asked: int, device: DeviceInfo) -> int:
    """Return what is asked for; refuse more than there is, below which probes would fail.

    Who copies the memory as it is printed, which may be rounded up, means all of it.
    """
    total = device.total_bytes
    if not total or asked <= total:
        return asked
    if format_gib(asked) == format_gib(total):
        return total
    raise UsageError(
        f"a budget of {format_gib(asked)} is more than {device.label} has: {format_gib(total)}.",
        hint="Lower --memory-budget, or leave it out to take what the device has.",
    )


def own_budget_notice(asked: int | None, device: DeviceInfo) -> str:
    """Return what to know of a budget of the user's on a virtual card; empty otherwise."""
    if asked is None or not device.is_virtual:
        return ""
    return (
        f"The budget is taken as you gave it: the margin of {MEMORY_MARGIN:.0%} that the default"
        " one keeps, for what predictions of memory may be wrong by, is not taken off."
    )


def check_occupied(budget: int, occupied: int, device: DeviceInfo) -> None:
    """Refuse a budget that is used up before a model is loaded: every probe would fail alike.

    Args:
        budget: Bytes that a candidate may take.
        occupied: Bytes that a worker takes with the training stack imported, on a virtual card
            its context; 0 if not known.
        device: What the probes run on.

    Raises:
        TooSmallError: Naming both figures.
    """
    if budget > occupied:
        return
    whose = "the context takes" if device.is_virtual else "PyTorch and TRL take"
    little, taken = format_gib_apart(budget, occupied)
    has_more = not device.total_bytes or device.total_bytes > occupied
    raise TooSmallError(
        f"a budget of {little} is below what {whose} before a model is loaded: {taken}.",
        hint="Raise --memory-budget above that, and by what the model needs."
        if has_more
        else f"Choose a {_place(device)} with more memory.",
    )


def check_weights(budget: int, occupied: int, context: Context) -> None:
    """Refuse a budget that the weights alone exceed in the smallest form there is.

    4-bit weights take half a byte; without bitsandbytes bfloat16 takes two.

    Raises:
        TooSmallError: Naming the figures.
    """
    small = context.model.quantized or "bitsandbytes" in context.packages
    num_parameters, device = context.model.num_parameters, context.device
    least = least_bytes(num_parameters, "4 bits" if small else "bfloat16") // num_shares(context)
    if budget >= occupied + least:
        return
    whose = "context" if device.is_virtual else "PyTorch and TRL"
    beside = f", beside the {format_gib(occupied)} of {whose}" if occupied else ""
    little, weights = format_gib_apart(budget, least)
    raise TooSmallError(
        f"a budget of {little} is below the weights: {num_parameters:,} parameters take at least"
        f" {weights}{beside}.",
        hint=_hint_for_weights(occupied, context),
    )


def _hint_for_weights(occupied: int, context: Context) -> str:
    """Return what helps where no weights fit, a larger budget only if the device has it."""
    device = context.device
    form = smallest_form(context)
    needed = occupied + least_bytes(context.model.num_parameters, form) // num_shares(context)
    if not device.total_bytes or needed < device.total_bytes:
        return f"Raise --memory-budget above {format_gib_up(needed)}, or choose a smaller model."
    return f"Choose a smaller model, or a {_place(device)} with more memory."


def _place(device: DeviceInfo) -> str:
    return "machine" if device.kind == "cpu" else "card"
