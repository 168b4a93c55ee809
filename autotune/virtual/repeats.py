"""Micro-batches that come again: run once, counted as often as they come.

Two micro-batches of the same shapes make the same tensors live and die in the same order. The
second need not be run: what the first one did to the trace is written into it again, and the
gradients that it would have made are made. The trainer, its optimizer and all that lies between
micro-batches run as they are.

Where the first one made the gradients and the second adds to them, or the other way round, the
difference is known: PyTorch adds a gradient to one that is there as soon as it is computed, and
frees it (torch/csrc/autograd/functions/accumulate_grad.h). It is seen to do so before it is
relied on.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autotune.virtual import values
from autotune.virtual.decoding import Decoding
from autotune.virtual.depth import Depth
from autotune.virtual.recording import Left, Recording, Start, write
from autotune.virtual.trace import Trace

_IGNORED_LABEL = -100
"""Marks positions without a loss; torch.nn.CrossEntropyLoss' default ``ignore_index``."""


class _Plan(NamedTuple):
    """How to copy a micro-batch; see :func:`autotune.virtual.recording.write`."""

    known: Recording
    adds: Recording | None
    frees: Sequence[tuple[int, int]]


class Repeats:
    """Spares a trainer the micro-batches that its trace knows already.

    Args:
        trace: Of the device that the trainer runs on.

    Attributes:
        num_spared: Micro-batches that were not run.
        depth: Runs the others; None before the first one.
        decoding: Runs generations.
    """

    def __init__(self, trace: Trace) -> None:
        self.num_spared = 0
        self._trace = trace
        self._expected: deque[object] = deque()
        self._known: dict[tuple[object, bool], Recording] = {}
        self._all: list[Recording] = []
        self._left = Left()
        self.depth: Depth | None = None
        self.decoding = Decoding(trace)
        self._model: torch.nn.Module | None = None
        self._parameters: list[torch.nn.Parameter] = []

    def generate_less(self, model: torch.nn.Module) -> None:
        """Let ``model`` generate without running every step, where that tells the same."""
        self.decoding.install(model)

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
            if model is not self._model or self.depth is None:
                self._model, self._parameters = model, list(model.parameters())
                self.depth = Depth(self._trace, model)
            parameters = [p for p in self._parameters if p.requires_grad]
            states = {p.grad is not None for p in parameters}
            if batch is None or len(states) != 1 or any(map(_is_watched, parameters)):
                self._left.end_copies(self._trace)
                self._left = Left()
                return step(model, *args, **kwargs)
            accumulates = states == {True}
            plan = self._plan(batch, accumulates)
            if plan is not None:
                return self._copy(plan, parameters, accumulates)
            return self._record(
                batch, parameters, accumulates, lambda: step(model, *args, **kwargs)
            )

        return training_step

    def _record(
        self,
        batch: object,
        parameters: Sequence[torch.Tensor],
        accumulates: bool,
        run: Callable[[], Any],
    ) -> Any:
        self._left.end_copies(self._trace)
        assert self.depth is not None
        start = Start(self._trace, parameters)
        try:
            few = self.depth.run_few(run, start.can_repeat, accumulates=accumulates)
            if few is None:
                start.end()
                start = Start(self._trace, parameters)
            result = self.depth.run_all(run, accumulates=accumulates) if few is None else few[0]
            recording = start.recording(result, self._left)
        finally:
            start.end()
        self._left = Left()
        if recording is not None:
            self._known[batch, accumulates] = recording
            self._all.append(recording)
            self._left = Left(list(recording.late))
        else:
            self.depth.give_up()
        return result

    def _plan(self, batch: object, accumulates: bool) -> _Plan | None:
        """Return how to copy this micro-batch; None if it must be run."""
        if not self._all or not self._is_steady():
            return None
        known, adds = self._known.get((batch, accumulates)), None
        if known is None:
            known = self._known.get((batch, not accumulates))
            if known is None or not self._can_turn(known):
                return None
            if accumulates:
                adds = self._adding(known)
                if adds is None:
                    return None
        frees = self._frees(known)
        return None if frees is None else _Plan(known, adds, frees)

    def _is_steady(self) -> bool:
        """Whether the first micro-batch did nothing that is done once.

        What is done once on a device is kept there. So the first one must have kept nothing but
        gradients and workspaces once the next one has run.
        """
        first = self._all[0]
        return all(self._trace.storages[number].freed_phase for number in first.late)

    def _can_turn(self, known: Recording) -> bool:
        """Whether ``known`` tells how it would go with gradients in the other state.

        A gradient that could not be taken as it is was copied, which adding does without.
        """
        makes = [item for item in self._all if not item.accumulates]
        made = {self._trace.storages[number].op for item in makes for number in item.gradients}
        return bool(makes and known.gradients) and "clone" not in made

    def _adding(self, known: Recording) -> Recording | None:
        """Return one that adds gradients which ``known`` makes, around the same operators."""
        ours = _around_gradients(known)
        for item in self._all:
            if item.sums_after and len(item.gradients) == len(known.gradients):
                theirs = _around_gradients(item)
                pairs = zip(ours, theirs, item.sums_after, strict=True)
                if all(a[:n] == b[:n] and n <= _MOST_AROUND for a, b, n in pairs):
                    return item
        return None

    def _frees(self, known: Recording) -> list[tuple[int, int]] | None:
        """Return where ``known`` frees what the one before left; None if that can't be told."""
        if all(number is None for number in self._left.numbers):
            return []
        storages = self._trace.storages
        if len({tuple(storages[number].op for number in item.late) for item in self._all}) > 1:
            return None  # positions among them say nothing
        for item in self._all:
            if item.frees and item.labels == known.labels:
                return list(item.frees)
        for item in self._all:
            moved = _moved(item, known)
            if moved:
                return moved
        return None

    def _copy(
        self, plan: _Plan, parameters: Sequence[torch.Tensor], accumulates: bool
    ) -> torch.Tensor:
        self.num_spared += 1
        before = self._left
        freed = {position for item in self._all for position, _ in item.frees}
        result, self._left = write(
            plan.known,
            self._trace,
            parameters,
            accumulates=accumulates,
            adds=plan.adds,
            before=before,
            frees=plan.frees,
            left=[number for place, number in enumerate(plan.known.late) if place in freed],
        )
        before.end_copies(self._trace)
        return result


