"""How far predicted figures can be trusted, in one place, in the words of every output."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.probe.result import Interval
from autotune.units import GIB

SOURCE = "predicted"

ALLOCATED_ERROR = 0.01
"""What predicted bytes of tensors were off by at most, see benchmarks/prediction_accuracy.py."""

MEMORY_MARGIN = 0.05
"""Share of a card's memory that the default budget leaves alone: for what a prediction of the
reserved memory and of the context may be wrong by.

What is reserved depends on the order of the batches. Over 20 configurations it differed by up to
5 % between the short schedule of a prediction and that of a whole probe
(benchmarks/gpu/predicted_vs_measured.py with --measure-on virtual:CARD)."""

RATE_ERROR = 0.25
"""What a predicted rate may be off by: kernels reach unequal shares of a card's peak."""

RATE_CHECKED_ON = "A100"
"""The only card that predicted rates were compared with measurements on."""

HOST_NOTED_BYTES = GIB
"""From here on, what a run holds on the host is worth a note beside its peak on the card."""

HOST_WARNED_BYTES = 64 * GIB
"""Host memory that many a machine with such a card does not have."""

CONFIRM = "`autotune verify RUN` or `autotune search --device cuda` on that card confirms them."


def trust(*cards: str) -> str:
    """Return what is to be said wherever predicted figures are recommended.

    Args:
        cards: Names of the cards that they are predicted for.
    """
    return (
        f"All figures are {SOURCE}, none is measured. Allocated memory: within about"
        f" {ALLOCATED_ERROR:.0%} (benchmarks/prediction_accuracy.py). Used memory, which is"
        " reserved memory and context: less certain, so that the default budget leaves a margin"
        f" of {MEMORY_MARGIN:.0%} of the card's memory. Rates:"
        f" ±{RATE_ERROR:.0%}{_unchecked(cards)}. {CONFIRM}"
    )


def rate_error(card: str = "") -> str:
    """Return what a predicted rate may be off by, in words.

    Args:
        card: Name of the card that it is predicted for; empty if not known.
    """
    return f"±{RATE_ERROR:.0%}{_unchecked([card])}"


def _unchecked(cards: Sequence[str]) -> str:
    others = [card for card in cards if card and RATE_CHECKED_ON not in card]
    return f" (checked against measurements on the {RATE_CHECKED_ON} only)" if others else ""


def rate_interval(median: float) -> Interval:
    """Return a predicted rate or time with all that it may be off by."""
    return Interval(
        median=median, low=median * (1.0 - RATE_ERROR), high=median * (1.0 + RATE_ERROR)
    )
