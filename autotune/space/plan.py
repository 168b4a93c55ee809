"""What may be drawn in which situation, worked out once so that no draw meets a dead end.

Knobs are drawn in an order in which every knob follows those its rules look at. Of the values
drawn so far, only those that a later rule looks at matter; they form the *state*. There are few
states, so that the legal values of each knob can be tabulated per state, values that would leave
a later knob without any can be taken out, and candidates can be counted without listing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autotune.errors import SpaceError
from autotune.space.context import Context
from autotune.space.domains import Value
from autotune.space.knob import Candidate, Knob, Refusal, nearest

# Values of the knobs that later rules look at, as (name, value); inactive knobs are absent.
State: TypeAlias = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What can be done with one knob in one state.

    Attributes:
        inactive: Why the knob does not apply; None if it applies.
        legal: Values that may be drawn.
        refused: The others, each with the reason.
    """

    inactive: str | None
    legal: tuple[Value, ...]
    refused: tuple[tuple[Value, str], ...]


def in_order(knobs: Sequence[Knob]) -> tuple[Knob, ...]:
    """Return ``knobs`` in their order, but each after the knobs that it depends on.

    Raises:
        SpaceError: If knobs depend on each other in a circle.
    """
    by_name = {knob.name: knob for knob in knobs}
    placed: dict[str, Knob] = {}

    def place(knob: Knob, waiting: tuple[str, ...]) -> None:
        if knob.name in placed:
            return
        if knob.name in waiting:
            circle = " -> ".join((*waiting[waiting.index(knob.name) :], knob.name))
            raise SpaceError(f"knobs depend on each other in a circle: {circle}.")
        for name in knob.depends_on:
            if name in by_name:
                place(by_name[name], (*waiting, knob.name))
        placed[knob.name] = knob

    for knob in knobs:
        place(knob, ())
    return tuple(placed.values())


def seen_by(knob: Knob, candidate: Candidate) -> dict[str, Value]:
    """Return the part of ``candidate`` that the rules of ``knob`` may look at."""
    return {name: candidate[name] for name in knob.depends_on if name in candidate}


