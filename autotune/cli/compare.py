"""``autotune compare``: the picks of several searches in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli import common, options, results
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.report.runs import Run


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    common.command(app, compare, imports=("autotune.report.runs_text",))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, two or more.")],
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Show runs of different devices or versions all the same."),
    ] = False,
    as_json: options.Json = False,
) -> int:
    """Show the picks of several runs in one table.

    Runs whose figures cannot be compared, since device or versions differ, are refused. Cards are
    compared by `autotune search --device A,B`.
    """
    from autotune.report import runs_text
    from autotune.report.runs import RunComparison

    if len(runs) < 2:
        raise UsageError(
            "one run has nothing to be compared with.",
            hint=f"Name a second one, or see this one: autotune report {runs[0]}",
        )
    found = RunComparison(runs=tuple(_run(path) for path in runs))
    console = common.stdout_console()
    for run in found.runs:
        # Of several runs, the one that is damaged is the one to be named.
        with results.reading(Path(run.name)):
            runs_text.render(RunComparison(runs=(run, run)), console.width)
    if found.obstacles and not anyway:
        raise UsageError(
            f"the runs are not comparable, since they differ in {'; '.join(found.obstacles)}.",
            hint="Give --anyway to show them all the same, each with its device and versions.",
        )
    if as_json:
        common.show_json(found.to_dict())
        return 0
    text = runs_text.render(found, console.width)
    common.show_text(text, console)
    return 0


def _run(path: Path) -> Run:
    """Return a run; one that has only begun has no report.

    Raises:
        UsageError: If there is no run, or it is one of several cards.
        JournalError: If its report cannot be read.
    """
    from autotune.report.runs import Run

    has_begun = (path / "run.json").exists() and not (path / "report.json").exists()
    return Run(name=str(path), report=None if has_begun else results.load_report(path))
