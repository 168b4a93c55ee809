"""Searches beside one another as text for people."""

from __future__ import annotations

from rich.text import Text

from autotune.probe import prediction
from autotune.report.cells import settings, table_row
from autotune.report.columns import aligned, fitted, wrapped
from autotune.report.runs import Run, RunComparison

SHOWN = ("GiB", "tokens/s", "epoch", "trained", "rate", "memory", "training")
DISPENSABLE = ("trained", "epoch", "training")
LEFT = ("pick",)

LEGEND = (
    "GiB: the peak. rate, memory: against the run's own baseline, ~ within the noise. training:"
    " same as that baseline's within rounding, or what differs."
)


def render(comparison: RunComparison, width: int) -> Text:
    """Return the picks of each run, with their changed settings below them, and the notes."""
    rows = {run.name: _rows(run) for run in comparison.runs}
    listed = [row for found in rows.values() for row in found]
    sizes = fitted(listed, width, DISPENSABLE) if listed else {}
    parts: list[tuple[str, str]] = []
    if sizes:
        parts.append((aligned({name: name for name in sizes}, sizes, LEFT), "bold"))
    for run in comparison.runs:
        parts.append((wrapped(_head(run, comparison), width, hang=2), "bold cyan"))
        for row, (_, trial) in zip(rows[run.name], run.picks, strict=True):
            changed = f"trial {trial.number}: {settings(trial.changed)}"
            parts.append((aligned(row, sizes, LEFT), ""))
            parts.append((wrapped(changed, width, indent=4, hang=2), "dim"))
        if run.lack:
            parts.append((wrapped(run.lack, width, indent=4), "yellow"))
    if sizes:
        parts.append((wrapped(LEGEND, width), "dim"))
    parts += [(wrapped(f"note: {note}", width, hang=6), "") for note in comparison.notes]
    if comparison.obstacles:
        differing = "; ".join(comparison.obstacles)
        warning = f"warning: figures of different rows are not comparable: {differing}."
        parts.append((wrapped(warning, width, hang=9), "yellow"))
    cards = [run.device for run in comparison.runs if run.source == prediction.SOURCE]
    if cards:
        parts.append(("\n" + wrapped(prediction.trust(*cards), width), "yellow"))
    return Text("\n").join(Text(text, style) for text, style in parts)


def _rows(run: Run) -> list[dict[str, str]]:
    found = []
    for names, trial in run.picks:
        assert run.report is not None  # it has picks
        row = table_row(trial, run.report.gain(trial))
        found.append({"pick": f"  {names}", **{name: row[name] for name in SHOWN}})
    return found


def _head(run: Run, comparison: RunComparison) -> str:
    """Return a run's name with how its figures came about; more where runs differ in that."""
    if run.report is None:
        return run.name
    head = f"{run.name}: {run.source}, {run.device}"
    names = [
        name
        for name in sorted(run.report.versions)
        if any(text.startswith(f"{name} (") for text in comparison.obstacles)
    ]
    return ", ".join([head, *(f"{name} {run.report.versions[name]}" for name in names)])
