"""What earlier runs teach: how far their predictions were off from what they measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.objectives import Objective
from autotune.plan import Plan
from autotune.probe import screened
from autotune.probe.result import Outcome
from autotune.probe.screened import Screened
from autotune.report.model import Report
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.search.guess import Lesson
from autotune.units import counted

DECIDING = ("torch", "transformers", "trl", "peft", "accelerate")
"""Packages whose version decides what a configuration takes and how long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """What was taken from earlier runs.

    Attributes:
        lessons: One per trial that was both predicted and measured.
        notices: What the user should know of it, in whole sentences.
    """

    lessons: tuple[Lesson, ...] = ()
    notices: tuple[str, ...] = ()


def check_folders(paths: Sequence[str | Path], own: RunFolder) -> tuple[RunFolder, ...]:
    """Return the run folders at ``paths``, each once.

    Args:
        paths: As given to ``--learn-from``.
        own: Folder of the search that is to learn.

    Raises:
        UsageError: If one is no folder of a search, or the search's own.
    """
    found: dict[Path, RunFolder] = {}
    for path in paths:
        folder = RunFolder(path)
        if not folder.path.is_dir():
            raise UsageError(
                f"there is no run folder {folder.path} to learn from.",
                hint="Give --learn-from the folder of an earlier search, as --run-dir named it.",
            )
        if folder.path == own.path:
            raise UsageError(
                f"a search cannot learn from itself ({folder.path}).",
                hint="It uses what it has measured anyway; leave --learn-from away.",
            )
        if not folder.run_file.exists() and not folder.report_file.exists():
            raise UsageError(
                f"{folder.path} holds no search, so that nothing can be learnt from it.",
                hint="Give --learn-from the folder of an earlier search: one with a report.json.",
            )
        found.setdefault(folder.path.resolve(), folder)
    return tuple(found.values())


def learn(
    folders: Sequence[RunFolder],
    plan: Plan,
    objectives: Sequence[Objective],
    *,
    anyway: bool,
    own_id: str = "",
) -> Learnt:
    """Return what the runs in ``folders`` teach a search.

    Args:
        folders: From :func:`check_folders`.
        plan: Of the search that is to learn.
        objectives: The search's, in the study's order.
        anyway: Whether to learn from other devices, versions and trainers as well.
        own_id: Of the run that is to learn, if it is being resumed.

    Raises:
        UsageError: If a run is a copy of the search's own.
        UsageError: If a run was on another device, with other versions or another trainer.
        JournalError: If a run's records are damaged.
    """
    lessons: list[Lesson] = []
    notices = []
    known: dict[str, RunFolder] = {}
    for folder in folders:
        taught: list[Lesson] = []
        run_id = str(folder.read_run().get("run_id") or "") if folder.run_file.exists() else ""
        if run_id and run_id == own_id:
            raise UsageError(
                f"a search cannot learn from a copy of itself ({folder.path}).",
                hint="It uses what it has measured anyway; leave --learn-from away.",
            )
        if run_id in known:
            notices.append(
                f"{folder.path} holds the same run as {known[run_id].path}, and counts once."
            )
            continue
        if run_id:
            known[run_id] = folder
        if folder.report_file.exists():
            report = Report.load(folder.report_file)
            if not anyway:
                _check(folder, report, plan)
            predictions = screened.read(folder.path / screened.FILE_NAME).predictions
            found = (_lesson(trial, predictions, objectives) for trial in report.trials)
            taught = [lesson for lesson in found if lesson is not None]
        if taught:
            notices.append(
                f"The sampler learnt from {folder.path} how far predictions of"
                f" {counted(len(taught), 'trial')} were off there."
            )
        else:
            notices.append(
                f"There is nothing to learn from {folder.path}: none of its trials was both"
                " predicted and measured. A search with --sampler learned does both."
            )
        lessons += taught
    return Learnt(lessons=tuple(lessons), notices=tuple(notices))


def _lesson(
    trial: Trial, predictions: Mapping[str, Screened], objectives: Sequence[Objective]
) -> Lesson | None:
    """Return what a trial teaches; None if it was not measured or not predicted."""
    predicted = predictions.get(trial.digest)
    if predicted is None or predicted.outcome is not Outcome.OK:
        return None
    if trial.outcome is not Outcome.OK or trial.source != "measured" or not trial.measurements:
        return None
    ratios = tuple(
        _ratio(_measured(trial, objective), predicted.values.get(objective.name))
        for objective in objectives
    )
    load_ratio = _ratio(trial.peak_bytes, predicted.peak_bytes)
    return Lesson(candidate=dict(trial.candidate), ratios=ratios, load_ratio=load_ratio)


def _measured(trial: Trial, objective: Objective) -> float | None:
    try:
        return trial.interval(objective).median
    except ValueError:  # the measurement has none
        return None


def _ratio(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


def _check(folder: RunFolder, report: Report, plan: Plan) -> None:
    """Refuse a run that what is off here may not be off in."""
    device = plan.context.device
    packages = plan.environment.get("packages", {})
    here: dict[str, Any] = {
        "device": f"{device.kind} {device.label}",
        "trainer": plan.request.trainer,
        **{name: packages.get(name) for name in DECIDING},
    }
    there: dict[str, Any] = {
        "device": f"{report.device.get('kind')} {report.device.get('label')}",
        "trainer": report.trainer,
        **{name: report.versions.get(name) for name in DECIDING},
    }
    # A package that one of them did not have is named as well: PEFT's absence decides on LoRA.
    found = [
        f"{name} {there[name] or '(none)'} there, {here[name] or '(none)'} here"
        for name in here
        if there[name] != here[name]
    ]
    if found:
        raise UsageError(
            f"what {folder.path} measured may not hold here: {'; '.join(found)}.",
            hint="Leave --learn-from away, or give --learn-anyway to learn from it all the same.",
        )
