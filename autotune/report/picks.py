"""Why a pick is not the trial with the extreme figure, where it is not: said below the table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.probe import prediction
from autotune.probe.result import Outcome
from autotune.report.compare import comparable
from autotune.report.model import SIZE_LIMIT, Report
from autotune.report.trial import Trial
from autotune.units import format_gib, format_rate

FEW = 0.1
"""Share of the candidates below which a search has seen few of them."""


def pick_notes(report: Report) -> list[str]:
    """Return whole sentences about picks that a reader of the figures would not expect."""
    picks = report.picks()
    if not picks:
        return []
    fastest, leanest = report.pick(picks["fastest"]), report.pick(picks["leanest"])
    rivals = [
        item
        for item in report.trials
        if item.feasible and item.outcome is Outcome.OK and comparable(item, leanest)
    ]
    notes = []
    if fastest.number not in report.pareto_numbers:
        notes.append(
            "No member of the Pareto set has a higher median rate than the baseline, so that"
            f" [fastest] is the baseline, trial {fastest.number}."
        )
    elif fastest.number == report.baseline_number:
        notes.append(
            f"[fastest] is the baseline, trial {fastest.number}: no other member of the Pareto set"
            " has a higher median rate."
        )
    least = min(rivals, key=lambda item: (item.peak_bytes or 0, item.number))
    if (least.peak_bytes or 0) < (leanest.peak_bytes or 0):
        aside = "and is slower" if _rate(least) < _rate(leanest) else "as good as a tie"
        notes.append(
            f"[leanest] is trial {leanest.number} at {format_gib(leanest.peak_bytes)}: trial"
            f" {least.number}, at {format_gib(least.peak_bytes)}, needs less within the noise"
            f" only, {aside}."
        )
    first = max(rivals, key=lambda item: (_rate(item), -item.number))
    if _rate(first) > _rate(fastest):
        notes.append(
            f"[fastest] is trial {fastest.number} at {format_rate(_rate(fastest))} tokens/s: trial"
            f" {first.number}, at {format_rate(_rate(first))}, is faster within the noise only."
        )
    return [*notes, *_predicted_lead(fastest, rivals), *_few_tried(report)]


def _predicted_lead(fastest: Trial, rivals: Sequence[Trial]) -> list[str]:
    """Return that the order may be another on the card, if predictions are not that good."""
    others = [item for item in rivals if item.number != fastest.number]
    if fastest.source != prediction.SOURCE or not others:
        return []
    second = max(others, key=lambda item: (_rate(item), -item.number))
    lead = _rate(fastest) / _rate(second) - 1 if _rate(second) else math.inf
    if not 0 <= lead <= prediction.RATE_ERROR:
        return []
    return [
        f"[fastest] is predicted to be {lead:.0%} faster than trial {second.number}, which is"
        f" within the ±{prediction.RATE_ERROR:.0%} that predicted rates may be off by: on the card"
        " the order may be another."
    ]


def _few_tried(report: Report) -> list[str]:
    """Return how few candidates were tried; nothing if they were many, or if it is not known."""
    tried, size = len(report.trials), report.num_candidates
    if tried >= FEW * size:
        return []
    more = " or more" if size >= SIZE_LIMIT else ""
    were, those = ("was", "that") if tried == 1 else ("were", "those")
    return [
        f"{tried} of {size:,}{more} candidates {were} tried: [fastest] is the fastest of {those}."
        " The same command with --resume and more --trials goes on."
    ]


def _rate(trial: Trial) -> float:
    rate = trial.tokens_per_s
    return rate.median if rate is not None else 0.0
