"""The parts of the page as plain texts, numbers and shares; how they look is the template's."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.probe import accelerate_config, prediction
from autotune.probe.result import Outcome
from autotune.report.cells import UNKNOWN, ending, percent, ratio, settings, spread
from autotune.report.figures import figures_of
from autotune.report.html.captions import names_of
from autotune.report.html.picture import kind_of
from autotune.report.model import Report
from autotune.report.picks import pick_notes
from autotune.report.terminal import no_gain
from autotune.report.trial import Trial, memory_name
from autotune.units import counted, format_duration, format_gib, format_rate

PICK_MEANS = {
    "fastest": "the highest rate",
    "leanest": "the lowest peak",
    "balanced": "gives up least of both, and is best.yaml",
    "highest-fidelity": "trains most nearly as one would without a memory limit",
}
ROLES = {
    "baseline": "baseline",
    "pareto": "Pareto set",
    "other": "within the limits",
    "over": "over a limit",
}


def state(report: Report) -> str:
    """Return whether the search is over, in a sentence where it is not; else empty."""
    if report.interrupted:
        return "The search was interrupted: this is the report so far."
    if not report.finished:
        return "The search has not finished: this is the report so far."
    return ""


def facts(report: Report) -> list[tuple[str, str]]:
    """Return what was searched, as name and value."""
    device = str(report.device.get("label") or report.device.get("name") or UNKNOWN)
    found = [
        ("model", report.model),
        ("data", report.dataset),
        ("trainer", report.trainer),
        ("device", device),
        ("figures", "predicted, none is measured" if report.is_predicted else "measured"),
    ]
    if report.budget_bytes is not None:
        found.append(("memory budget", format_gib(report.budget_bytes)))
    found.append(("trials", f"{len(report.trials)} in {format_duration(report.wall_time_s)}"))
    if report.created_at:
        found.append(("date", report.created_at.replace("T", " ").replace("+00:00", " UTC")))
    return found


def picks(report: Report) -> list[dict[str, Any]]:
    """Return each trial that is picked, once; none if nothing fits."""
    found = []
    for number, names in names_of(report).items():
        trial = report.pick(number)
        gain = report.gain(trial)
        is_baseline = trial.number == report.baseline_number
        found.append(
            {
                "name": ", ".join(names),
                "means": "; ".join(PICK_MEANS[name] for name in names if name in PICK_MEANS),
                "number": trial.number,
                "rate": format_rate(figures_of(trial, gain).tokens_per_s),
                "rate_off": _spread_text(trial),
                "peak": format_gib(trial.peak_bytes).removesuffix(" GiB"),
                "rate_gain": ""
                if gain is None or is_baseline
                else ratio(gain.rate_ratio, is_tied=gain.rate_is_tied),
                "memory_gain": ""
                if gain is None or is_baseline
                else ratio(gain.memory_ratio, is_tied=gain.memory_is_tied),
                "training": _training(trial),
                "settings": [settings({name: value}) for name, value in trial.changed.items()],
                "is_baseline": is_baseline,
                "in_set": trial.number in report.pareto_numbers,
            }
        )
    return found


def notes(report: Report) -> list[str]:
    """Return what a reader of the picks must know, in whole sentences."""
    if not report.trials:
        return ["No trial has ended: there is nothing to report yet."]
    if not report.pareto_numbers:
        error = report.nothing_fits()
        return [f"{error.message[:1].upper()}{error.message[1:]}", error.hint]
    return [*pick_notes(report), *no_gain(report)]


def trial_rows(report: Report) -> list[dict[str, Any]]:
    """Return all trials as rows of a table: cells in :data:`COLUMNS`' order, and what they are."""
    named = names_of(report)
    rows = []
    for trial in report.trials:
        kind = kind_of(trial, report.pareto_numbers, report.baseline_number)
        ran = trial.outcome is Outcome.OK and bool(trial.measurements)
        is_over = ran and not trial.feasible
        roles = [*named.get(trial.number, [])]
        roles += ["baseline"] if trial.number == report.baseline_number else []
        roles += [ROLES["pareto"]] if trial.number in report.pareto_numbers else []
        roles += [ROLES["over"]] if is_over else []
        rows.append(
            {
                "number": trial.number,
                "kind": kind if ran else "failed",
                "outcome": "over a limit" if is_over else trial.outcome.value,
                "roles": roles,
                "cells": _cells(report, trial),
                "settings": settings(trial.changed),
                "in_set": trial.number in report.pareto_numbers,
                "why": _why(trial),
            }
        )
    return rows


COLUMNS = (
    ("tokens/s", "median rate in tokens that are not padding, with its interquartile range"),
    ("GiB", "greatest peak of its probes, with the least where they differ"),
    ("rate", "its rate over the baseline's; ~ within the noise"),
    ("memory", "its peak over the baseline's; ~ within the noise"),
    ("samples/s", "rows of the data set per second"),
    ("epoch", "time of one pass over the data"),
    ("padding", "share of the computed positions that were padding"),
    ("trained", "share of the data's loss tokens that it trains on"),
    ("training", "same as the baseline's within rounding, or what differs"),
    ("probes", "how many probes finished"),
)
"""Title and meaning of the columns of figures."""


