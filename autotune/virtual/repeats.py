"""Micro-batches that come again: run once, counted as often as they come.

Two micro-batches of the same shapes, met with gradients in the same state, make the same tensors
live and die in the same order. The second need not be run: what the first one did to the trace is
written into it again, and gradients that it would have made are made. The trainer, its optimizer
and everything between micro-batches run as they are.

What a first micro-batch does once, such as filling a cache, must not be written again. So one is
copied only after another, whose tensors may have other sizes, was seen to run the same operators.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune.virtual import kernels
from autotune.virtual.trace import ALLOC, FREE, Cost, Trace

_IGNORED_LABEL = -100
"""Marks positions without a loss; torch.nn.CrossEntropyLoss' default ``ignore_index``."""


class Repeats:
    """Spares a trainer the micro-batches that its trace knows already.

    Args:
        trace: Of the device that the trainer runs on.

    Attributes:
        num_spared: Micro-batches that were not run.
    """

    def __init__(self, trace: Trace) -> None:
        self.num_spared = 0
        self._trace = trace
        self._expected: deque[object] = deque()
        self._recorded: dict[object, _Recording] = {}
        self._alike: dict[tuple[str, ...], list[_Recording]] = {}
        self._before: _Left | None = None

    def expect(self, batch: Mapping[str, Any]) -> None:
        """Take note of a micro-batch; trainers collate ahead, but run them in this order."""
        self._expected.append(_fingerprint(batch))

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a trainer's ``training_step(model, inputs, ...)`` that runs ``step`` if it must.

        Args:
            step: Runs a micro-batch forward and backward and returns its loss.
        """

        def training_step(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            batch = self._expected.popleft() if self._expected else None
            parameters = [p for p in model.parameters() if p.requires_grad]
            has_gradients = {p.grad is not None for p in parameters}
            key: object = (batch, *has_gradients)
            if batch is None or len(has_gradients) != 1 or any(map(_is_watched, parameters)):
                key = None
            known = self._recorded.get(key)
            if known is not None and len(self._alike[known.operators]) > 1:
                return self._copy(known, parameters)
            if self._before is not None:
                self._before.end_copies(self._trace)
            start = _Start(self._trace, parameters)
            result = step(model, *args, **kwargs)
            recording = start.recording(self._trace, parameters, result, self._before)
            self._before = None
            if key is not None and recording is not None:
                self._recorded[key] = recording
                self._alike.setdefault(recording.operators, []).append(recording)
                self._before = _Left(recording.operators, dict(recording.late))
            return result

        return training_step

    def _copy(self, known: _Recording, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        self.num_spared += 1
        before = self._before
        if before is not None and before.operators != known.operators:
            before.end_copies(self._trace)
            before = None
        # One that came after another of its kind shows where it frees what that one left.
        frees = max((item.frees for item in self._alike[known.operators]), key=len)
        result, late = known.repeat(self._trace, parameters, before, frees)
        self._before = _Left(known.operators, late, is_copied=True)
        return result


@dataclass(slots=True)
class _Left:
    """What a micro-batch leaves to be freed by later ones.

    Attributes:
        operators: Of that micro-batch.
        late: Storage numbers, by position among its allocations.
        is_copied: Whether these are copies, which nothing else will free.
    """

    operators: tuple[str, ...]
    late: dict[int, int]
    is_copied: bool = False

    def free(self, trace: Trace, position: int) -> None:
        """Count the one at ``position`` as freed; a real one lives on, uncounted."""
        number = self.late.pop(position, None)
        if number is None:
            return
        if self.is_copied:
            trace.release(number)
        else:
            trace.end_numbers([number])

    def end_copies(self, trace: Trace) -> None:
        """Count all copies as freed: what comes is no copy, and will not."""
        for position in list(self.late) if self.is_copied else ():
            self.free(trace, position)


@dataclass(slots=True, kw_only=True)
class _Recording:
    """What one micro-batch did to the trace.

    Attributes:
        events: Range of the trace's events.
        costs: Work by phase.
        host_growth_bytes: The most that the host held beyond what it held before.
        made: Tensors that outlive it and are made anew, by storage number: gradients, the loss.
        gradients: Storage number of each parameter's gradient; empty where they were there.
        operators: That allocated something, in order.
        late: Numbers of the storages it left to be freed later, by position among its own.
        frees: What it frees of those that one of its kind before it left: positions among that
            one's allocations, by the number of its own that come first.
    """

    events: range
    costs: dict[str, Cost]
    host_growth_bytes: int
    made: dict[int, Any]
    gradients: Sequence[int]
    result: int
    operators: tuple[str, ...]
    late: dict[int, int]
    frees: dict[int, list[int]]

    def repeat(
        self,
        trace: Trace,
        parameters: Sequence[torch.Tensor],
        before: _Left | None,
        frees: Mapping[int, Sequence[int]],
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """Write it into the trace again.

        Args:
            trace: Where it was recorded.
            parameters: Those that are trained; get gradients.
            before: What the micro-batch before it, of the same kind, left to it.
            frees: Where it frees that, as :attr:`frees`.

        Returns:
            The loss, and what is left to be freed after it, as :attr:`late`.
        """
        freed_later = {position for positions in frees.values() for position in positions}
        copies: dict[int, int] = {}
        made: dict[int, torch.Tensor] = {}
        places: dict[int, int] = {}
        for index in self.events:
            action, number = trace.events[index]
            if action == FREE:
                copy = copies.pop(number, None)
                if copy is not None:
                    trace.release(copy)
                continue
            entry = trace.storages[number]
            if entry.kind == "workspaces":
                continue  # taken once
            if before is not None:
                for position in frees.get(len(places), ()):
                    before.free(trace, position)
            places[number] = len(places)
            if number in self.made:
                made[number] = kernels.like(self.made[number], entry.op, entry.phase)
            elif places[number] not in self.late or places[number] in freed_later:
                copies[number] = trace.repeat(number)
            # else it is kept for good, and there already
        if before is not None:
            for position in frees.get(len(places), ()):
                before.free(trace, position)
        for phase, cost in self.costs.items():
            _add(trace.costs.setdefault(phase, Cost()), cost, 1)
        trace.host_peak_bytes = max(
            trace.host_peak_bytes, trace.host_bytes + self.host_growth_bytes
        )
        for parameter, number in zip(parameters, self.gradients, strict=bool(self.gradients)):
            parameter.grad = made[number]
        return made[self.result], {places[number]: copy for number, copy in copies.items()}


class _Start:
    """The trace at the start of a micro-batch."""

    def __init__(self, trace: Trace, parameters: Sequence[torch.Tensor]) -> None:
        self._first_event = len(trace.events)
        self._costs = {phase: replace(cost) for phase, cost in trace.costs.items()}
        self._host_bytes, self._host_peak_bytes = trace.host_bytes, trace.host_peak_bytes
        self._gradients = _gradients(trace, parameters)
        trace.host_peak_bytes = trace.host_bytes

    def recording(
        self,
        trace: Trace,
        parameters: Sequence[torch.Tensor],
        result: Any,
        before: _Left | None,
    ) -> _Recording | None:
        """Return what has been done since; None if it is nothing that could be copied."""
        host_growth = trace.host_peak_bytes - self._host_bytes
        trace.host_peak_bytes = max(trace.host_peak_bytes, self._host_peak_bytes)
        events = range(self._first_event, len(trace.events))
        actions = [trace.events[index] for index in events]
        order = [number for action, number in actions if action == ALLOC]
        left = set(order) - {number for action, number in actions if action == FREE}
        loss = trace.number_of(result) if isinstance(result, torch.Tensor) else None
        gradients = _gradients(trace, parameters)
        made = [] if gradients == self._gradients else gradients
        if (
            loss is None
            or not left.issuperset([loss, *made])
            or len({loss, *made}) != len(made) + 1
            or any(action not in (ALLOC, FREE) for action, _ in actions)
            or trace.host_bytes != self._host_bytes
        ):
            return None
        numbers = [number for number in made if number is not None]
        tensors = [result, *(p.grad for p in parameters if made)]
        forms = zip([loss, *numbers], map(kernels.form, tensors), strict=True)
        costs = {phase: replace(cost) for phase, cost in trace.costs.items()}
        for phase, cost in self._costs.items():
            _add(costs[phase], cost, -1)
        # The first one brings the libraries' workspaces, which stay.
        own = [number for number in order if trace.storages[number].kind != "workspaces"]
        operators = tuple(trace.storages[number].op for number in own)
        late = left - {loss, *numbers}
        return _Recording(
            events=events,
            costs=costs,
            host_growth_bytes=host_growth,
            made=dict(forms),
            gradients=numbers,
            result=loss,
            operators=operators,
            late={place: number for place, number in enumerate(own) if number in late},
            frees=_frees(actions, set(own), before)
            if before is not None and before.operators == operators
            else {},
        )


def _frees(
    actions: Sequence[tuple[int, int]], own: Collection[int], before: _Left
) -> dict[int, list[int]]:
    """Return what is freed of those that ``before`` left, as :attr:`_Recording.frees`."""
    positions = {number: position for position, number in before.late.items()}
    found: dict[int, list[int]] = {}
    count = 0
    for action, number in actions:
        if action == FREE and number in positions:
            found.setdefault(count, []).append(positions[number])
        count += number in own and action == ALLOC
    return found


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


def _is_watched(parameter: torch.Tensor) -> bool:
    """Whether something is told of each new gradient, which a copy would not tell."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _add(total: Cost, part: Cost, sign: int) -> None:
    total.flops += sign * part.flops
    total.moved_bytes += sign * part.moved_bytes
    total.link_bytes += sign * part.link_bytes
    total.num_ops += sign * part.num_ops
    total.seconds += sign * part.seconds


def _fingerprint(batch: Mapping[str, Any]) -> object:
    """Return what tells micro-batches apart that run differently; None for one like no other."""
    parts: list[object] = []
    for name, value in sorted(batch.items()):
        if value is None or isinstance(value, (bool, int, float, str)):
            parts.append((name, type(value), value))
            continue
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return None
        shape, dtype = tuple(value.shape), value.dtype
        # Which token it is has no say in shapes; whether it is trained on may have.
        if name == "input_ids":
            value = torch.empty(0)
        elif name == "labels":
            value = value != _IGNORED_LABEL
        content = value.contiguous().view(torch.uint8).numpy().tobytes()
        parts.append((name, shape, dtype, hashlib.blake2b(content).digest()))
    return tuple(parts)
