"""The pick ``highest-fidelity``: what trains most nearly as one would without a memory limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autotune.report import pareto
from autotune.report.trial import Trial
from autotune.space.knob import infidelity, registry

COVERAGE_DIGITS = 4
"""Shares of the data's loss tokens are compared so far: a row more or less is no difference."""


def most_faithful(trials: Sequence[Trial]) -> Trial | None:
    """Return the feasible trial of the highest fidelity; None if none is feasible.

    It keeps most of the data's loss tokens, then has the most faithful values of the knobs that
    declare an order (:attr:`autotune.space.knob.Knob.fidelity`); of equal ones it is the fastest,
    then the leanest, then the earliest. It need not be of the Pareto set.
    """
    return min(pareto.eligible(trials), key=_key, default=None)


def as_faithful(a: Trial, b: Trial) -> bool:
    """Whether nothing but rate and memory tells two trials apart."""
    return _key(a)[:2] == _key(b)[:2]


def settings_of(trial: Trial) -> dict[str, Any]:
    """Return a trial's values of the knobs that say how faithful theirs are."""
    return {
        knob.name: trial.candidate[knob.name]
        for _, knob in registry
        if knob.fidelity is not None and knob.name in trial.candidate
    }


def _key(trial: Trial) -> tuple[float, tuple[int, ...], float, float, int]:
    rate, peak = trial.tokens_per_s, trial.peak_interval
    return (
        -round(trial.coverage, COVERAGE_DIGITS),
        infidelity(trial.candidate),
        -rate.median if rate else 0.0,
        peak.median if peak else math.inf,
        trial.number,
    )
