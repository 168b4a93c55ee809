"""The only importer of Optuna: ask for a candidate, tell what became of it.

The table of outcomes: an ``ok`` trial is COMPLETE with its values and every constraint; a verdict
against the candidate is PRUNED with one constraint, named after the outcome, violated; ``crashed``
and ``lost`` say nothing about it and are FAIL. Values are never invented.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.trial import TrialState

from autotune.differences import differences
from autotune.errors import StudyMismatchError
from autotune.probe.result import Outcome
from autotune.search import samplers
from autotune.search.guess import Guess, Lesson
from autotune.search.learned import LearnedSampler, Options
from autotune.search.storage import open_storage, recording

optuna.logging.set_verbosity(optuna.logging.ERROR)

Value = Any
Draw = Callable[[Callable[[str, Sequence[Value], bool], Value]], dict[str, Value]]

_BEFORE_THE_FIRST_PROBE = (
    "Free space on the disk, or mend the storage, and give the same command again."
)
_REFUSALS = tuple(
    outcome.value for outcome in Outcome if outcome.is_verdict and outcome is not Outcome.OK
)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate that Optuna asked for.

    Attributes:
        candidate: Knob name to value.
        handle: Optuna's trial, to be told.
    """

    candidate: dict[str, Value]
    handle: optuna.trial.Trial


