"""What earlier trials say about a candidate before it is probed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.probe.result import Outcome
from autotune.report.trial import Trial
from autotune.space.space import ResolvedSpace

_LOADING = "load"
_TOO_LARGE = (Outcome.OK, Outcome.DEVICE_OOM, Outcome.HOST_OOM)


def implied_by(
    space: ResolvedSpace, candidate: Mapping[str, Any], trials: Sequence[Trial]
) -> tuple[Trial, str] | None:
    """Return a trial that proves that a candidate does not fit, and why; None if none does."""
    for trial in trials:
        if trial.outcome is not Outcome.DEVICE_OOM or trial.num_probes == 0:
            continue
        in_load = trial.results[-1].phase == _LOADING
        if in_load and space.loads_at_least(candidate, trial.candidate):
            return trial, f"loads at least the weights that trial {trial.number} had no room for"
        if space.demands_at_least(candidate, trial.candidate):
            return trial, f"needs at least the memory that trial {trial.number} ran out of"
    return None


def is_too_large(trial: Trial) -> bool:
    """Whether a trial ran out of memory or went over a limit, so that a leaner one may fit."""
    return not trial.feasible and trial.outcome in _TOO_LARGE


def changed(candidate: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs in which a candidate differs from the baseline."""
    return {
        name: value
        for name, value in candidate.items()
        if name not in baseline or baseline[name] != value
    }
