"""What one micro-batch does to a trace, in a form that can be written into it again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from autotune.virtual import kernels
from autotune.virtual.trace import ALLOC, FREE, Cost, Trace


@dataclass(slots=True, kw_only=True)
class Recording:
    """One micro-batch, forward and backward.

    Places are positions among the storages that it allocated itself, but for the workspaces of
    libraries, which only the first one brings.

    Attributes:
        events: Range of the trace's events.
        own: Its storages' numbers, by place.
        labels: The module, phase and operator of each.
        accumulates: Whether gradients were there, so that its own were added to them and freed.
        gradients: Number of the storage of each parameter's own gradient; empty if unknown.
        forms: What each parameter's gradient is made of.
        result: Number of the loss's storage.
        result_form: What the loss is made of.
        costs: Work by phase.
        sums: Work of adding its gradients to those that were there.
        host_growth_bytes: The most that the host held beyond what it held before.
        late: Numbers of what it left to be freed by later ones, in the order of allocation.
        frees: What it freed that the one before it had left: (position among that one's
            ``late``, how many of its own storages came first).
        sums_after: How many of its own storages, from each parameter's gradient on, were allocated
            before that was freed; empty if unknown.
    """

    events: range
    own: Sequence[int]
    labels: Sequence[tuple[str, str, str]]
    accumulates: bool
    gradients: Sequence[int]
    forms: Sequence[Any]
    result: int
    result_form: Any
    costs: Mapping[str, Cost]
    sums: Cost
    host_growth_bytes: int
    late: Sequence[int]
    frees: Sequence[tuple[int, int]]

    sums_after: Sequence[int] = ()


@dataclass(slots=True)
class Left:
    """What a micro-batch left to be freed by the next ones.

    Attributes:
        numbers: By position; None once freed.
        is_copied: Whether these are copies, which nothing else will free.
    """

    numbers: list[int | None] = field(default_factory=list)
    is_copied: bool = False

    def free(self, trace: Trace, position: int) -> None:
        """Count one as freed; a real one lives on, uncounted."""
        number = self.numbers[position] if position < len(self.numbers) else None
        if number is None:
            return
        self.numbers[position] = None
        if self.is_copied:
            trace.release(number)
        else:
            trace.end_number(number)

    def end_copies(self, trace: Trace) -> None:
        """Count all copies as freed: what comes now will not."""
        for position in range(len(self.numbers)) if self.is_copied else ():
            self.free(trace, position)


class Start:
    """A trace at the start of a micro-batch.

    Args:
        trace: Where it will be recorded.
        parameters: Those that are trained.
    """

    def __init__(self, trace: Trace, parameters: Sequence[torch.Tensor]) -> None:
        self._trace = trace
        self._parameters = parameters
        self._accumulates = any(p.grad is not None for p in parameters)
        self._before = _gradients(trace, parameters)
        self._first_event = len(trace.events)
        self._costs = {phase: replace(cost) for phase, cost in trace.costs.items()}
        self._host_bytes, self._host_peak_bytes = trace.host_bytes, trace.host_peak_bytes
        self._random = _random_states()
        trace.host_peak_bytes = trace.host_bytes
        trace.sums = {number: None for number in self._before if number is not None}
        trace.sums_cost = Cost()

    def end(self) -> None:
        """Leave the trace as a run without a recording would have."""
        trace = self._trace
        trace.host_peak_bytes = max(trace.host_peak_bytes, self._host_peak_bytes)
        trace.sums = {}

    def can_repeat(self) -> bool:
        """Whether what has been done since would be done again.

        It would if no number was drawn, and nothing is left on the host.
        """
        trace = self._trace
        return (
            all(action in (ALLOC, FREE) for action, _ in trace.events[self._first_event :])
            and trace.host_bytes == self._host_bytes
            and _random_states() == self._random
        )

    def recording(self, result: Any, before: Left) -> Recording | None:
        """Return what has been done since; None if it is nothing that could be copied.

        Args:
            result: The loss.
            before: What the micro-batch before it left to be freed.
        """
        trace, parameters = self._trace, self._parameters
        if not self.can_repeat():
            return None
        events = range(self._first_event, len(trace.events))
        actions = trace.events[self._first_event :]
        allocated = [number for action, number in actions if action == ALLOC]
        freed = {number for action, number in actions if action == FREE}
        loss = trace.number_of(result) if isinstance(result, torch.Tensor) else None
        after = _gradients(trace, parameters)
        made = [] if self._accumulates else after
        stays = {number for number in allocated if number not in freed}
        if (
            loss is None
            or loss not in stays
            or None in after
            or not stays.issuperset(made)
            or len({loss, *made}) != len(made) + 1
            or (self._accumulates and after != self._before)
        ):
            return None
        left = stays - {loss, *made}
        own = [number for number in allocated if trace.storages[number].kind != "workspaces"]
        sums = list(trace.sums.values()) if self._accumulates else made
        gradients = [] if None in sums or len(set(sums)) != len(parameters) else sums
        costs = {phase: replace(cost) for phase, cost in trace.costs.items()}
        for phase, cost in self._costs.items():
            costs[phase].add(cost, -1)
        recording = Recording(
            events=events,
            own=own,
            labels=[
                (entry.module, entry.phase, entry.op)
                for entry in map(trace.storages.__getitem__, own)
            ],
            accumulates=self._accumulates,
            gradients=[number for number in gradients if number is not None],
            forms=[kernels.form(p.grad) for p in parameters if p.grad is not None],
            result=loss,
            result_form=kernels.form(result),
            costs=costs,
            sums=replace(trace.sums_cost),
            host_growth_bytes=trace.host_peak_bytes - self._host_bytes,
            late=[number for number in own if number in left],
            frees=_frees(actions, own, before),
        )
        if self._accumulates:
            recording.sums_after = _sums_after(actions, own, recording.gradients)
        return recording


def _random_states() -> tuple[Any, ...]:
    """Return what tells whether the host has drawn a number: what runs may hang on it.

    Models with LayerDrop draw which layers run. What a card draws, such as dropout, has no say.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (name, np.asarray(keys).tobytes(), *rest),
    )