class Study:
    """An Optuna study of one search.

    Args:
        draw: Makes a candidate by calling back for each knob's value; see ``ResolvedSpace.draw``.
        directions: ``minimize`` or ``maximize`` per objective.
        storage: Path of a journal file, an Optuna storage URL, or a storage that is open.
        name: Study name; the same name on the same storage is one study, shared by all hosts.
        sampler: Resolved sampler name.
        seed: Seed of the sampler's own generator.
        num_trials: Trials planned; None if only time limits the search.
        identity: What makes two searches the same; checked when the study exists already.
        owner: Names this run among several that share a study.
        candidates: Makes what the sampler ``learned`` chooses from; it needs all or many of them.
        objectives: Names of the objectives, for dashboards.
    """

    def __init__(
        self,
        draw: Draw,
        *,
        directions: Sequence[Literal["minimize", "maximize"]],
        storage: str | optuna.storages.BaseStorage,
        name: str,
        sampler: str,
        seed: int,
        num_trials: int | None,
        identity: Mapping[str, Any],
        owner: str,
        candidates: Callable[[], Sequence[Mapping[str, Value]]] = tuple,
        objectives: Sequence[str] = (),
    ) -> None:
        self._draw = draw
        self._owner = owner
        self._candidates = candidates
        with recording(_BEFORE_THE_FIRST_PROBE):
            self._study = optuna.create_study(
                storage=open_storage(storage) if isinstance(storage, str) else storage,
                study_name=name,
                directions=list(directions),
                load_if_exists=True,
            )
            self._check_identity(identity)
            if objectives:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                    self._study.set_metric_names(list(objectives))
        # A resumed run, or another host's, must not draw the candidates of the first one again.
        seed = (seed + len(self._study.get_trials(deepcopy=False))) % 2**32
        self._learned: LearnedSampler | None = None
        if sampler == samplers.LEARNED:
            self._learned = LearnedSampler(self._options, directions=list(directions), seed=seed)
            self._study.sampler = self._learned
        else:
            self._study.sampler = samplers.build(sampler, seed=seed, num_trials=num_trials)

    @property
    def wants_guesses(self) -> bool:
        """Whether predictions of candidates are of use; see :meth:`inform`."""
        return self._learned is not None

    def inform(self, guesses: Sequence[Guess], lessons: Sequence[Lesson] = ()) -> None:
        """Tell what was predicted of candidates, and how far predictions were off elsewhere."""
        if self._learned is not None:
            self._learned.inform(guesses, lessons)

    @property
    def is_informed(self) -> bool:
        """Whether the sampler knows predictions, and so what may fit before anything has."""
        return self._learned is not None and self._learned.has_guesses

    @property
    def expected_gain(self) -> float | None:
        """Return what the candidate drawn last is expected to add to the front; None if unknown.

        As a share of the hypervolume that the front dominates; below zero if no candidate is
        expected to add any.
        """
        return None if self._learned is None else self._learned.expected_gain

    def _options(self) -> Options:
        found = [(item, self._replayed(item)) for item in self._candidates()]
        usable = [(item, replayed) for item, replayed in found if replayed is not None]
        return Options(
            candidates=[item for item, _ in usable],
            params=[replayed[0] for _, replayed in usable],
            ordered=sorted({name for _, replayed in usable for name in replayed[1]}),
        )

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        known = self._study.user_attrs.get("identity")
        if known is None:
            self._study.set_user_attr("identity", dict(identity))
            return
        found = differences(known, json.loads(json.dumps(dict(identity))))
        if found:
            raise StudyMismatchError(
                f"the study {self._study.study_name!r} belongs to another search"
                f" ({'; '.join(found)}).",
                hint="Use the same settings as before, or another --study or --run-dir.",
            )

    @recording()
    def close_abandoned(self) -> int:
        """Mark trials that this run left running (a kill, a crash) as failed; return how many."""
        abandoned = [
            trial
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if trial.user_attrs.get("owner") == self._owner
        ]
        for trial in abandoned:
            self._study.tell(trial.number, state=TrialState.FAIL)
        return len(abandoned)

    @recording()
    def enqueue(self, candidate: Mapping[str, Value]) -> bool:
        """Make the next :meth:`ask` propose ``candidate``; False if the space cannot draw it."""
        replayed = self._replayed(candidate)
        if replayed is None:
            return False
        self._study.enqueue_trial(replayed[0])
        return True

    def _replayed(
        self, candidate: Mapping[str, Value]
    ) -> tuple[dict[str, Value], set[str]] | None:
        """Return a candidate's parameters, and those of its knobs that are ordered.

        None if the space cannot draw it.
        """
        params: dict[str, Value] = {}
        scaled: set[str] = set()

        def replay(name: str, values: Sequence[Value], ordered: bool) -> Value:
            knob = name.partition("@")[0]
            value = candidate[knob]
            index = list(values).index(value)
            params[name] = index if ordered else value
            if ordered:
                scaled.add(knob)
            return value

        try:
            drawn = self._draw(replay)
        except (KeyError, ValueError):
            return None
        return (params, scaled) if drawn == dict(candidate) else None

    @recording()
    def ask(self) -> Proposal:
        """Return the next candidate."""
        if self._learned is not None:
            self._learned.expected_gain = None  # one that was enqueued is nobody's expectation
        trial = self._study.ask()
        trial.set_user_attr("owner", self._owner)
        candidate = self._draw(lambda *question: _suggest(trial, *question))
        trial.set_user_attr("candidate", json.dumps(candidate))
        return Proposal(candidate=candidate, handle=trial)

    @recording()
    def tell_ok(
        self,
        proposal: Proposal,
        values: Sequence[float],
        constraints: Mapping[str, float],
        attributes: Mapping[str, Any],
    ) -> None:
        """Tell a finished candidate's objective values and constraints (positive: violated)."""
        for name, violation in constraints.items():
            proposal.handle.set_constraint(name, violation)
        for name in _REFUSALS:
            proposal.handle.set_constraint(name, 0.0)
        self._attributes(proposal, {"outcome": Outcome.OK.value, **attributes})
        self._study.tell(proposal.handle, list(values))

    @recording()
    def tell_refused(
        self, proposal: Proposal, outcome: Outcome, attributes: Mapping[str, Any]
    ) -> None:
        """Tell a verdict against the candidate, or that nothing was learnt about it."""
        self._attributes(proposal, {"outcome": outcome.value, **attributes})
        if outcome.is_verdict:
            proposal.handle.set_constraint(outcome.value, 1.0)
            self._study.tell(proposal.handle, state=TrialState.PRUNED)
        else:
            self._study.tell(proposal.handle, state=TrialState.FAIL)

    @recording()
    def tell_known(self, proposal: Proposal, number: int) -> None:
        """Tell that this candidate is trial ``number`` again and was not probed.

        FAIL, which samplers do not see: a second copy of a result would make it look twice as
        certain.
        """
        self._attributes(proposal, {"same_as": number})
        self._study.tell(proposal.handle, state=TrialState.FAIL)

    @recording()
    def known_elsewhere(self) -> set[str]:
        """Return the digests of candidates that other runs of a shared study have probed."""
        return {
            str(trial.user_attrs["digest"])
            for trial in self._study.get_trials(deepcopy=False)
            if "digest" in trial.user_attrs and trial.user_attrs.get("owner") != self._owner
        }

    @recording()
    def mark_digest(self, proposal: Proposal, digest: str) -> None:
        """Note the candidate's digest as soon as its probe starts, for runs beside this one."""
        proposal.handle.set_user_attr("digest", digest)

    def _attributes(self, proposal: Proposal, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            proposal.handle.set_user_attr(name, value)


def _suggest(
    trial: optuna.trial.Trial, name: str, values: Sequence[Value], ordered: bool
) -> Value:
    """Return Optuna's choice among ``values``; by index where their order means something."""
    if ordered:
        return values[trial.suggest_int(name, 0, len(values) - 1)]
    return trial.suggest_categorical(name, list(values))
