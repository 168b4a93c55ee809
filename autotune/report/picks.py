"""Why a pick is not the trial with the extreme figure, where it is not: said below the table."""

from __future__ import annotations

from autotune.probe.result import Outcome
from autotune.report.compare import comparable
from autotune.report.model import Report
from autotune.report.trial import Trial
from autotune.units import format_gib, format_rate


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
    return notes


def _rate(trial: Trial) -> float:
    rate = trial.tokens_per_s
    return rate.median if rate is not None else 0.0
