"""Finished searches beside one another, as plain data, and what keeps them from being compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune.probe import prediction, sources
from autotune.report.compare import ASKED
from autotune.report.figures import figures_of
from autotune.report.model import PICKS, Report
from autotune.report.trial import Trial
from autotune.units import format_gib

SCHEMA = 1

_TRAININGS = "their rates are of different trainings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search.

    Attributes:
        name: Its folder, as given.
        report: Its report; None if none of its probes has ended.
    """

    name: str
    report: Report | None = None

    @property
    def source(self) -> str:
        """Return whether its figures are measured or predicted."""
        predicted = self.report is not None and self.report.is_predicted
        return prediction.SOURCE if predicted else "measured"

    @property
    def device(self) -> str:
        """Return its device in words, with the driver where that is known."""
        device = {} if self.report is None else self.report.device
        driver = f", driver {device['driver']}" if device.get("driver") else ""
        return f"{device.get('label') or device.get('name') or 'not known'}{driver}"

    @property
    def picks(self) -> tuple[tuple[str, Trial], ...]:
        """Return its picks, those of one trial under one name such as ``fastest, balanced``."""
        numbers: dict[int, list[str]] = {}
        found = {} if self.report is None else self.report.picks()
        for name in PICKS:
            if name in found:
                numbers.setdefault(found[name], []).append(name)
        if self.report is None:
            return ()
        pick = self.report.pick
        return tuple((", ".join(names), pick(number)) for number, names in numbers.items())

    @property
    def lack(self) -> str:
        """Return why there is nothing to show of it, in a whole sentence; empty if there is."""
        if self.report is None or not self.report.trials:
            return "No probe of it has ended yet; --resume goes on with it."
        if self.picks:
            return ""
        error = self.report.nothing_fits()
        return f"{error.message[:1].upper()}{error.message[1:]} {error.hint}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        report = self.report
        if report is None:
            return {"name": self.name, "lack": self.lack, "picks": {}}
        return {
            "name": self.name,
            "model": report.model,
            "dataset": report.dataset,
            "trainer": report.trainer,
            "global_batch": report.global_batch,
            "source": self.source,
            "device": dict(report.device),
            "versions": dict(report.versions),
            "budget_bytes": report.budget_bytes,
            "finished": report.finished,
            "outcomes": report.outcomes(),
            "lack": self.lack,
            "picks": {
                name: {
                    "trial": trial.number,
                    "changed": dict(trial.changed),
                    **figures_of(trial, report.gain(trial)).to_dict(),
                }
                for names, trial in self.picks
                for name in names.split(", ")
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Searches in the order in which they were given."""

    runs: tuple[Run, ...]

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Return what differs between runs whose figures may then not be compared, in words."""
        names = sorted({name for run in self._known for name in _report(run).versions})
        reads: dict[str, Callable[[Run], Any]] = {
            "measured or predicted": lambda run: run.source,
            "the device": lambda run: run.device,
            "the weights": lambda run: _report(run).weights if run.source == "measured" else "",
        }
        reads |= {name: functools.partial(_version, name) for name in names}
        told = [self._told(name, read) for name, read in reads.items()]
        return tuple(text for text in told if text)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what else differs between runs, in whole sentences: what was asked for."""
        asked: tuple[tuple[str, Callable[[Run], Any], str], ...] = (
            ("the model", lambda run: _report(run).model, _TRAININGS),
            ("the data set", lambda run: _report(run).dataset, _TRAININGS),
            ("the trainer", lambda run: _report(run).trainer, _TRAININGS),
            ("the global batch", lambda run: _report(run).global_batch, _TRAININGS),
            (
                "the search space",
                lambda run: _report(run).space,
                "they chose among different candidates",
            ),
            (
                "the objectives",
                lambda run: " and ".join(sorted(_report(run).objectives)),
                "their picks are of different Pareto sets",
            ),
            (
                "--min-coverage",
                lambda run: f"{_report(run).min_coverage:g}",
                "what one may pick, another may not",
            ),
            ("the memory budget", _budget, "what fits one may not fit another"),
        )
        # A folder is the same one whatever path it was given by.
        keys = {"the model": _model, "the data set": _data}
        told = [(self._told(name, read, keys.get(name)), text) for name, read, text in asked]
        return tuple(f"The runs differ in {what}: {text}." for what, text in told if what)

    @property
    def _known(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.report is not None)

    def _told(
        self, name: str, read: Callable[[Run], Any], key: Callable[[Run], Any] | None = None
    ) -> str:
        """Return a thing with its values, each once; empty if all runs have the same.

        Args:
            name: Of the thing.
            read: Gives it as it is shown.
            key: Gives what it is told apart by; by default as it is shown.
        """
        values = {str((key or read)(run)): str(read(run)) for run in self._known}
        return f"{name} ({', '.join(values.values())})" if len(values) > 1 else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the schema number."""
        return {
            "schema": SCHEMA,
            "obstacles": list(self.obstacles),
            "notes": list(self.notes),
            "runs": [run.to_dict() for run in self.runs],
        }


def _version(name: str, run: Run) -> str:
    return _report(run).versions.get(name, "none")


def _model(run: Run) -> Any:
    report = _report(run)
    name = sources.short_name(report.model) if report.model_facts else report.model
    return name, sorted(report.model_facts.items())


def _data(run: Run) -> Any:
    return _report(run).data.get("fingerprint") or _report(run).dataset


def _budget(run: Run) -> str:
    # What a device has free is never twice the same.
    is_asked = _report(run).budget_source == ASKED
    return format_gib(_report(run).budget_bytes) if is_asked else "what the device has"


def _report(run: Run) -> Report:
    assert run.report is not None  # asked of those that have one
    return run.report
