"""``autotune explain``: why a trial, and what its neighbours would trade."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import common, options, results
from autotune.errors import AutotuneError, NoFeasibleConfigError, StudyMismatchError, UsageError

if TYPE_CHECKING:
    from autotune.plan import Request
    from autotune.report.explain import Explanation
    from autotune.report.model import Report
    from autotune.report.trial import Trial
    from autotune.runfolder import RunFolder

_SAME = (
    "model",
    "dataset",
    "trainer",
    "global_batch",
    "min_coverage",
    "split",
    "dataset_config",
    "revision",
    "weights",
    "measured_steps",
    "processes",
    "seed",
)
"""Options of ``autotune search`` that are fields of a request as they stand."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    common.command(app, explain, imports=("autotune.report.explained_text", "autotune.whatif"))


def explain(
    run: options.Run,
    trial: Annotated[
        str | None, typer.Argument(help="Number of a trial.  [default: the balanced one]")
    ] = None,
    pick: Annotated[
        str | None, typer.Option(help="Instead: fastest, leanest, balanced or highest-fidelity.")
    ] = None,
    predict: Annotated[
        bool | None,
        typer.Option(
            "--predict/--no-predict",
            help="Predict settings that the run did not try, on its card or what stands for it."
            "  [default: only where nothing fits]",
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> int:
    """Say why a trial of a run is what it is, and what other settings would trade.

    Where nothing fits, it is about the trial that came closest, and the exit code is 3.
    """
    from autotune.report import explain as why
    from autotune.report import explained_text

    if trial is not None and pick is not None:
        raise UsageError("a trial's number and --pick name two trials.", hint="Give one of them.")
    with results.reading(run):
        found = results.load_report(run)
        chosen = _chosen(found, trial if trial is not None else pick)
        explained = why.explain(found, chosen)
        if predict or (predict is None and explained.nothing_fits):
            explained = _predicted(explained, run, is_trusted=trust_remote_code)
        if as_json:
            common.show_json(explained.to_dict())
        else:
            console = common.stdout_console()
            text = explained_text.render(explained, console.width)
            common.show_text(text, console)
    return NoFeasibleConfigError.exit_code if explained.nothing_fits else 0


def _chosen(report: Report, which: str | None) -> Trial:
    """Return the trial that was asked for; where nothing fits, the closest for a pick's name."""
    from autotune.report import explain as why
    from autotune.report.model import PICKS

    if which is None or which in PICKS:
        return report.pick(which or "balanced") if report.picks() else why.closest(report)
    return report.pick(which)


def _predicted(explained: Explanation, run: Path, *, is_trusted: bool) -> Explanation:
    """Return the explanation with predictions, or with a note on why there are none."""
    from autotune import whatif
    from autotune.runfolder import RunFolder

    folder = RunFolder(run if run.is_dir() else run.parent)
    try:
        common.say("making the run's plan anew for predictions ...")
        request = _request(folder, explained.report, is_trusted=is_trusted)
        with whatif.opened(request, folder, explained.report, on_probe=_say_of) as predictor:
            if explained.nothing_fits:
                return predictor.fitting(explained)
            return predictor.neighbours(explained)
    except AutotuneError as error:
        # A hint of a run that has changed is about going on with it.
        hint = "" if isinstance(error, StudyMismatchError) else error.hint
        note = f"Nothing was predicted, so that this is the run's own evidence: {error.message}"
        explained = replace(explained, notes=(*explained.notes, f"{note} {hint}".strip()))
    if explained.nothing_fits and explained.report.is_predicted and explained.least_bytes:
        with contextlib.suppress(AutotuneError):  # a card of the user's own may be gone
            card = whatif.larger_card(explained.least_bytes, explained.report)
            explained = replace(explained, card=card)
    return explained


def _say_of(changes: Mapping[str, Any]) -> None:
    from autotune.probe import trl_yaml

    common.say(f"predicting {trl_yaml.settings(changes)} ...")


def _request(folder: RunFolder, report: Report, *, is_trusted: bool) -> Request:
    """Return what a run was asked for, as its command line says.

    A run folder may come from others: what in it has code run is not taken from it alone.

    Raises:
        UsageError: If code would run that the user of this command has not said to trust.
        UsageError: If there is no such command line, as for a search from Python.
        AutotuneError: If it asks for what is no longer there.
    """
    from autotune.cli.search import scored_by
    from autotune.plan import Request
    from autotune.space.space import SearchSpace

    given = _options(str(folder.read_run().get("command") or ""))
    space = given["space"] or given["trainer"]
    codes = [
        ("the model's own code (--trust-remote-code)", given["trust_remote_code"]),
        (f"the reward {given['reward']}", ":" in (given["reward"] or "")),
        (f"the trainer {given['trainer']}", ":" in given["trainer"]),
    ]
    found = [what for what, is_asked in codes if is_asked]
    if found and not is_trusted:
        raise UsageError(
            f"the run's command line has code run: {' and '.join(found)}.",
            hint="Give --trust-remote-code if you trust it.",
        )
    pinned = common.pins(given["pin"] or ())
    limit_s = common.duration_s(given["probe_timeout"], "--probe-timeout")
    return Request(
        **{name: given[name] for name in _SAME},
        trust_remote_code=bool(given["trust_remote_code"]),
        # A command for several cards has a run for each.
        device=str(report.device.get("name") or given["device"]),
        space=scored_by(given["reward"], space) if given["reward"] else SearchSpace.load(space),
        memory_budget_bytes=common.size(given["memory_budget"], "--memory-budget"),
        pins=pinned,
        phases=tuple(part.strip() for part in given["phases"].split(",") if part.strip()),
        probe_timeout_s=300.0 if limit_s is None else limit_s,
        accelerate_config=None
        if given["accelerate_config"] is None
        else str(given["accelerate_config"]),
    )


def _options(command: str) -> dict[str, Any]:
    """Return the options of a recorded ``autotune search``, as typer reads them."""
    from autotune.cli.app import app

    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if len(words) < 2 or words[1] != "search":
        raise UsageError(
            "the run was not started by `autotune search`, so that its settings cannot be read"
            " from its record.",
            hint="Its trials are explained all the same, without predictions.",
        )
    group: Any = typer.main.get_command(app)
    try:
        with group.make_context("autotune", words[1:]) as parent:
            search = group.get_command(parent, "search")
            return dict(search.make_context("search", words[2:], parent=parent).params)
    except (typer.Exit, typer.Abort, SystemExit) as error:
        raise UsageError("the run's command line asks for nothing.") from error
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        raise UsageError(
            f"the run's command line cannot be read any more: {message()}",
            hint="Use the version of autotune that the run was made with.",
        ) from error
