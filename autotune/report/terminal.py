"""A report as text for people; plain without a terminal and with ``NO_COLOR``."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from autotune.probe import prediction
from autotune.probe.result import Outcome, covered
from autotune.report.cells import (
    ending,
    objective_cell,
    probe_line,
    rate,
    settings,
    table_row,
)
from autotune.report.columns import GAP, fitting
from autotune.report.columns import wrapped as _wrap
from autotune.report.figures import generation_of
from autotune.report.makeup import BUDGET_MEANS, makeup_table, timeline_picture
from autotune.report.model import SIZE_LIMIT, Report
from autotune.report.picks import fidelity_notes, objective_notes, pick_notes
from autotune.report.plot import scatter
from autotune.report.trial import Trial, memory_name
from autotune.units import counted, format_duration, format_gib

__all__ = [
    "baseline_line",
    "no_gain",
    "outcome_line",
    "pareto_table",
    "probe_line",
    "render",
    "render_text",
]

DISPENSABLE = ("samples/s", "padding", "epoch")
"""Columns left out, in this order, where the table is too wide."""

COLUMNS = {
    "tokens_per_s": "tokens/s",
    "peak_memory": "GiB",
    "samples_per_s": "samples/s",
    "epoch_time": "epoch",
}
"""Objectives that every table has a column of."""

UNMARKED = ("highest-fidelity",)
"""Picks that are named below the table: hardly anybody looks for them in it."""

LEGEND = (
    "GiB: peak of the {peak}. tokens/s: {rate}. trained:"
    " share of the data's loss tokens. rate, memory: against the baseline, ~ within the noise."
    " training: same as the baseline's within rounding, or what differs."
)
MEASURED_RATE = "median. IQR: its interquartile range over the median"


def render(report: Report, console: Console, *, plot: bool = True, verbose: bool = False) -> None:
    """Print a report.

    Args:
        report: A finished search, or one that is under way.
        console: Where to print; its width is kept.
        plot: Whether to draw memory against rate.
        verbose: Whether to list the reasons for knobs and values that were not searched, and to
            draw the recommended trial's memory over the run, where it was predicted.
    """
    for part in _parts(report, console.width, plot=plot, verbose=verbose):
        text: Text | str = part.plain if console.no_color else part
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def render_text(
    report: Report, *, width: int = 100, plot: bool = True, verbose: bool = False
) -> str:
    """Return a report as plain text of at most ``width`` columns, where its words allow it."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, no_color=True)
    render(report, console, plot=plot, verbose=verbose)
    lines = (line.rstrip() for line in stream.getvalue().splitlines())
    return "\n".join(lines).strip("\n") + "\n"


def pareto_table(report: Report, width: int, members: Sequence[Trial] | None = None) -> Text:
    """Return trials as a table: two lines each, figures and knobs.

    Args:
        report: Where they are from.
        width: Columns to keep to; figures that matter less are left out if need be.
        members: At least one trial; those of the Pareto set if not given.
    """
    members = report.pareto if members is None else members
    names: dict[int, list[str]] = {}
    for name, number in report.picks().items():
        if name not in UNMARKED:
            names.setdefault(number, []).append(name)
    rows = [table_row(item, report.gain(item)) for item in members]
    for objective in report.known_objectives:
        if objective.name not in COLUMNS:
            for item, row in zip(members, rows, strict=True):
                row[objective.name] = objective_cell(item, objective)
    if all(item.source == prediction.SOURCE for item in members):
        for row in rows:
            del row["IQR"]  # a prediction has none
    kept = {COLUMNS.get(name) for name in report.objectives}
    widths = fitting(
        {key: max(len(row[key]) for row in [*rows, {key: key}]) for key in rows[0]},
        width,
        [name for name in DISPENSABLE if name not in kept],
    )
    text = Text()
    text.append(_line({key: key for key in widths}, widths) + "\n", style="bold")
    for item, row in zip(members, rows, strict=True):
        text.append(_line(row, widths) + "\n", style="cyan" if item.number in names else "")
        tags = f"[{', '.join(names[item.number])}] " if item.number in names else ""
        edge = " (on the edge of memory)" if item.on_the_edge else ""
        edge += " (rate too noisy to rank)" if item.is_unranked else ""
        text.append(_wrap(f"{tags}{settings(item.changed)}{edge}", width, indent=7) + "\n")
        generation = generation_of(item)
        if generation is not None:
            text.append(_wrap(generation.line(item.source), width, indent=7) + "\n")
        if (item.host_bytes or 0) >= prediction.HOST_NOTED_BYTES:
            held = f"holds {format_gib(item.host_bytes)} on the host, predicted"
            text.append(_wrap(held, width, indent=7) + "\n", style="yellow")
    return text


