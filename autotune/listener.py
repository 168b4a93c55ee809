"""When a search ends, and who hears how it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.errors import UsageError
from autotune.plan import Plan
from autotune.report.model import Report
from autotune.report.trial import Trial

DEFAULT_TRIALS = 40
DEFAULT_MIN_GAIN = 0.001
"""A thousandth of what the front dominates is less than probes of one candidate differ by."""


@dataclass(frozen=True, slots=True)
class Budget:
    """When a search ends.

    Attributes:
        trials: Trials that take a probe, the baseline included; None for no limit.
        wall_time_s: Time after which no further probe starts; None for no limit.
        min_gain: Share (0 to 1) of the volume that the Pareto set dominates, which a candidate
            must be expected to add to be worth a probe. The search ends before its budget once
            none is; 0 uses the budget up. Only the sampler ``learned`` expects anything.
    """

    trials: int | None = DEFAULT_TRIALS
    wall_time_s: float | None = None
    min_gain: float = DEFAULT_MIN_GAIN

    def __post_init__(self) -> None:
        if self.trials is not None and self.trials < 1:
            raise UsageError(f"a budget of {self.trials} trials probes nothing.")
        if self.wall_time_s is not None and self.wall_time_s <= 0:
            raise UsageError("a wall-time budget must be greater than zero.")
        if not 0.0 <= self.min_gain < 1.0:
            raise UsageError("the least gain must be from 0 to below 1.")


class Listener(Protocol):
    """Hears of a search's progress; all methods are optional no-ops in :class:`Silent`."""

    def on_plan(self, plan: Plan, budget: Budget) -> None:
        """Hear what will be searched."""
        ...

    def on_probe(self, number: int, candidate: Mapping[str, Any]) -> None:
        """Hear that a probe starts."""
        ...

    def on_trial(self, trial: Trial, report: Report) -> None:
        """Hear of a finished or confirmed trial; ``report`` is current."""
        ...

    def on_screen(self, num_done: int, num_all: int) -> None:
        """Hear how many candidates were predicted before they are probed, and of how many.

        It is heard at the start and after each prediction. Both are alike once, at the end, which
        may be early.
        """
        ...

    def on_confirm(self, numbers: Sequence[int]) -> None:
        """Hear that the finalists are probed again."""
        ...

    def on_beyond(self, numbers: Sequence[int]) -> None:
        """Hear that nothing fits, and that trials are predicted without the card's limit."""
        ...


class Silent:
    """A listener that does nothing."""

    def on_plan(self, plan: Plan, budget: Budget) -> None:
        """Do nothing."""

    def on_probe(self, number: int, candidate: Mapping[str, Any]) -> None:
        """Do nothing."""

    def on_trial(self, trial: Trial, report: Report) -> None:
        """Do nothing."""

    def on_screen(self, num_done: int, num_all: int) -> None:
        """Do nothing."""

    def on_confirm(self, numbers: Sequence[int]) -> None:
        """Do nothing."""

    def on_beyond(self, numbers: Sequence[int]) -> None:
        """Do nothing."""
