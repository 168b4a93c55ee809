"""How far predicted figures can be trusted, in one place, in the words of every output."""

from __future__ import annotations

from autotune.probe.result import Interval

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

CONFIRM = "`autotune verify RUN` or `autotune search --device cuda` on that card confirms them."


def trust() -> str:
    """Return what is to be said wherever predicted figures are recommended."""
    return (
        f"All figures are {SOURCE}, none is measured: memory within about"
        f" {ALLOCATED_ERROR:.0%} of the bytes allocated (benchmarks/prediction_accuracy.py), for"
        f" which the default budget leaves a margin of {MEMORY_MARGIN:.0%} of the card's memory;"
        f" rates within ±{RATE_ERROR:.0%}. {CONFIRM}"
    )


def rate_interval(median: float) -> Interval:
    """Return a predicted rate or time with all that it may be off by."""
    return Interval(
        median=median, low=median * (1.0 - RATE_ERROR), high=median * (1.0 + RATE_ERROR)
    )
