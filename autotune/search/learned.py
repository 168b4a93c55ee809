"""A sampler that knows what was predicted, learns how far that is off, and asks for what counts.

Each quantity (the objectives, and the memory that decides the fit) has a posterior for every
candidate: what was predicted, times what measurements teach about predictions on this device (see
``residuals.py``); without predictions, what measurements alone teach. The candidate that is
expected to add most to the dominated hypervolume, counting what does not fit as nothing, is next
(expected hypervolume improvement, Emmerich et al., 2006, with a probability of feasibility,
Gardner et al., 2014).

All it learns from is in the study and in :meth:`LearnedSampler.inform`, so that resuming, several
hosts on one study and dashboards work as with any sampler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.search.gain import NEVER, Weighing
from autotune.search.guess import Guess, Lesson
from autotune.search.quantity import Quantity
from autotune.search.residuals import Likeness

MEMORY = "memory_budget"
"""The constraint that says how far peak memory is over its budget."""

_ON_MEMORY = ("device_oom", "host_oom")

LINKED_WITHIN = 0.02
"""Spread of an objective over the load, up to which it is taken to be the memory itself."""

FAITH = 1.0
"""Candidates just like it that ran, which each candidate is given from the start."""

REFUSAL = 4.0
"""Candidates that ran, which one that was refused counts as much as: the reason for a refusal is
mostly a setting, so that what has it too will be refused as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the sampler chooses from.

    Attributes:
        candidates: Knob name to value, for each.
        params: What Optuna's parameters are for each, as they are suggested.
        ordered: Knobs whose values lie on a scale.
    """

    candidates: Sequence[Mapping[str, Any]]
    params: Sequence[Mapping[str, Any]]
    ordered: Sequence[str]


@dataclass(slots=True)
class _Told:
    """What the study holds, by the numbers of candidates."""

    values: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    loads: dict[int, float] = field(default_factory=dict)
    feasible: list[tuple[float, ...]] = field(default_factory=list)
    too_large: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)


class LearnedSampler(optuna.samplers.BaseSampler):
    """Proposes the candidate with the greatest expected gain in hypervolume.

    Args:
        options: Makes what is chosen from, once it is needed.
        directions: ``minimize`` or ``maximize`` per objective.
        seed: Of what is drawn at random.

    Attributes:
        expected_gain: Share of the front's hypervolume that the candidate chosen last was
            expected to add; None before there is one.
    """

    def __init__(
        self, options: Callable[[], Options], *, directions: Sequence[str], seed: int
    ) -> None:
        self.expected_gain: float | None = None
        self._make_options = options
        self._directions = tuple(directions)
        self._random = np.random.default_rng(seed)
        self._fallback = optuna.samplers.RandomSampler(seed=seed)
        self._guesses: Sequence[Guess] = ()
        self._lessons: Sequence[Lesson] = ()
        self._chosen: dict[int, Mapping[str, Any]] = {}
        self._options: Options | None = None
        self._places: dict[str, int] = {}
        self._rows: dict[str, int | None] = {}
        self._likeness = Likeness((), ())
        self._quantities: list[Quantity] = []

    def inform(self, guesses: Sequence[Guess], lessons: Sequence[Lesson] = ()) -> None:
        """Take what was predicted of candidates, and what earlier runs teach of predictions."""
        self._guesses, self._lessons = tuple(guesses), tuple(lessons)
        self._options = None

    @property
    def has_guesses(self) -> bool:
        """Whether anything was predicted."""
        return bool(self._guesses)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return nothing: the space is conditional, so that parameters come one by one."""
        return {}

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return nothing; see :meth:`infer_relative_search_space`."""
        return {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the parameter's value in the candidate that was chosen for this trial."""
        if trial.number not in self._chosen:
            self._chosen[trial.number] = self._choose(study, trial)
        chosen = self._chosen[trial.number]
        if param_name in chosen:
            return chosen[param_name]
        return self._fallback.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Forget what was chosen for the trial."""
        self._chosen.pop(trial.number, None)

    def reseed_rng(self) -> None:
        """Draw anew from here on, as Optuna asks of a copy of a sampler."""
        self._random = np.random.default_rng()
        self._fallback.reseed_rng()

    def _choose(self, study: optuna.Study, trial: FrozenTrial) -> Mapping[str, Any]:
        """Return the parameters of the next candidate; none if all are known."""
        options = self._prepared()
        told = self._read(study, trial)
        left = [row for row in range(len(options.candidates)) if row not in told.known]
        if not left:
            return {}
        gains = self._weighing(told).gains(left, self._chances(told, left), self._random)
        gains = np.nan_to_num(gains, nan=NEVER, posinf=NEVER)
        best = np.flatnonzero(gains >= gains.max())
        self.expected_gain = float(gains.max())
        return options.params[left[int(self._random.choice(best))]]

    def _prepared(self) -> Options:
        if self._options is None:
            self._options = self._make_options()
            candidates = self._options.candidates
            self._rows = {}
            self._places = {_key(item): row for row, item in enumerate(candidates)}
            learnt = [item.candidate for item in self._lessons]
            self._likeness = Likeness([*candidates, *learnt], self._options.ordered)
            guessed = [
                (self._places[_key(item.candidate)], (*item.values, item.load))
                for item in self._guesses
                if _key(item.candidate) in self._places
            ]
            ratios = [
                (len(candidates) + place, (*item.ratios, item.load_ratio))
                for place, item in enumerate(self._lessons)
            ]
            linked, _ = self._link(_Told())
            of_memory = (linked, len(self._directions))
            shares = [
                {
                    self._places[_key(item.candidate)]: found
                    for item in self._guesses
                    if _key(item.candidate) in self._places
                    and (found := item.memory_shares if is_memory else item.time_shares)
                }
                for is_memory in (False, True)
            ]
            self._quantities = [
                Quantity(
                    self._likeness,
                    len(candidates),
                    guesses=_known(guessed, number),
                    lessons=_known(ratios, number),
                    is_memory=number in of_memory,
                    shares=shares[number in of_memory],
                )
                for number in range(len(self._directions) + 1)
            ]
        return self._options

    def _read(self, study: optuna.Study, trial: FrozenTrial) -> _Told:
        """Return what was told, of candidates that can be chosen here."""
        told = _Told()
        for item in study.get_trials(deepcopy=False):
            row = self._row(item.user_attrs.get("candidate"))
            if item.number == trial.number or row is None:
                continue
            told.known.add(row)
            if item.state is TrialState.RUNNING:
                told.pending.append(row)
            elif item.state is TrialState.COMPLETE:
                told.values.append((row, tuple(item.values)))
                if MEMORY in item.constraints:
                    told.loads[row] = 1.0 + item.constraints[MEMORY]
                if all(value <= 0 for value in item.constraints.values()):
                    told.feasible.append(tuple(item.values))
            elif item.state is TrialState.PRUNED:
                on_memory = any(item.constraints.get(name, 0.0) > 0 for name in _ON_MEMORY)
                (told.too_large if on_memory else told.refused).append(row)
        return told

    def _row(self, text: str | None) -> int | None:
        """Return the number of the candidate that a trial notes; None if there is none."""
        if text is None:
            return None
        if text not in self._rows:  # each is read once, though all trials are with every ask
            self._rows[text] = self._places.get(_key(json.loads(text)))
        return self._rows[text]

    def _weighing(self, told: _Told) -> Weighing:
        linked, budget = self._link(told)
        objectives = []
        for number, quantity in enumerate(self._quantities[:-1]):
            observed = [(row, values[number]) for row, values in told.values]
            is_memory = number == linked and budget is not None
            objectives.append(
                quantity.believe(
                    observed,
                    above=told.too_large if is_memory else (),
                    limit=budget if is_memory and budget is not None else 1.0,
                )
            )
        load = self._quantities[-1].believe(list(told.loads.items()), above=told.too_large)
        return Weighing(
            directions=self._directions,
            objectives=objectives,
            load=load,
            linked=linked,
            budget=budget,
            measured=np.array(told.feasible, dtype=float).reshape(-1, len(self._directions)),
            pending=told.pending,
        )

    def _link(self, told: _Told) -> tuple[int | None, float | None]:
        """Return the objective that is the memory itself, and what it is at the budget.

        Its value over the load is the same for all; read off what was measured, or predicted.
        """
        pairs: list[tuple[Sequence[float | None], float]] = [
            (values, told.loads[row]) for row, values in told.values if told.loads.get(row)
        ] or [
            (item.values, item.load)
            for item in self._guesses
            if item.load and None not in item.values
        ]
        for number, direction in enumerate(self._directions):
            found = [float(values[number] or 0.0) / load for values, load in pairs if load]
            if direction == "minimize" and found and min(found) > 0:
                middle = float(np.median(found))
                if max(found) - min(found) <= LINKED_WITHIN * middle:
                    return number, middle
        return None, None

    def _chances(self, told: _Told, left: Sequence[int]) -> NDArray[np.float64]:
        """Return how likely candidates are to run, judged by those that are like them."""
        if not told.refused:
            return np.ones(len(left))
        _, good = self._likeness.parts(left, [row for row, _ in told.values])
        _, bad = self._likeness.parts(left, told.refused)
        for_it = FAITH + good.sum(axis=1)
        return np.asarray(for_it / (for_it + REFUSAL * bad.sum(axis=1)))


def _known(rows: Sequence[tuple[int, Sequence[float | None]]], number: int) -> dict[int, float]:
    found = {row: values[number] for row, values in rows}
    return {row: value for row, value in found.items() if value is not None}


def _key(candidate: Mapping[str, Any]) -> str:
    return json.dumps(dict(candidate), sort_keys=True)