class Plan:
    """The legal values of each knob in each state that can be reached.

    Args:
        knobs: In drawing order.
        values: Per knob, the values to search.
        context: What is known before anything is drawn.
        pins: Knobs that the user fixed; their values are kept even where they have no effect.
        implied: Knobs that the space does not mention: only the value nearest to the baseline is
            kept.
    """

    def __init__(
        self,
        knobs: tuple[Knob, ...],
        values: Mapping[str, tuple[Value, ...]],
        context: Context,
        *,
        pins: Mapping[str, Value],
        implied: frozenset[str],
    ) -> None:
        self.knobs = knobs
        self.values = values
        self._context = context
        self._pins = pins
        self.implied = implied
        self._live = tuple(
            frozenset(
                earlier.name
                for earlier in knobs[:index]
                if any(earlier.name in later.depends_on for later in knobs[index:])
            )
            for index in range(len(knobs) + 1)
        )
        self.tried = self._forward()
        """Per knob, the steps before values that lead into dead ends were taken out."""
        self.steps, self.size = self._backward()
        """Per knob, the steps that lead to a candidate; and the number of candidates."""

    def step(self, index: int, candidate: Candidate) -> Step:
        """Return what can be done with knob number ``index`` after ``candidate`` so far."""
        return self.steps[index][self._state(index, candidate)]

    def candidates(self) -> Iterator[dict[str, Value]]:
        """Yield all candidates, in the order of the knobs' values."""
        yield from self._extend(0, {}) if self.size else ()

    def union(self, index: int) -> tuple[Value, ...]:
        """Return the values of knob number ``index`` that are legal in some state."""
        legal = [step.legal for step in self.steps[index].values()]
        name = self.knobs[index].name
        return tuple(v for v in self.values[name] if any(v in values for values in legal))

    def _state(self, index: int, candidate: Candidate) -> State:
        live = self._live[index]
        return tuple((name, value) for name, value in candidate.items() if name in live)

    def _forward(self) -> list[dict[State, Step]]:
        tried: list[dict[State, Step]] = []
        states: dict[State, None] = {(): None}
        for index, knob in enumerate(self.knobs):
            steps = {state: self._try(knob, dict(state)) for state in states}
            states = {
                following: None
                for state, step in steps.items()
                for following in self._following(index, state, step)
            }
            tried.append(steps)
        return tried

    def _try(self, knob: Knob, candidate: Candidate) -> Step:
        seen, context, name = seen_by(knob, candidate), self._context, knob.name
        pinned = name in self._pins
        inactive = knob.active_if(seen, context) if knob.active_if else None
        if inactive is not None:
            if pinned and knob.pin_needs_active:
                return Step(None, (), ((self._pins[name], inactive),))
            return Step(inactive, (), ())
        legal: list[Value] = []
        refused: list[tuple[Value, str]] = []
        for value in self.values[name]:
            reason = context.refusals.get(name, {}).get(str(value))
            if reason is None and knob.refuse:
                reason = knob.refuse(value, seen, context)
            if reason is None and knob.no_effect and not pinned:
                reason = knob.no_effect(value, seen, context)
            if reason is None:
                legal.append(value)
            else:
                refused.append((value, reason))
        if name in self.implied and legal:
            legal = [nearest(knob, legal)]
        return Step(None, tuple(legal), tuple(refused))

    def _following(self, index: int, state: State, step: Step) -> dict[State, Value]:
        """Return the state after each value, or after skipping the knob, with the value."""
        if step.inactive is not None:
            return {self._state(index + 1, dict(state)): None}
        name = self.knobs[index].name
        return {
            self._state(index + 1, {**dict(state), name: value}): value for value in step.legal
        }

    def _backward(self) -> tuple[list[dict[State, Step]], int]:
        counts: dict[State, int] = {(): 1}
        all_steps: list[dict[State, Step]] = []
        for index in reversed(range(len(self.knobs))):
            steps: dict[State, Step] = {}
            totals: dict[State, int] = {}
            for state, step in self.tried[index].items():
                kept, total = self._keep(index, state, step, counts)
                totals[state] = total
                if total:
                    steps[state] = kept
            counts = totals
            all_steps.append(steps)
        all_steps.reverse()
        size = counts.get((), 0)
        return (self._reachable(all_steps) if size else all_steps), size

    def _keep(
        self, index: int, state: State, step: Step, counts: Mapping[State, int]
    ) -> tuple[Step, int]:
        if step.inactive is not None:
            return step, counts[self._state(index + 1, dict(state))]
        name, legal, dead, total = self.knobs[index].name, [], [], 0
        for value in step.legal:
            following = self._state(index + 1, {**dict(state), name: value})
            total += counts[following]
            if counts[following]:
                legal.append(value)
            else:
                dead.append((value, self._dead_end(index + 1, following)))
        return replace(step, legal=tuple(legal), refused=(*step.refused, *dead)), total

    def _dead_end(self, index: int, state: State) -> str:
        """Return why no candidate has ``state`` before knob number ``index``."""
        # Every way from here ends at a knob without a value; the first one says as much as any.
        step = self.tried[index][state]
        if step.inactive is None and not step.legal:
            name = self.knobs[index].name
            if not step.refused:
                return f"it leaves {name} without a value"
            value, reason = step.refused[0]
            text = f"it leaves {name} without a legal value ({value}: {reason})"
            return Refusal(text, remedies=reason.remedies) if isinstance(reason, Refusal) else text
        return self._dead_end(index + 1, next(iter(self._following(index, state, step))))

    def _reachable(self, all_steps: list[dict[State, Step]]) -> list[dict[State, Step]]:
        states: dict[State, None] = {(): None}
        reached: list[dict[State, Step]] = []
        for index, steps in enumerate(all_steps):
            here = {state: steps[state] for state in states}
            states = {
                following: None
                for state, step in here.items()
                for following in self._following(index, state, step)
            }
            reached.append(here)
        return reached

    def _extend(self, index: int, candidate: dict[str, Value]) -> Iterator[dict[str, Value]]:
        if index == len(self.knobs):
            yield dict(candidate)
            return
        step = self.step(index, candidate)
        if step.inactive is not None:
            yield from self._extend(index + 1, candidate)
            return
        name = self.knobs[index].name
        for value in step.legal:
            yield from self._extend(index + 1, {**candidate, name: value})
