"""The pick ``highest-fidelity``: what trains most nearly as one would without a memory limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune import objectives
from autotune.report import pareto
from autotune.report.trial import Trial
from autotune.space.knob import infidelity, registry

COVERAGE_DIGITS = 4
"""Shares of the data's loss tokens are compared so far: a row more or less is no difference."""


def most_faithful(trials: Sequence[Trial]) -> Trial | None:
    """Return the feasible trial of the highest fidelity; None if none is feasible.

    It keeps most of the data's loss tokens, then has the most faithful values of the knobs that
    declare an order (:attr:`autotune.space.knob.Knob.fidelity`). Of equal ones it is the fastest,
    and of those that are as fast within the noise the leanest, then the one with the fewest
    changes, then the earliest. It need not be of the Pareto set.
    """
    ranked = sorted(pareto.eligible(trials), key=_key)
    equal = [item for item in ranked if as_faithful(item, ranked[0])]
    equal = pareto.rankable(equal)
    fastest = max(equal, key=_rate, default=None)
    if fastest is None:
        return None
    return min((item for item in equal if _is_as_fast(item, fastest)), key=_leanness)


def as_faithful(a: Trial, b: Trial) -> bool:
    """Whether nothing but rate and memory tells two trials apart."""
    return _key(a) == _key(b)


def settings_of(trial: Trial) -> dict[str, Any]:
    """Return a trial's values of the knobs that say how faithful theirs are."""
    return {
        knob.name: trial.candidate[knob.name]
        for _, knob in registry
        if knob.fidelity is not None and knob.name in trial.candidate
    }


def _key(trial: Trial) -> tuple[float, tuple[int, ...]]:
    return -round(trial.coverage, COVERAGE_DIGITS), infidelity(trial.candidate)


def _rate(trial: Trial) -> float:
    return trial.tokens_per_s.median if trial.tokens_per_s else 0.0


def _is_as_fast(trial: Trial, fastest: Trial) -> bool:
    speed = objectives.tokens_per_s()
    own, best = trial.tokens_per_s, fastest.tokens_per_s
    if own is None or best is None:
        return own is best
    return not pareto.significantly_better(best, own, speed)


def _leanness(trial: Trial) -> tuple[float, int, int]:
    peak = trial.peak_interval
    return peak.median if peak else math.inf, len(trial.changed), trial.number
