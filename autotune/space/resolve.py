"""A search space in a given context: what can be drawn on this machine, from this data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from autotune.errors import SpaceError
from autotune.space.context import Context
from autotune.space.domains import Value
from autotune.space.fixed import merge
from autotune.space.knob import Candidate, Comparison, Knob, nearest
from autotune.space.knobs.batching import share_of_tokens
from autotune.space.knobs.precision import context_keys
from autotune.space.plan import Plan

_LONGEST_SUFFIX = 60
_MIXED_PRECISION = ("bf16", "fp16")


class Suggest(Protocol):
    """Chooses one of the values offered, such as a wrapper around ``trial.suggest_*``."""

    def __call__(self, name: str, values: Sequence[Value], ordered: bool, /) -> Value:
        """Return one of ``values`` for the parameter ``name``."""
        ...


class ResolvedSpace:
    """What can be drawn here. Made by :meth:`autotune.SearchSpace.resolve`.

    Attributes:
        knobs: In drawing order, those from pins and those that every space has included.
        context: What was known.
        pins: Values that the user fixed.
        inactive: Knobs that can never vary here, each with the reason.
        removed: Values that can never be drawn here, as knob, value and reason.
        notices: What the user should be told about pins and the baseline.
        baseline: The candidate that changes nothing, as near as this context allows.
        leanest: The candidate that each knob's own order of values makes the leanest.
    """

    def __init__(
        self,
        plan: Plan,
        context: Context,
        *,
        pins: Mapping[str, Value],
        fixed: Mapping[str, Any],
        inactive: tuple[tuple[str, str], ...],
        removed: tuple[tuple[str, Value, str], ...],
        notices: tuple[str, ...],
    ) -> None:
        self.knobs: tuple[Knob, ...] = plan.knobs
        self.context = context
        self.pins = dict(pins)
        self.inactive = inactive
        self.removed = removed
        self._plan = plan
        self._fixed = dict(fixed)
        self._unions = tuple(plan.union(index) for index in range(len(plan.knobs)))
        self.baseline, notes = self._find_baseline()
        self.leanest = self._find_leanest()
        self.notices: tuple[str, ...] = (*notices, *notes)

    def draw(self, suggest: Suggest) -> dict[str, Value]:
        """Return a legal candidate, asking ``suggest`` for every knob that leaves a choice."""
        candidate: dict[str, Value] = {}
        for index, knob in enumerate(self.knobs):
            step = self._plan.step(index, candidate)
            if step.inactive is not None:
                continue
            if len(step.legal) == 1:
                candidate[knob.name] = step.legal[0]
                continue
            name = self._parameter(index, step.legal)
            value = suggest(name, step.legal, knob.ordered)
            if value not in step.legal:
                raise SpaceError(f"{value!r} was drawn for {name!r}, which offers {step.legal}.")
            candidate[knob.name] = value
        return candidate

    def params(self, candidate: Candidate) -> dict[str, Value]:
        """Return what :meth:`draw` must be answered, per parameter, to give ``candidate``.

        Raises:
            SpaceError: If ``candidate`` cannot be drawn here.
        """
        params: dict[str, Value] = {}
        for index, knob in enumerate(self.knobs):
            before = {k.name: candidate[k.name] for k in self.knobs[:index] if k.name in candidate}
            step = self._plan.step(index, before)
            if step.inactive is not None:
                if knob.name in candidate:
                    raise SpaceError(f"{knob.name} does not apply: {step.inactive}.")
                continue
            value = candidate.get(knob.name)
            if knob.name not in candidate or value not in step.legal:
                raise SpaceError(f"{knob.name}={value} is not one of {step.legal} here.")
            if len(step.legal) > 1:
                params[self._parameter(index, step.legal)] = value
        unknown = set(candidate) - {knob.name for knob in self.knobs}
        if unknown:
            raise SpaceError(f"{', '.join(sorted(unknown))} is not in this space.")
        return params

    def enumerate(self, limit: int | None = None) -> Iterator[dict[str, Value]]:
        """Yield the candidates, at most ``limit`` of them, in the order of the knobs' values."""
        yield from islice(self._plan.candidates(), limit)

    def size(self, limit: int = 1_000_000) -> int:
        """Return the number of candidates, or ``limit`` if there are more."""
        return min(self._plan.size, limit)

    def values(self) -> dict[str, tuple[Value, ...]]:
        """Return, per knob, the values that some candidate has."""
        return {knob.name: self._unions[index] for index, knob in enumerate(self.knobs)}

    def config(self, candidate: Candidate) -> dict[str, Any]:
        """Return the TRL keys that the candidate stands for.

        Raises:
            SpaceError: If two knobs give one key different values, or a knob writes a key that it
                does not own.
        """
        config: dict[str, Any] = {}
        if not any(key in self._fixed for key in _MIXED_PRECISION):
            config.update(context_keys(self.context))
        for knob in self.knobs:
            if knob.name in candidate:
                keys = knob.written(candidate[knob.name], candidate, self.context)
                self._merge(config, keys, f"the knob {knob.name!r}")
        self._merge(config, self._fixed, "the keys fixed by the space")
        return config

    def coverage(self, candidate: Candidate) -> float:
        """Return the share (0 to 1) of the data's loss tokens that the candidate trains on."""
        return share_of_tokens(candidate, self.context)

    def changes(self, candidate: Candidate) -> frozenset[str]:
        """Return what differs from the baseline in what is learnt: ``tokens``, ``method``."""
        changes = set()
        for knob in self.knobs:
            meaning = knob.meaning(candidate, self.context)
            if meaning == knob.meaning(self.baseline, self.context):
                continue
            known = [c[knob.name] for c in (candidate, self.baseline) if knob.name in c]
            changes |= {knob.change(value) for value in known}
        return frozenset(changes - {"nothing"})

    def digest(self, candidate: Candidate) -> str:
        """Return 16 hexadecimal digits that are equal for candidates with the same effect."""
        effective = {
            knob.name: knob.effect(candidate[knob.name], candidate, self.context)
            for knob in self.knobs
            if knob.name in candidate
        }
        text = json.dumps(self.config(effective), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def demands_at_least(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether ``candidate`` certainly needs at least as much device memory as ``other``.

        True only if the same knobs are active in both, and each is equal or known never to need
        less with the value it has in ``candidate``.
        """
        same = set(candidate) == set(other)
        return same and self._at_least(candidate, other, lambda knob: knob.memory_at_least)

    def loads_at_least(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether ``candidate`` certainly needs the device memory that loading ``other`` needs.

        Only what comes before the first step is compared, so that candidates with the same
        weights are equal here however they train them.
        """
        return self._at_least(candidate, other, lambda knob: knob.loads_at_least)

    def _at_least(
        self, candidate: Candidate, other: Candidate, rule_of: Callable[[Knob], Comparison | None]
    ) -> bool:
        """Whether every knob has the same effect in both, or a rule says that it needs no less."""
        context = self.context
        for knob in self.knobs:
            larger, smaller = (
                knob.effect(item[knob.name], item, context) if knob.name in item else None
                for item in (candidate, other)
            )
            if larger == smaller:
                continue
            rule = rule_of(knob)
            if rule is None or not rule(larger, smaller, candidate, context):
                return False
        return True

    def _merge(self, config: dict[str, Any], keys: Mapping[str, Any], source: str) -> None:
        clashes = merge(config, keys)
        if clashes:
            raise SpaceError(f"{source} and another source disagree on {', '.join(clashes)}.")

    def _parameter(self, index: int, legal: Sequence[Value]) -> str:
        """Return the parameter's name: Optuna allows only one set of values per name."""
        name = self.knobs[index].name
        if tuple(legal) == self._unions[index]:
            return name
        suffix = ",".join(str(value) for value in legal)
        if len(suffix) > _LONGEST_SUFFIX:
            suffix = hashlib.sha256(suffix.encode()).hexdigest()[:8]
        return f"{name}@{suffix}"

    def _find_leanest(self) -> dict[str, Value]:
        candidate: dict[str, Value] = {}
        for index, knob in enumerate(self.knobs):
            step = self._plan.step(index, candidate)
            if step.inactive is None:
                candidate[knob.name] = knob.lean(step.legal)
        return candidate

    def _find_baseline(self) -> tuple[dict[str, Value], list[str]]:
        candidate: dict[str, Value] = {}
        notes = []
        for index, knob in enumerate(self.knobs):
            step = self._plan.step(index, candidate)
            if step.inactive is not None:
                continue
            value = nearest(knob, step.legal)
            if value != knob.baseline and knob.name not in self.pins:
                reason = dict(step.refused).get(knob.baseline, "the space does not offer that")
                notes.append(
                    f"The baseline uses {knob.name}={value} instead of {knob.baseline}: {reason}."
                )
            candidate[knob.name] = value
        return candidate, notes