def _parts(report: Report, width: int, *, plot: bool, verbose: bool) -> list[Text]:
    parts = [_heading(report, width)]
    if report.trials:
        parts += [Text(_wrap(baseline_line(report), width)), *_recommendation(report, width)]
        parts += _makeup(report, width, drawn=verbose)
        parts.append(Text(_wrap(outcome_line(report.trials), width)))
        parts += [Text(_wrap(_screening(report), width))] if report.screening else []
    else:
        parts.append(Text("No trial has ended: there is nothing to report yet."))
    if plot:
        drawing = scatter(
            report.trials,
            pareto=report.pareto_numbers,
            baseline=report.baseline_number,
            budget_bytes=report.budget_bytes,
            width=min(width, 90),
        )
        parts += [Text(drawing)] if drawing else []
    parts += [_bullets("Warnings", report.warnings, width, "yellow")] if report.warnings else []
    parts += [_bullets("Notices", report.notices, width, "")] if report.notices else []
    left_out = [*report.inactive_knobs, *report.removed_values]
    if left_out and verbose:
        reasons = [f"{name}: {reason}" for name, reason in left_out]
        parts.append(_bullets("Not searched", reasons, width, "dim"))
    elif left_out:
        listed = ", ".join(name for name, _ in left_out)
        text = f"Not searched: {listed}. `autotune report RUN --verbose` says why."
        parts.append(Text(_wrap(text, width), style="dim"))
    failed = [item for item in report.trials if item.outcome is not Outcome.OK and item.results]
    if failed and verbose:
        endings = [
            f"trial {item.number}, {item.outcome.value}: {item.results[-1].detail}"
            for item in failed
        ]
        parts.append(_bullets("How trials failed", endings, width, "dim"))
    for part in parts:
        part.rstrip()
        part.append("\n")
    return parts


def _heading(report: Report, width: int) -> Text:
    where = f", {report.device['label']}" if report.device.get("label") else ""
    text = Text(_wrap(f"{report.model} ({report.trainer}) on {report.dataset}{where}", width))
    text.stylize("bold")
    state = "finished" if report.finished else "not finished"
    if report.interrupted:
        state = "interrupted; this is the report so far"
    trials = counted(len(report.trials), "trial")
    at_once = f", up to {report.num_slots} at a time" if report.num_slots > 1 else ""
    facts = [
        f"{trials} in {format_duration(report.wall_time_s)}"
        f" ({format_duration(report.probe_work_s)} of loading and training in probes{at_once})",
        state,
        f"global batch {report.global_batch}",
    ]
    if report.budget_bytes is not None:
        source = f" ({report.budget_source})" if report.budget_source else ""
        facts.append(f"budget {format_gib(report.budget_bytes)}{source}")
    if report.min_coverage:
        facts.append(f"at least {report.min_coverage:.1%} of the loss tokens")
    phases = {name for item in report.trials for run in item.measurements for name in run.phases}
    if phases:
        facts.append(f"probes covered {covered(phases)}")
    if report.weights and not report.is_predicted:  # a prediction has no weights at all
        facts.append(f"{report.weights} weights")
    text.append("\n" + _wrap("; ".join(facts) + ".", width), style="not bold")
    if report.is_predicted:
        card = str(report.device.get("label", ""))
        text.append("\n" + _wrap(prediction.trust(card), width), style="not bold yellow")
    return text


def baseline_line(report: Report) -> str:
    """Return what became of the baseline, in a sentence."""
    trial = report.baseline
    if trial is None:
        return "The baseline has not been run, so no gain can be stated."
    if trial.measurement is None or trial.outcome is not Outcome.OK:
        why = trial.skipped_because or ending(trial)
        verb = "does not fit" if trial.outcome.value.endswith("_oom") else "did not run"
        return f"The baseline {verb} ({why}), so no gain over it can be stated."
    over = [f"{name} by {value:.1%}" for name, value in trial.violations.items() if value > 0]
    limits = f"; it is over a limit ({', '.join(over)})" if over else ""
    return (
        f"The baseline, trial {trial.number}, is {trial.source} at"
        f" {rate(trial)} and a peak of"
        f" {format_gib(trial.peak_bytes)}{limits}."
    )


def _recommendation(report: Report, width: int) -> list[Text]:
    members = report.pareto
    if not members:
        error = report.nothing_fits()
        message = f"{error.message[:1].upper()}{error.message[1:]} {error.hint}"
        return [Text(_wrap(message, width), style="bold red")]
    title = f"Pareto set: {len(members)} of {counted(len(report.trials), 'trial')}, leanest first"
    title += ", as predicted" if report.is_predicted else ""
    peak = memory_name(str(report.device.get("kind", "")))
    off = prediction.rate_error(str(report.device.get("label", "")))
    rates = f"predicted, {off}" if report.is_predicted else MEASURED_RATE
    legend = Text(_wrap(LEGEND.format(peak=peak, rate=rates), width), style="dim")
    parts = [_titled(title, pareto_table(report, width)).append_text(legend)]
    notes = [
        *objective_notes(report),
        *pick_notes(report),
        *fidelity_notes(report),
        *no_gain(report),
    ]
    parts += [Text(_wrap(text, width)) for text in notes]
    if any(item.changes for item in members):
        same = report.same_training()
        numbers = ", ".join(str(item.number) for item in same)
        if not same:
            text = "No feasible trial trains the same as the baseline."
            parts.append(Text(_wrap(text, width)))
        elif {item.number for item in same} <= set(report.pareto_numbers):
            text = f"Pareto set of those that train the same as the baseline: {numbers}."
            parts.append(Text(_wrap(text, width)))
        else:
            title = "Pareto set of those that train the same as the baseline"
            parts.append(_titled(title, pareto_table(report, width, same)))
    return parts


