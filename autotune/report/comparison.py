"""A figure that a real run had, against the same of the report, measured or predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.objectives import tokens_per_s
from autotune.probe import prediction
from autotune.probe.result import Interval
from autotune.report.trial import Trial
from autotune.units import format_gib, format_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of a run against the same of the report.

    Attributes:
        name: ``resident peak``, ``allocated peak`` or ``reserved peak`` (bytes), or ``rate``
            (tokens/s).
        found: What this run had.
        reported: The report's figure with its spread: peaks of the probes, quartiles of the steps;
            if predicted, with what it may be off by.
        difference_ratio: ``found`` over the report's figure, less 1.
        is_outside: Whether it lies outside the spread, by more than can be told apart.
        source: ``measured`` or ``predicted``: where the report's figure is from.
        num_values: How many values the report's figure is of: probes, or steps of them. A single
            one has no spread, so that nothing lies outside of it.
    """

    name: str
    found: float
    reported: Interval
    difference_ratio: float
    is_outside: bool
    source: str = "measured"
    num_values: int = 2

    @property
    def has_spread(self) -> bool:
        """Whether there is something to lie outside of: a spread, or a prediction's error."""
        return self.source == prediction.SOURCE or self.num_values > 1

    @classmethod
    def of(cls, name: str, found: float, reported: Interval, num_values: int = 2) -> Comparison:
        """Compare ``found`` with what the report says was measured, in so many values."""
        slack = tokens_per_s().resolution_ratio
        return cls(
            name=name,
            found=found,
            reported=reported,
            difference_ratio=found / reported.median - 1.0,
            is_outside=num_values > 1
            and not (reported.low * (1.0 - slack) <= found <= reported.high * (1.0 + slack)),
            num_values=num_values,
        )

    @classmethod
    def predicted(cls, name: str, found: float, value: float, error: float) -> Comparison:
        """Compare ``found`` with a prediction that may be off by the share ``error``.

        Memory below it is no error: a few steps need not meet the worst batch, which is predicted.
        """
        low, high = value * (1.0 - error), value * (1.0 + error)
        is_low = found < low and name == "rate"
        return cls(
            name=name,
            found=found,
            reported=Interval(median=value, low=low, high=high),
            difference_ratio=found / value - 1.0,
            is_outside=is_low or found > high,
            source=prediction.SOURCE,
        )

    def text(self) -> str:
        """Return it in words."""
        show = format_rate if self.name == "rate" else format_gib
        unit = " tokens/s" if self.name == "rate" else ""
        low, high = show(self.reported.low), show(self.reported.high)
        reported = low if low == high else f"{low} to {high}"
        if self.source == prediction.SOURCE:
            below = not self.is_outside and self.found < self.reported.low
            place = "outside" if self.is_outside else "below" if below else "within"
            return (
                f"{self.name} {show(self.found)}{unit} measured, {self.difference_ratio:+.1%}"
                f" against the predicted {show(self.reported.median)}, {place} what that may be"
                f" off by ({reported})"
            )
        against = (
            f"{self.name} {show(self.found)}{unit}, {self.difference_ratio:+.1%} against the"
            f" report's {show(self.reported.median)}"
        )
        if not self.has_spread:
            what = "step" if self.name == "rate" else "probe"
            return f"{against}, of a single {what}: there is no spread to be within"
        place = "outside" if self.is_outside else "within"
        return f"{against}, {place} its spread ({reported})"


def compare(
    trial: Trial,
    *,
    resident: int | None = None,
    allocated: int | None = None,
    reserved: int | None = None,
    rate: float | None = None,
) -> tuple[Comparison, ...]:
    """Return what a run had against what the report says of its trial; like with like.

    Args:
        trial: The trial.
        resident: Largest resident size of a process of the run; None if not known.
        allocated: Peak of the device memory allocated; None if not known.
        reserved: Peak of the device memory reserved; None if not known.
        rate: Tokens per second; None if not known.
    """
    found = []
    if trial.source == prediction.SOURCE:
        peaks = [
            ("allocated", allocated, prediction.ALLOCATED_ERROR),
            ("reserved", reserved, prediction.MEMORY_MARGIN),
        ]
        for name, value, error in peaks:
            reported = _peaks(trial, f"{name}_bytes")
            if value is not None and reported:
                found.append(
                    Comparison.predicted(f"{name} peak", value, float(reported[-1]), error)
                )
        if rate is not None and trial.tokens_per_s is not None:
            median = trial.tokens_per_s.median
            found.append(Comparison.predicted("rate", rate, median, prediction.RATE_ERROR))
        return tuple(found)
    known = _peaks(trial, "resident_bytes")
    if resident is not None and known:
        # The greatest is what the report calls the peak.
        spread = Interval(median=known[-1], low=known[0], high=known[-1])
        found.append(Comparison.of("resident peak", resident, spread, len(known)))
    if rate is not None and trial.tokens_per_s is not None:
        steps = sum(len(item.steps) for item in trial.measurements)
        found.append(Comparison.of("rate", rate, trial.tokens_per_s, steps))
    return tuple(found)


def _peaks(trial: Trial, name: str) -> Sequence[int]:
    values = [item.peak_of(name) for item in trial.measurements]
    return sorted(value for value in values if value is not None)
