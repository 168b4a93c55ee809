"""The words of the Pareto picture: over a point, below the picture."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

from autotune.probe import prediction
from autotune.probe.result import Outcome
from autotune.report.cells import ending, rate, ratio, settings
from autotune.report.html.predictions import PredictedPoint
from autotune.report.model import Report
from autotune.report.plot import BUDGET_IN_SIGHT
from autotune.report.trial import Trial
from autotune.units import counted, format_gib, format_rate

NO_MEMORY = (Outcome.DEVICE_OOM, Outcome.HOST_OOM)
WRAPPED = 44
"""Columns of settings in a point's text: what a telephone is wide enough for."""

MOST_PREDICTED = 2000
"""Points of predictions that are drawn; more only blacken a picture and slow it down."""


def drawn(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that have a place in the picture: a peak and a rate."""
    return [
        item for item in trials if item.peak_bytes is not None and item.tokens_per_s is not None
    ]


def names_of(report: Report) -> dict[int, list[str]]:
    """Return by number of a trial what it is picked as."""
    found: dict[int, list[str]] = {}
    for name, number in report.picks().items():
        found.setdefault(number, []).append(name)
    return found


def budget_in_sight(report: Report) -> bool:
    """Whether the budget is drawn; far beyond all peaks it would squeeze them to one side."""
    peaks = [item.peak_bytes or 0 for item in drawn(report.trials)]
    budget = report.budget_bytes
    return budget is not None and budget <= BUDGET_IN_SIGHT * max(peaks, default=0)


def caption(report: Report, predicted: Sequence[PredictedPoint] = ()) -> list[str]:
    """Return what must be known to read the picture, in whole sentences."""
    found = ["Up is faster, left is leaner."]
    if report.is_predicted:
        found.append(f"Predicted rates may be off by {prediction.rate_error()}.")
    else:
        found.append(
            "Bars: interquartile range of the rate; from the least to the greatest peak of the"
            " probes."
        )
    if report.pareto_numbers:
        found.append("The dotted line is the best rate within that memory.")
    if report.budget_bytes is not None and not budget_in_sight(report):
        budget = format_gib(report.budget_bytes)
        found.append(f"The budget, {budget}, lies far to the right and is not drawn.")
    num_oom = sum(item.outcome in NO_MEMORY for item in report.trials)
    if num_oom:
        found.append(
            f"{counted(num_oom, 'trial')} ran out of memory, so without a rate: below, at the"
            f" {'budget' if budget_in_sight(report) else 'right edge'}."
        )
    if predicted:
        num_predicted = len(predicted)
        drawn_only = f" ({MOST_PREDICTED:,} of {num_predicted:,})"
        aside = drawn_only if num_predicted > MOST_PREDICTED else ""
        scaled = ", multiplied by what was measured over predicted of the trials"
        how = scaled if any(item.is_scaled for item in predicted) else ""
        found.append(f"Small squares are predictions without a probe{how}{aside}.")
    return [*found, "Point at a trial for its settings; select it to go to its row."]


def failed_text(trial: Trial) -> str:
    """Return what is shown over a trial that ran out of memory."""
    why = f"not run: {trial.skipped_because}" if trial.skipped_because else ending(trial)
    title = f"<b>trial {trial.number}: out of memory</b>"
    return "<br>".join([title, *_wrapped(why), *_wrapped(settings(trial.changed))])


def predicted_text(point: PredictedPoint) -> str:
    """Return what is shown over a candidate that was predicted only."""
    figures = f"{format_rate(point.rate)} tokens/s, {format_gib(point.peak_bytes)} peak"
    lines = ["<b>predicted, not run</b>", figures]
    if point.is_scaled:
        lines.append("as predicted, times what was measured over predicted elsewhere")
    return "<br>".join([*lines, *_wrapped(point.label)])


def trial_text(report: Report, trial: Trial) -> str:
    """Return what is shown over a point, in the few tags that plotly knows."""
    names = [name for name, number in report.picks().items() if number == trial.number]
    roles = ["baseline"] if trial.number == report.baseline_number else []
    roles += ["Pareto set"] if trial.number in report.pareto_numbers else []
    lines = [f"<b>trial {trial.number}{_after(': ', [*names, *roles])}</b>"]
    peak = trial.peak_interval
    about = ""
    if peak is not None and peak.low < peak.high:
        about = f", least of its probes {format_gib(peak.low)}"
    lines += [f"{rate(trial)}, {trial.source}", f"{format_gib(trial.peak_bytes)} peak{about}"]
    gain = report.gain(trial)
    if gain is not None and trial.number != report.baseline_number:
        lines.append(
            f"{ratio(gain.rate_ratio, is_tied=gain.rate_is_tied)} rate,"
            f" {ratio(gain.memory_ratio, is_tied=gain.memory_is_tied)} memory of the baseline's"
        )
    over = [name for name, value in trial.violations.items() if value > 0]
    lines.append(f"{trial.outcome.value}{_after(', over ', over)}")
    return "<br>".join([*lines, *_wrapped(settings(trial.changed))])


def _wrapped(text: str) -> list[str]:
    return [html.escape(line) for line in textwrap.wrap(text, WRAPPED)]


def _after(mark: str, words: Sequence[str]) -> str:
    return f"{mark}{html.escape(', '.join(words))}" if words else ""