def no_gain(report: Report) -> list[str]:
    """Return why the columns of gains are empty, in a whole sentence; nothing if they are not."""
    if any(report.gain(item) is not None for item in report.pareto):
        return []
    trial = report.baseline
    if trial is None:
        return ["No gain is shown: the baseline has not been run."]
    reason = f"ended as {trial.outcome.value}"
    if trial.outcome.value.endswith("_oom"):
        reason = "ran out of memory"
    elif trial.outcome is Outcome.OK:
        reason = "cannot be compared with them"
    return [f"No gain is shown: the baseline (trial {trial.number}) {reason}."]


def _makeup(report: Report, width: int, *, drawn: bool) -> list[Text]:
    """Return what the recommended trial's predicted peak is made of; nothing if measured."""
    number = report.picks().get("balanced")
    pooled = None if number is None else report.pick(number).measurement
    if pooled is None or pooled.makeup is None:
        return []
    summary = {
        **pooled.makeup,
        "allocated_bytes": pooled.peak_of("allocated_bytes"),
        "host_peak_bytes": pooled.peak_of("resident_bytes") or 0,
    }
    parts = [_titled(f"Trial {number} [balanced]", makeup_table(summary, width=width))]
    used, reserved = pooled.peak_of("used_bytes"), pooled.peak_of("reserved_bytes")
    if used is not None and reserved is not None:
        bridge = (
            f"From there to the table's GiB: {format_gib(reserved)} reserved by PyTorch's"
            f" allocator, {format_gib(used)} used with the context; predicted."
        )
        parts[0].append("\n" + _wrap(bridge, width))
    if drawn:
        budget = report.budget_bytes
        is_less = budget is not None and used is not None and reserved is not None
        if budget is not None and used is not None and reserved is not None:
            budget -= used - reserved
        picture = timeline_picture(summary, width=width, budget_bytes=budget)
        parts.append(picture)
        if picture.plain and is_less:
            picture.append("\n" + _wrap(BUDGET_MEANS, width))
    return parts


def _titled(title: str, table: Text) -> Text:
    return Text().append(title + "\n", style="bold").append_text(table)


def outcome_line(trials: Sequence[Trial]) -> str:
    """Return how many trials ended in each outcome, in a sentence."""
    texts = []
    for outcome in Outcome:
        ended = [item for item in trials if item.outcome is outcome]
        if not ended:
            continue
        over = sum(outcome is Outcome.OK and not item.feasible for item in ended)
        implied = sum(item.skipped_because is not None for item in ended)
        notes = [f"{over} over a limit"] if over else []
        notes += [f"{implied} not run"] if implied else []
        again = sum(bool(item.repeated) for item in ended)
        notes += [f"{again} after repeated probes"] if again else []
        aside = f" ({', '.join(notes)})" if notes else ""
        texts.append(f"{outcome.value} {len(ended)}{aside}")
    return f"Outcomes: {', '.join(texts)}."


def _screening(report: Report) -> str:
    """Return what was predicted before it was probed, in a whole sentence."""
    facts = report.screening
    done, over = int(facts.get("num_predicted", 0)), int(facts.get("num_too_large", 0))
    failed = int(facts.get("num_failed", 0))
    size = int(facts.get("num_candidates", 0))
    of = f"{'at least ' if size >= SIZE_LIMIT else ''}{counted(size, 'candidate')}"
    notes = [f"{over:,} of them too large for the budget"] if over else []
    notes += [f"{failed:,} more could not be predicted"] if failed else []
    aside = f" ({'; '.join(notes)})" if notes else ""
    return (
        f"Predicted in {format_duration(facts.get('time_s'))} to choose what to probe:"
        f" {done:,} of {of}{aside}."
    )


def _bullets(title: str, lines: Sequence[str], width: int, style: str) -> Text:
    text = Text(f"{title}:", style=f"bold {style}".strip())
    for line in lines:
        text.append("\n" + _wrap(f"- {line}", width, hang=2), style=f"not bold {style}".strip())
    return text


def _line(row: dict[str, str], widths: dict[str, int]) -> str:
    cells = [f"{row[key]:>{size}}" for key, size in widths.items()]
    return (" " * GAP).join(cells)