def _gradients(trace: Trace, parameters: Sequence[torch.Tensor]) -> list[int | None]:
    """Return the storages' numbers; None for one that is not the gradient's alone."""
    return [
        trace.number_of(p.grad)
        if p.grad is not None
        and p.grad.layout is torch.strided
        and p.grad.untyped_storage().nbytes() == p.grad.numel() * p.grad.element_size()
        else None
        for p in parameters
    ]


def _frees(
    actions: Sequence[tuple[int, int]], own: Sequence[int], before: Left
) -> list[tuple[int, int]]:
    """Return what is freed of those that ``before`` left, as :attr:`Recording.frees`."""
    left = [] if before.is_copied else before.numbers
    positions = {number: position for position, number in enumerate(left)}
    members = set(own)
    found, count = [], 0
    for action, number in actions:
        if action == FREE and number in positions:
            found.append((positions[number], count))
        count += action == ALLOC and number in members
    return found


def _sums_after(
    actions: Sequence[tuple[int, int]], own: Sequence[int], gradients: Sequence[int]
) -> list[int]:
    """Return what :attr:`Recording.sums_after` says."""
    places = {number: place for place, number in enumerate(own)}
    wanted = set(gradients)
    after: dict[int, int] = {}
    count = 0
    for action, number in actions:
        if action == FREE and number in wanted:
            after[number] = count - places[number]
        count += action == ALLOC and number in places
    return [after[number] for number in gradients] if len(after) == len(wanted) else []


def write(
    recording: Recording,
    trace: Trace,
    parameters: Sequence[torch.Tensor],
    *,
    accumulates: bool,
    adds: Recording | None,
    before: Left,
    frees: Sequence[tuple[int, int]],
    left: Sequence[int],
) -> tuple[torch.Tensor, Left]:
    """Write a micro-batch into the trace again.

    Args:
        recording: What it does.
        trace: Where it was recorded.
        parameters: Those that are trained; they are given gradients if they have none.
        accumulates: Whether they have.
        adds: One that adds gradients, if the recording did not and the copy shall.
        before: What the one before it left; loses what this one frees.
        frees: Where it frees that, as :attr:`Recording.frees`.
        left: Those of its own storages that later ones will free.

    Returns:
        The loss, and what it leaves in its turn.
    """
    gradients = dict(zip(recording.gradients, recording.forms, strict=False))
    stay = {recording.result: recording.result_form, **({} if accumulates else gradients)}
    summed = dict(zip(recording.gradients, adds.sums_after, strict=True)) if adds else {}
    kept = set(recording.late) - set(left)
    gaps: dict[int, list[int]] = {}
    for position, count in frees:
        gaps.setdefault(count, []).append(position)
    own = set(recording.own)
    made: dict[int, torch.Tensor] = {}
    copies: dict[int, int] = {}
    ending: dict[int, list[int]] = {}
    count = 0
    for index in recording.events:
        action, number = trace.events[index]
        if action == FREE:
            if number in copies:
                trace.release(copies.pop(number))
            continue
        if number not in own:
            continue
        for copy in ending.pop(count, ()):
            trace.release(copy)
        for position in gaps.get(count, ()):
            before.free(trace, position)
        entry = trace.storages[number]
        if number in stay:
            made[number] = kernels.like(stay[number], entry.op, entry.phase)
        elif number in summed:
            copy = trace.repeat(number, freed_phase=entry.phase)
            ending.setdefault(count + summed[number], []).append(copy)
        elif number not in kept:
            copies[number] = trace.repeat(number)
        count += 1
    for copy in itertools.chain.from_iterable(ending.values()):
        trace.release(copy)
    for position in gaps.get(count, ()):
        before.free(trace, position)
    for phase, cost in recording.costs.items():
        trace.costs.setdefault(phase, Cost()).add(cost)
    if adds is not None:
        trace.costs.setdefault("backward", Cost()).add(adds.sums)
    elif recording.accumulates and not accumulates:
        trace.costs.setdefault("backward", Cost()).add(recording.sums, -1)
    host_bytes = trace.host_bytes + recording.host_growth_bytes
    trace.host_peak_bytes = max(trace.host_peak_bytes, host_bytes)
    if not accumulates:
        for parameter, number in zip(parameters, recording.gradients, strict=True):
            parameter.grad = made[number]
    return made[recording.result], Left([copies.pop(number, None) for number in left], True)