def _moved(source: Recording, target: Recording) -> list[tuple[int, int]]:
    """Return where ``target`` frees what ``source`` is seen to free: before the same operator."""
    found = []
    for position, count in source.frees:
        if count >= len(source.labels):
            found.append((position, len(target.labels)))
            continue
        label = source.labels[count]
        nth = source.labels[:count].count(label)
        places = [place for place, other in enumerate(target.labels) if other == label]
        if nth >= len(places):
            return []
        found.append((position, places[nth]))
    return found


_MOST_AROUND = 8
"""Storages from a gradient's on, before which it must be freed once it was added to another."""


def _around_gradients(recording: Recording) -> list[list[str]]:
    """Return for each gradient the operators of its storage and of the next ones."""
    places = {number: place for place, number in enumerate(recording.own)}
    return [
        [op for _, _, op in recording.labels[places[number] : places[number] + _MOST_AROUND]]
        for number in recording.gradients
    ]


def _is_watched(parameter: torch.Tensor) -> bool:
    """Whether something is told of each new gradient, which a copy would not tell."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


_TOKENS = frozenset({"input_ids", "prompt_ids", "completion_ids"})


def _fingerprint(batch: Mapping[str, Any]) -> object:
    """Return what tells micro-batches apart that run differently; None for one like no other."""
    parts: list[object] = []
    for name, value in sorted(batch.items()):
        if value is None or isinstance(value, (bool, int, float, str)):
            parts.append((name, type(value), value))
            continue
        if not isinstance(value, torch.Tensor):
            return None
        shape, dtype = tuple(value.shape), value.dtype
        # Which token it is has no say in shapes; whether it is trained on may have.
        if name in _TOKENS:
            value = torch.empty(0)
        elif value.device.type != "cpu":
            # Of what is on the device, whole numbers may be known, and others never are.
            value = torch.empty(0) if value.is_floating_point() else values.value_of(value)
            if value is None:
                return None
        elif name == "labels":
            value = value != _IGNORED_LABEL
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        parts.append((name, shape, dtype, hashlib.blake2b(content).digest()))
    return tuple(parts)
