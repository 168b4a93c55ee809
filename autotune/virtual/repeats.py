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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        self._seen: list[_Recording] = []
        self._last: _Recording | None = None
        self._late: dict[int, int] = {}

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
            if batch is None or len(has_gradients) != 1 or any(map(_is_watched, parameters)):
                self._end_late()
                self._last = None
                return step(model, *args, **kwargs)
            key = (batch, *has_gradients)
            known = self._recorded.get(key)
            if known is not None and known.is_steady:
                return self._copy(known, parameters)
            self._end_late()
            start = _Start(self._trace, parameters)
            result = step(model, *args, **kwargs)
            self._keep(key, start.recording(self._trace, parameters, result))
            return result

        return training_step

    def _keep(self, key: object, recording: _Recording | None) -> None:
        self._last = recording
        if recording is None:
            return
        for other in self._seen:
            if other.operators == recording.operators:
                other.is_steady = recording.is_steady = True
        self._seen.append(recording)
        self._recorded[key] = recording

    def _copy(self, known: _Recording, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._last is not None:
            # What the last real one left to the next one to be freed. There is none: it lives on.
            self._trace.end_numbers(self._last.left_to_next(self._trace, self._seen))
            self._last = None
        self.num_spared += 1
        before, self._late = self._late, {}
        result, self._late = known.repeat(self._trace, parameters, before)
        for number in before.values():
            self._trace.release(number)
        return result

    def _end_late(self) -> None:
        for number in self._late.values():
            self._trace.release(number)
        self._late = {}


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
        is_steady: Whether another one ran the same operators.
    """

    events: range
    costs: dict[str, Cost]
    host_growth_bytes: int
    made: dict[int, Any]
    gradients: Sequence[int]
    result: int
    operators: tuple[str, ...]
    late: dict[int, int]
    is_steady: bool = False

    def left_to_next(self, trace: Trace, others: Iterable[_Recording]) -> list[int]:
        """Return the numbers of what it left, where others' was freed by the one after them."""
        freed = {
            position
            for other in others
            if other is not self and other.operators == self.operators
            for position, number in other.late.items()
            if trace.storages[number].freed_phase
        }
        return [number for position, number in self.late.items() if position in freed]

    def repeat(
        self, trace: Trace, parameters: Sequence[torch.Tensor], late: dict[int, int]
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """Write it into the trace again.

        Args:
            trace: Where it was recorded.
            parameters: Those that are trained; get gradients.
            late: What the micro-batch before this one left to be freed, by the number of what it
                is a copy of; loses what this one frees.

        Returns:
            The loss, and what is left to be freed after it.
        """
        copies: dict[int, int] = {}
        made: dict[int, torch.Tensor] = {}
        for index in self.events:
            action, number = trace.events[index]
            if action == FREE:
                copy = copies.pop(number, None) or late.pop(number, None)
                if copy is not None:
                    trace.release(copy)
            elif number in self.made:
                entry = trace.storages[number]
                made[number] = kernels.like(self.made[number], entry.op, entry.phase)
            elif trace.storages[number].freed_phase:
                copies[number] = trace.repeat(number)
            # else it is kept for good, like cuBLAS' workspace, and there already
        for phase, cost in self.costs.items():
            _add(trace.costs.setdefault(phase, Cost()), cost, 1)
        trace.host_peak_bytes = max(
            trace.host_peak_bytes, trace.host_bytes + self.host_growth_bytes
        )
        for parameter, number in zip(parameters, self.gradients, strict=bool(self.gradients)):
            parameter.grad = made[number]
        return made[self.result], copies


class _Start:
    """The trace at the start of a micro-batch."""

    def __init__(self, trace: Trace, parameters: Sequence[torch.Tensor]) -> None:
        self._first_event = len(trace.events)
        self._costs = {phase: replace(cost) for phase, cost in trace.costs.items()}
        self._host_bytes, self._host_peak_bytes = trace.host_bytes, trace.host_peak_bytes
        self._gradients = _gradients(trace, parameters)
        trace.host_peak_bytes = trace.host_bytes

    def recording(
        self, trace: Trace, parameters: Sequence[torch.Tensor], result: Any
    ) -> _Recording | None:
        """Return what has been done since; None if it is nothing that could be copied."""
        host_growth = trace.host_peak_bytes - self._host_bytes
        trace.host_peak_bytes = max(trace.host_peak_bytes, self._host_peak_bytes)
        events = range(self._first_event, len(trace.events))
        actions = [trace.events[index] for index in events]
        allocated = {number for action, number in actions if action == ALLOC}
        left = allocated - {number for action, number in actions if action == FREE}
        loss = trace.number_of(result) if isinstance(result, torch.Tensor) else None
        gradients = _gradients(trace, parameters)
        made = [] if gradients == self._gradients else gradients
        if loss is None:
            return None
        is_understood = (
            all(action in (ALLOC, FREE) for action, _ in actions)
            and loss in left
            and len({*made, loss}) == len(made) + 1
            and left.issuperset(made)
            and trace.host_bytes == self._host_bytes
        )
        if not is_understood:
            return None
        order = [number for action, number in actions if action == ALLOC]
        entries = [trace.storages[number] for number in order]
        late = left - {*made, loss}
        tensors = [result, *(p.grad for p in parameters if made)]
        costs = {phase: replace(cost) for phase, cost in trace.costs.items()}
        for phase, cost in self._costs.items():
            _add(costs[phase], cost, -1)
        return _Recording(
            events=events,
            costs=costs,
            host_growth_bytes=host_growth,
            made={
                number: kernels.form(tensor)
                for number, tensor in zip((loss, *made), tensors, strict=True)
                if number is not None
            },
            gradients=[number for number in made if number is not None],
            result=loss,
            # The first one brings the libraries' workspaces, which stay.
            operators=tuple(entry.op for entry in entries if entry.kind != "workspaces"),
            late={
                place: entry.index
                for place, entry in enumerate(e for e in entries if e.kind != "workspaces")
                if entry.index in late
            },
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
