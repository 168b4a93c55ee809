"""``autotune explain``: why a trial, and what its neighbours would trade."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import common, options, requested, results
from autotune.errors import AutotuneError, NoFeasibleConfigError, StudyMismatchError, UsageError

if TYPE_CHECKING:
    from autotune.report.explain import Explanation
    from autotune.report.model import Report
    from autotune.report.trial import Trial


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
        if pick is not None and explained.nothing_fits:
            note = (
                f"There is no [{pick}], since nothing fits: this is the trial that came closest."
            )
            explained = replace(explained, notes=(*explained.notes, note))
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
        command = str(folder.read_run().get("command") or "")
        request = requested.recorded(command, explained.report, is_trusted=is_trusted)
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

    common.say(f"predicting {trl_yaml.settings(changes) or 'the baseline'} ...")
