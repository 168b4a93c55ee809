"""Why a pick is not the trial with the extreme figure, where it is not: said below the table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.objectives import DEFAULT_NAMES, TIE_LIMIT, Objective
from autotune.probe import prediction
from autotune.probe.result import Outcome
from autotune.report import pareto
from autotune.report.cells import objective_cell
from autotune.report.compare import comparable
from autotune.report.model import SIZE_LIMIT, Report
from autotune.report.trial import Trial
from autotune.units import format_gib

FEW = 0.1
"""Share of the candidates below which a search has seen few of them."""


def pick_notes(report: Report) -> list[str]:
    """Return whole sentences about picks that a reader of the figures would not expect."""
    picks = report.picks()
    if not picks:
        return []
    fastest, leanest = report.pick(picks["fastest"]), report.pick(picks["leanest"])
    speed = report.speed
    rivals = [
        item
        for item in report.trials
        if item.feasible and item.outcome is Outcome.OK and comparable(item, leanest)
    ]
    notes = []
    if speed.name not in report.objectives:
        pass  # what it is of the Pareto set says little, as the note below does
    elif fastest.number not in report.pareto_numbers:
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
        slower = _rate(least, speed) < _rate(leanest, speed)
        aside = "and is slower" if slower else "as good as a tie"
        notes.append(
            f"[leanest] is trial {leanest.number} at {format_gib(leanest.peak_bytes)}: trial"
            f" {least.number}, at {format_gib(least.peak_bytes)}, needs less"
            + (
                f" within the noise only, {aside}."
                if "peak_memory" in report.objectives
                else ", but peak memory is no objective of this search."
            )
        )
    first = max(pareto.rankable(rivals), key=lambda item: (_rate(item, speed), -item.number))
    if _rate(first, speed) > _rate(fastest, speed):
        notes.append(
            f"[fastest] is trial {fastest.number} at {objective_cell(fastest, speed)}: trial"
            f" {first.number}, at {objective_cell(first, speed).removesuffix(f' {speed.unit}')},"
            + (
                " is faster within the noise only."
                if speed.name in report.objectives
                else " is faster, but speed is no objective of this search."
            )
        )
    return [
        *notes,
        *_unsure(fastest, rivals, speed),
        *_predicted_lead(fastest, rivals, speed),
        *_few_tried(report),
    ]


def objective_notes(report: Report) -> list[str]:
    """Return what was optimised, where it is not memory and the rate in tokens."""
    if set(report.objectives) == set(DEFAULT_NAMES):
        return []
    texts = [
        f"{name.replace('_', ' ')} ({'most' if item.maximize else 'least'})"
        for name in report.objectives
        for item in report.known_objectives
        if item.name == name
    ]
    known = {item.name for item in report.known_objectives}
    texts += [f"{name} (not installed here)" for name in report.objectives if name not in known]
    plural = "s" if len(texts) > 1 else ""
    text = f"Objective{plural} of this search: {', '.join(texts)}."
    if report.speed.name != "tokens_per_s":
        text += f" [fastest] and [balanced] go by {report.speed.name.replace('_', ' ')}."
    return [text]


def fidelity_notes(report: Report) -> list[str]:
    """Return which trial has the highest fidelity, where neither the baseline nor [balanced]."""
    picks = report.picks()
    number = picks.get("highest-fidelity", report.baseline_number)
    if number in (report.baseline_number, picks["balanced"]):
        return []
    aside = "" if number in report.pareto_numbers else ", which is not of the Pareto set"
    return [
        f"Highest fidelity: trial {number}{aside}. `autotune explain RUN --pick highest-fidelity`"
        " says why."
    ]


def _unsure(fastest: Trial, rivals: Sequence[Trial], speed: Objective) -> list[str]:
    """Return the trials that are no pick because their rates may be anything."""
    numbers = [
        item.number
        for item in rivals
        if item.is_unranked
        and not fastest.is_unranked
        and _rate(item, speed) > _rate(fastest, speed)
    ]
    if not numbers:
        return []
    listed = " and ".join(f"trial {number}" for number in numbers)
    has, its = ("has", "its") if len(numbers) == 1 else ("have", "their")
    return [
        f"{listed[:1].upper()}{listed[1:]} {has} a higher median rate than [fastest], but {its}"
        f" steps varied by more than {TIE_LIMIT:.0%} to a side, so that no pick goes by it."
    ]


def _predicted_lead(fastest: Trial, rivals: Sequence[Trial], speed: Objective) -> list[str]:
    """Return that the order may be another on the card, if predictions are not that good."""
    others = [item for item in rivals if item.number != fastest.number]
    if fastest.source != prediction.SOURCE or not others:
        return []
    second = max(others, key=lambda item: (_rate(item, speed), -item.number))
    slower = _rate(second, speed)
    lead = _rate(fastest, speed) / slower - 1 if slower else math.inf
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


def _rate(trial: Trial, speed: Objective) -> float:
    try:
        return pareto.speed(trial, speed)
    except ValueError:
        return 0.0
