"""One trial against another: the gain over the baseline, and what came closest to fitting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune import objectives
from autotune.errors import NoFeasibleConfigError
from autotune.probe.result import Outcome
from autotune.report import pareto
from autotune.report.trial import Trial
from autotune.units import format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A trial against the baseline.

    Attributes:
        rate_ratio: Its median rate over the baseline's; above 1 is faster.
        memory_ratio: Its median peak memory over the baseline's; below 1 is leaner.
        rate_is_tied: Whether the difference in rate lies within the noise.
        memory_is_tied: Whether the difference in memory lies within the noise.
    """

    rate_ratio: float
    memory_ratio: float
    rate_is_tied: bool
    memory_is_tied: bool


def comparable(a: Trial, b: Trial) -> bool:
    """Whether two trials' numbers may be set against each other.

    They may not if one is predicted and the other measured, or if device, driver, host or
    versions differ between any two of their results that finished.
    """
    if a.source != b.source:
        return False
    finished = [item for item in (*a.results, *b.results) if item.outcome is Outcome.OK]
    return all(item.environment == finished[0].environment for item in finished)


def gain_of(trial: Trial, baseline: Trial | None) -> Gain | None:
    """Return a trial's rate and memory against the baseline's; None if they cannot be compared."""
    if baseline is None or not comparable(trial, baseline):
        return None
    rate, base_rate = trial.tokens_per_s, baseline.tokens_per_s
    peak, base_peak = trial.peak_interval, baseline.peak_interval
    if rate is None or base_rate is None or peak is None or base_peak is None:
        return None
    if not base_rate.median or not base_peak.median:
        return None
    return Gain(
        rate_ratio=rate.median / base_rate.median,
        memory_ratio=peak.median / base_peak.median,
        rate_is_tied=pareto.tied(trial, baseline, (objectives.tokens_per_s(),)),
        memory_is_tied=pareto.tied(trial, baseline, (objectives.peak_memory(),)),
    )


def closest_to_feasible(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial that ran but is the least over its limits; None if none ran."""
    ran = [item for item in trials if item.outcome is Outcome.OK and item.measurement is not None]
    return min(ran, key=lambda item: (_excess(item), item.number), default=None)


def nothing_fits(trials: Sequence[Trial], budget_bytes: int | None) -> NoFeasibleConfigError:
    """Return the error for a search without a feasible trial: what came closest, what to do."""
    if not trials:
        return NoFeasibleConfigError(
            "no trial has ended, so there is nothing to recommend.",
            hint="Let the search run longer.",
        )
    hint = "Raise the memory budget, accept less coverage, or widen the search space."
    closest = closest_to_feasible(trials)
    if closest is None:
        counts = Counter(item.outcome.value for item in trials)
        ended = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        limit = "" if budget_bytes is None else f" within {format_gib(budget_bytes)}"
        return NoFeasibleConfigError(
            f"none of {len(trials)} trials ran{limit}: {ended}.", hint=hint
        )
    over = ", ".join(
        f"{name} by {value:.1%}" for name, value in closest.violations.items() if value > 0
    )
    limit = "" if budget_bytes is None else f" of a budget of {format_gib(budget_bytes)}"
    kind = "" if closest.source == "measured" else f"{closest.source} "
    return NoFeasibleConfigError(
        f"none of {len(trials)} trials is within every limit; trial {closest.number} came closest"
        f" with a {kind}peak of {format_gib(closest.peak_bytes)}{limit}"
        f" (over: {over or 'not known'}).",
        hint=hint,
    )


def _excess(trial: Trial) -> float:
    return sum(value for value in trial.violations.values() if value > 0)