def _cells(report: Report, trial: Trial) -> list[dict[str, Any]]:
    """Return each figure as it is shown, its spread, and the number to sort by."""
    gain = report.gain(trial)
    found = figures_of(trial, gain)
    peak = trial.peak_interval
    apart = peak is not None and format_gib(peak.low) != format_gib(peak.high)
    from_gib = f"from {format_gib(peak.low).removesuffix(' GiB')}" if peak and apart else ""
    measured = bool(trial.measurements)

    def cell(text: str, number: float | None, aside: str = "") -> dict[str, Any]:
        return {"text": text, "sort": number, "aside": aside}

    return [
        cell(format_rate(found.tokens_per_s), found.tokens_per_s, _spread_text(trial)),
        cell(
            format_gib(found.used_peak_bytes).removesuffix(" GiB"),
            found.used_peak_bytes,
            from_gib,
        ),
        cell(
            ratio(gain.rate_ratio, is_tied=gain.rate_is_tied) if gain else UNKNOWN,
            gain.rate_ratio if gain else None,
        ),
        cell(
            ratio(gain.memory_ratio, is_tied=gain.memory_is_tied) if gain else UNKNOWN,
            gain.memory_ratio if gain else None,
        ),
        cell(format_rate(found.samples_per_s), found.samples_per_s),
        cell(format_duration(found.epoch_s), found.epoch_s),
        cell(percent(found.padding_share), found.padding_share),
        cell(percent(found.trained_share), found.trained_share),
        cell(found.training if measured else UNKNOWN, None),
        cell(str(len(trial.measurements)), len(trial.measurements)),
    ]


def _why(trial: Trial) -> str:
    """Return why a trial has no figures, or what to doubt about them; empty for none."""
    if trial.skipped_because:
        return f"not run: {trial.skipped_because}"
    if trial.outcome is not Outcome.OK:
        return ending(trial)
    doubts = [
        f"over {name} by {value:.1%}" for name, value in trial.violations.items() if value > 0
    ]
    doubts += ["on the edge of memory"] if trial.on_the_edge else []
    doubts += ["rate too noisy to rank"] if trial.is_unranked else []
    return ", ".join(doubts)


def _spread_text(trial: Trial) -> str:
    if trial.tokens_per_s is None:
        return ""
    if trial.source == prediction.SOURCE:
        return f"±{prediction.RATE_ERROR:.0%}"
    known = spread(trial.tokens_per_s)
    return "" if known == UNKNOWN else f"IQR {known}"


def _training(trial: Trial) -> str:
    if not trial.changes:
        return "the same training as the baseline's, within rounding"
    return f"another training than the baseline's: {' and '.join(trial.changes)} differ"


def peak_of(report: Report) -> str:
    """Return what the report's peaks are peaks of, in words."""
    return memory_name(str(report.device.get("kind", "")))


def configurations(report: Report) -> list[dict[str, Any]]:
    """Return each member's file with the command that trains with it."""
    named = names_of(report)
    trials = list(report.pareto)
    trials += [report.pick(n) for n in named if n not in report.pareto_numbers]
    found = []
    for trial in trials:
        name = f"trial-{trial.number:04d}{trial.suffix}"
        files = []
        beside = accelerate_config.beside(Path(name)).name if trial.accelerate else None
        try:
            files.append({"name": name, "text": trial.rendered(name, accelerate_file=beside)})
        except AutotuneError as error:
            files.append({"name": name, "text": "", "error": f"{error.message} {error.hint}"})
        if beside is not None:
            text = accelerate_config.render(trial.accelerate)
            files.append({"name": beside, "text": text})
        found.append(
            {
                "number": trial.number,
                "picks": named.get(trial.number, []),
                "title": settings(trial.changed),
                "files": files,
                "command": _train_with(report, trial, name, beside),
            }
        )
    return found


def _train_with(report: Report, trial: Trial, name: str, beside: str | None) -> str:
    if trial.suffix != ".py":
        command = ["trl", report.trainer, "--config", name]
        return shlex.join([*command, *(["--accelerate_config", beside] if beside else [])])
    launch = ["accelerate", "launch", "--config_file", beside] if beside else ["python"]
    return shlex.join([*launch, name])


def about(report: Report) -> list[tuple[str, str]]:
    """Return how the run was made, as name and value."""
    data = report.data
    source = f", {report.budget_source}" if report.budget_source else ""
    rows: list[tuple[str, str]] = [
        ("search space", f"{report.space or UNKNOWN} {report.space_digest[:12]}".strip()),
        (
            "candidates in it",
            f"{report.num_candidates:,}" if report.num_candidates else UNKNOWN,
        ),
        ("sampler, seed", f"{report.sampler or UNKNOWN}, {report.seed}"),
        ("objectives", ", ".join(report.objectives)),
        (
            "memory budget",
            UNKNOWN
            if report.budget_bytes is None
            else f"{format_gib(report.budget_bytes)}{source}",
        ),
        ("global batch", counted(report.global_batch, "row")),
        ("least coverage", percent(report.min_coverage) if report.min_coverage else "no limit"),
        ("weights", "none: predicted" if report.is_predicted else report.weights),
        (
            "time",
            f"{format_duration(report.wall_time_s)}, of which"
            f" {format_duration(report.probe_work_s)} of loading and training in probes",
        ),
        ("probes at a time", str(report.num_slots)),
    ]
    if data:
        rows.append(
            (
                "data",
                f"{counted(int(data.get('num_rows') or 0), 'row')},"
                f" {int(data.get('num_tokens') or 0):,} tokens, longest"
                f" {int(data.get('longest') or 0):,}",
            )
        )
    driver = report.device.get("driver")
    rows += [("driver", str(driver))] if driver else []
    rows += [(name, str(version)) for name, version in report.versions.items()]
    return rows


def endings(trials: Sequence[Trial]) -> list[tuple[int, str, str]]:
    """Return how trials failed: number, outcome, and all that the probe said."""
    return [
        (item.number, item.outcome.value, item.results[-1].detail)
        for item in trials
        if item.outcome is not Outcome.OK and item.results and item.results[-1].detail
    ]
