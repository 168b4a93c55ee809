"""The report: plain data about a search, finished or not, that round-trips through JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autotune import objectives
from autotune.errors import JournalError, NoFeasibleConfigError, UnknownNameError
from autotune.files import check_regular
from autotune.objectives import Objective
from autotune.probe import trl_yaml, typed
from autotune.probe.result import Outcome
from autotune.report import pareto
from autotune.report.compare import ASKED, Gain, comparable, gain_of, nothing_fits
from autotune.report.fidelity import most_faithful
from autotune.report.figures import figures_of, objective_values
from autotune.report.trial import Trial

__all__ = ["PICKS", "SCHEMA", "Gain", "Report", "Trial", "damaged", "gain_of", "probe_work_s"]

SCHEMA = 1
SIZE_LIMIT = 20_000
"""Candidates of a space are counted up to this many."""

PICKS = ("fastest", "leanest", "balanced", "highest-fidelity")

_MAPPINGS = ("device", "model_facts", "data", "versions", "script", "screening")
_TEXTS = ("lean_pins", "notices", "warnings", "objectives")
_DERIVED = ("picks", "pareto")
_PAIRS = ("inactive_knobs", "removed_values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything about one search.

    Attributes:
        trainer: Trainer, such as ``sft``.
        model: Model, as given.
        dataset: Data set, as given.
        trials: All trials, by number.
        pareto_numbers: Numbers of the Pareto set's trials.
        created_at: When it was written, ISO 8601 in UTC.
        finished: Whether the search used up its budget or its space, or nothing was left to gain.
        interrupted: Whether it was stopped by the user.
        baseline_number: The trial that changes nothing.
        device: The :class:`~autotune.space.context.DeviceInfo` as a mapping.
        model_facts: The :class:`~autotune.space.context.ModelFacts` as a mapping.
        data: Summary of the data: rows, tokens, longest and mean length, and so on.
        budget_bytes: Limit on peak memory; None if there was none.
        budget_source: Where the limit came from, in words.
        global_batch: Rows per optimizer step, the same for all trials.
        min_coverage: Least share (0 to 1) of loss tokens that a candidate had to train on.
        space: Name of the search space.
        space_digest: Digest of the search space.
        num_candidates: Candidates of the space, counted up to ``SIZE_LIMIT``; 0 if not known.
        inactive_knobs: Knobs that were not searched, each with the reason.
        removed_values: Values that were not searched, such as ``optim=adamw_8bit``, each with the
            reason.
        lean_pins: Pins that take less memory and are legal here, such as ``dtype=bfloat16``.
        notices: What the user should know about the set-up.
        warnings: What the user should know about the numbers.
        objectives: Names of the objectives.
        seed: Seed of the search.
        sampler: Name of the sampler.
        weights: ``random`` or ``real``.
        versions: Package to version.
        wall_time_s: From the start of the search to the report.
        probe_work_s: Of that, the time probes spent loading and training, summed over probes.
        num_slots: Probes that ran at a time, at most; with more than one, ``probe_work_s`` may be
            greater than ``wall_time_s``.
        command: The command line that started it.
        script: What a script needs to build the trainer, where the ``trl`` command has none; see
            :func:`autotune.probe.trl_script.render`.
        screening: What was predicted before it was probed, see
            :class:`autotune.screen.Screening`; empty if nothing was.
        schema: Version of this record.
    """

    trainer: str
    model: str
    dataset: str
    trials: tuple[Trial, ...] = ()
    pareto_numbers: tuple[int, ...] = ()
    created_at: str = ""
    finished: bool = False
    interrupted: bool = False
    baseline_number: int = 0
    device: Mapping[str, Any] = field(default_factory=dict)
    model_facts: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    budget_bytes: int | None = None
    budget_source: str = ""
    global_batch: int = 0
    min_coverage: float = 0.0
    space: str = ""
    space_digest: str = ""
    num_candidates: int = 0
    inactive_knobs: tuple[tuple[str, str], ...] = ()
    removed_values: tuple[tuple[str, str], ...] = ()
    lean_pins: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ("tokens_per_s", "peak_memory")
    seed: int = 0
    sampler: str = ""
    weights: str = "random"
    versions: Mapping[str, str] = field(default_factory=dict)
    wall_time_s: float = 0.0
    probe_work_s: float = 0.0
    num_slots: int = 1
    command: str = ""
    script: Mapping[str, Any] = field(default_factory=dict)
    screening: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    _picks: Mapping[str, int] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            # Facts arrive from records that hold tuples; JSON gives lists back.
            object.__setattr__(self, name, _as_json(getattr(self, name)))

    @property
    def is_predicted(self) -> bool:
        """Whether its figures are of a card that was not there."""
        return str(self.device.get("name", "")).startswith("virtual:")

    @property
    def pareto(self) -> tuple[Trial, ...]:
        """Return the Pareto set by rising peak memory, ready to be exported."""
        return tuple(self._bind(item) for item in self._members())

    @property
    def baseline(self) -> Trial | None:
        """Return the trial that changes nothing; None if it has not been run yet."""
        found = self._find(self.baseline_number)
        return None if found is None else self._bind(found)

    @property
    def known_objectives(self) -> tuple[Objective, ...]:
        """Return its objectives, but for those of a package that is not installed here."""
        known = objectives.registry.names()
        return tuple(objectives.get(name) for name in self.objectives if name in known)

    @property
    def speed(self) -> Objective:
        """Return what *fast* means among its picks."""
        return pareto.speed_among(self.objectives)

    def same_training(self) -> tuple[Trial, ...]:
        """Return the Pareto set among the trials that train as the baseline does.

        It may hold trials that are not in the whole Pareto set, because only one that trains on
        other tokens or by another method dominates them.
        """
        chosen = self.known_objectives
        if len(chosen) < len(self.objectives):
            chosen = ()  # a package that is not installed here has the others
        members = pareto.pareto_set([item for item in self.trials if not item.changes], chosen)
        return tuple(self._bind(item) for item in members)

    def picks(self) -> dict[str, int]:
        """Return trial numbers by pick; empty if no trial is feasible.

        All are of the Pareto set, but for ``fastest`` where no member is faster than the baseline,
        and for ``highest-fidelity``, which may be any feasible trial. None but ``leanest`` is a
        trial whose rate varied by more than a tie takes in, unless there is no other.
        """
        if self._picks is None:  # it is asked for with every trial that is shown
            object.__setattr__(self, "_picks", self._picked())
        return dict(self._picks or {})

    def _picked(self) -> dict[str, int]:
        members, faithful = self._members(), most_faithful(self.trials)
        if not members or faithful is None:
            return {}
        ranked = pareto.rankable(members)
        baseline = self._comparable_baseline(members)
        if baseline is not None and baseline.is_unranked and not ranked[0].is_unranked:
            baseline = None
        return {
            "fastest": pareto.fastest(ranked, baseline, self.speed).number,
            "leanest": members[0].number,
            "balanced": pareto.balanced(ranked, self.budget_bytes, self.speed).number,
            "highest-fidelity": faithful.number,
        }

    def pick(self, which: str | int) -> Trial:
        """Return one trial, ready to be exported.

        Args:
            which: ``fastest``, ``leanest`` or ``balanced`` of the Pareto set, or
                ``highest-fidelity`` of all; or the number of any trial.

        Raises:
            NoFeasibleConfigError: If a name is given and no trial is feasible.
            UnknownNameError: If it is neither a known name nor the number of a trial.
        """
        text = str(which)
        if text in PICKS:
            numbers = self.picks()
            if not numbers:
                raise self.nothing_fits()
            text = str(numbers[text])
        found = self._find(int(text)) if text.isdecimal() else None
        if found is not None:
            return self._bind(found)
        raise UnknownNameError("trial", str(which), PICKS, hint=self._pick_hint())

    def _pick_hint(self) -> str:
        numbers = _ranges([item.number for item in self.trials])
        trials = f"or the number of a trial: {numbers}" if numbers else "once a trial has ended"
        return f"Give {', '.join(PICKS)}, {trials}."

    def nothing_fits(self) -> NoFeasibleConfigError:
        """Return the error for a search without a feasible trial."""
        kind = str(self.device.get("kind", ""))
        return nothing_fits(
            self.trials,
            self.budget_bytes,
            self.lean_pins,
            self.min_coverage,
            device_bytes=self.device.get("total_bytes") or None,
            # Any other budget is only compared with; what ran out had all of the device.
            is_enforced=self.budget_source in ("", ASKED) or kind == "cpu",
            place="machine" if kind == "cpu" else "card",
        )

    def gain(self, trial: Trial) -> Gain | None:
        """Return a trial against the baseline; None if they cannot be compared."""
        return gain_of(trial, self._find(self.baseline_number))

    def outcomes(self) -> dict[str, int]:
        """Return how many trials ended in each outcome, in the order of :class:`Outcome`."""
        counts = Counter(item.outcome for item in self.trials)
        return {outcome.value: counts[outcome] for outcome in Outcome if counts[outcome]}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the schema number.

        Picks, Pareto set and figures are those of the table. They follow from the rest, and
        :meth:`from_dict` works them out again.
        """
        data = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        data |= {name: dict(data[name]) for name in _MAPPINGS}
        data |= {name: [list(pair) for pair in data[name]] for name in _PAIRS}
        data |= {name: list(data[name]) for name in (*_TEXTS, "pareto_numbers")}
        data["trials"] = [self._trial_dict(item) for item in self.trials]
        for name in ("script", "screening"):
            if not data[name]:
                del data[name]  # as in records from before there was such a field
        answer = {"picks": self.picks(), "pareto": [item.number for item in self._members()]}
        return {"schema": data.pop("schema"), **answer, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Return the record that :meth:`to_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: If it is not such a record.
        """
        values = {name: value for name, value in data.items() if name not in _DERIVED}
        values.setdefault("lean_pins", ())  # earlier reports of this schema know none
        for name in (*_TEXTS, "pareto_numbers"):
            values[name] = tuple(values[name])
        for name in _PAIRS:
            values[name] = tuple((first, second) for first, second in values[name])
        values["trials"] = tuple(Trial.from_dict(item) for item in values["trials"])
        report = cls(**values)
        typed.check(report)
        return report

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON, the old or the new text as a whole, and return the path."""
        trl_yaml.write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Return the report that :meth:`save` wrote.

        Raises:
            UsageError: If it is no regular file.
            JournalError: If there is none, or it is of another version or broken.
        """
        path = Path(path)
        check_regular(path)
        try:
            data = typed.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise JournalError(
                f"the report {path} cannot be read: {error.strerror or error}.",
                hint="Give the run folder of a search, or its report.json.",
            ) from error
        except ValueError as error:
            reason = str(error) if path.stat().st_size else "it is empty"
            raise damaged(path, reason) from error
        found = data.get("schema") if isinstance(data, dict) else None
        if not typed.has_type(found, int):
            raise damaged(path, "it does not say of which schema it is")
        if found != SCHEMA:
            raise JournalError(
                f"the report {path} has schema {found}; this version reads schema {SCHEMA}.",
                hint="Use the version of autotune that wrote it.",
            )
        try:
            return cls.from_dict(data)
        except KeyError as error:
            raise damaged(path, f"{error} is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise damaged(path, str(error)) from error

    def _trial_dict(self, trial: Trial) -> dict[str, Any]:
        found = figures_of(trial, self.gain(trial)).to_dict() if trial.measurements else None
        if found is not None and set(self.objectives) != set(objectives.DEFAULT_NAMES):
            found["objectives"] = objective_values(trial, self.known_objectives)
        return {"number": trial.number, "figures": found, **trial.to_dict()}

    def _members(self) -> list[Trial]:
        members = [item for item in self.trials if item.number in self.pareto_numbers]
        return sorted(members, key=lambda item: (item.peak_bytes or 0, item.number))

    def _comparable_baseline(self, members: list[Trial]) -> Trial | None:
        found = self._find(self.baseline_number)
        known = found is not None and all(comparable(found, item) for item in members)
        return found if known else None

    def _find(self, number: int) -> Trial | None:
        return next((item for item in self.trials if item.number == number), None)

    def _bind(self, trial: Trial) -> Trial:
        gain = self.gain(trial)
        facts = {
            "version": self.versions.get("trl-autotune"),
            "created_at": self.created_at or None,
            "num_trials": len(self.trials),
            "picked_as": [name for name, number in self.picks().items() if number == trial.number],
            "budget_bytes": self.budget_bytes,
            "device": self.device.get("label"),
            "driver": self.device.get("driver"),
            "weights": self.weights,
            "versions": {k: v for k, v in self.versions.items() if k != "trl-autotune"},
            "trainer": self.trainer,
            "script": self.script or None,
        }
        if gain is not None:
            facts |= {"rate_ratio": gain.rate_ratio, "memory_ratio": gain.memory_ratio}
        return replace(trial, facts=facts)


def probe_work_s(trials: Iterable[Trial]) -> float:
    """Return the time that all probes spent loading and training, in seconds."""
    lines = [result.timeline for trial in trials for result in trial.results]
    # A probe that was ended from outside left only the time it took as a whole.
    return sum(
        (line.load_s or 0.0) + (line.steps_s or 0.0) or (line.total_s or 0.0) for line in lines
    )


def damaged(path: Path, reason: str) -> JournalError:
    """Return the error for a report that says what no search can have found."""
    hint = "Give the run folder of a search; its report is made from what is in there."
    if (path.parent / "run.json").exists():
        hint = (
            "Nothing measured is lost: give the command that started the search again, with"
            f" --run-dir {path.parent} --resume, and it writes the report anew from probes.jsonl."
        )
    return JournalError(f"the report {path} is damaged: {reason}.", hint=hint)


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as ``0 to 7, 9``; a study shared with others has gaps."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{low} to {high}" if low < high else str(low) for low, high in ranges)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
