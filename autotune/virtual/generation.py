"""One generation: its first steps and the last one run, the others written into the trace."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from autotune.virtual import kernels, values
from autotune.virtual.decoding import Decoding
from autotune.virtual.expansion import Before
from autotune.virtual.layerlist import take_mark
from autotune.virtual.sections import UnevenError
from autotune.virtual.steps import Own, Step, Stretch, highest, stretches_between
from autotune.virtual.trace import ALLOC, FREE, Cost, Trace

_NUM_RUN_FIRST = 2
"""Steps that are run first: one that may take workspaces, and one that is like the next."""

_PERIOD = 8
"""Steps after which they are alike where masks are as wide as a multiple of 8 (``pad_bias`` in
aten/src/ATen/native/transformers/attention.cpp), as they are with padded prompts."""

_MOST_TRIED = 60
"""Steps to try at other lengths before a generation is run in full."""

_KNOWN = {
    "input_ids",
    "cache",
    "position_ids",
    "attention_mask",
    "use_cache",
    "return_dict",
    "logits_to_keep",
}
"""Arguments of a model's forward pass that are understood (``prepare_inputs_for_generation``)."""

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Kinds of a cache's layers whose lengths are understood."""


class Generation:
    """A model's forward pass during one generation.

    Args:
        decoding: Knows those before it.
        trace: Of the device.
        forward: The model's own forward pass.
        num_steps: Steps after the one that reads the prompts.
    """

    def __init__(
        self, decoding: Decoding, trace: Trace, forward: Callable[..., Any], num_steps: int
    ) -> None:
        self._decoding = decoding
        self._trace = trace
        self._forward = forward
        # Libraries ask what the model takes, such as ``logits_to_keep``.
        self.__signature__ = inspect.signature(forward)
        self._num_steps = num_steps
        self._num_done = 0
        self._stretches: list[Stretch] | None = None
        self._is_even = True
        self._make_output: type | None = None
        self._numbers: list[int] | None = None
        self._logits: Any = None
        self._length = self._highest = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, or write what it would have done; return its output."""
        cache = kwargs.get("cache")
        if args or not self._is_even or not _is_step(kwargs):
            # The first call reads the prompts; of another kind of model, none is a step.
            return self._forward(*args, **kwargs)
        self._num_done += 1
        if self._num_done < _NUM_RUN_FIRST or self._num_done >= self._num_steps:
            return self._forward(**kwargs)
        if self._num_done == _NUM_RUN_FIRST:
            return self._look(kwargs)
        return self._spare(cache)

    def end(self) -> None:
        """Count what is left of the cache as freed, if the generation ended early."""
        for number in self._numbers or ():
            self._trace._end(number, self._trace.phase())
        self._numbers = None

    def _look(self, kwargs: dict[str, Any]) -> Any:
        """Run a step and see how those up to the last one go."""
        cache = kwargs["cache"]
        length = cache.get_seq_length()
        outputs, seen = self._watch(kwargs)
        self._is_even = False
        if seen is None or [name for name in outputs if name != "cache"] != ["logits"]:
            return outputs
        num_left = self._num_steps - self._num_done
        like = num_left, _mask(kwargs)
        stretches = self._decoding.known(seen, like)
        if stretches is None:
            try:
                stretches = self._plan(seen, length + num_left, kwargs)
            except UnevenError:
                return outputs
            self._decoding.learn(seen, like, stretches)
        self._is_even = True
        self._stretches = stretches
        self._length = length
        self._highest = highest(stretches)
        self._logits = kernels.form(outputs["logits"])
        self._make_output = type(outputs)
        return outputs

    def _watch(self, kwargs: Mapping[str, Any]) -> tuple[Any, Step | None]:
        """Run a step; return its output, and what it did if that is understood."""
        trace, cache = self._trace, kwargs["cache"]
        length = cache.get_seq_length()
        there = {trace.number_of(state): place for place, state in enumerate(_states(cache))}
        mark = take_mark(trace)
        outputs = self._forward(**kwargs)
        places = {old: ~place for old, place in there.items()}
        places |= {own: own - mark.number for own in range(mark.number, len(trace.storages))}
        actions = trace.events[mark.event :]
        entries = trace.storages[mark.number :]
        states = [trace.number_of(state) for state in _states(cache)]
        logits = trace.number_of(outputs["logits"])
        freed = {own for action, own in actions if action == FREE}
        stays = {entry.index for entry in entries} - freed
        if (
            any(action not in (ALLOC, FREE) or own not in places for action, own in actions)
            or stays != {logits, *states}
            or len(stays) != len(states) + 1
            or not freed.issuperset(there)
            or trace.host_bytes != mark.host_bytes
            or any(entry.kind == "workspaces" for entry in entries)
        ):
            return outputs, None
        work = {phase: replace(cost) for phase, cost in trace.costs.items()}
        for phase, cost in mark.costs.items():
            work[phase].add(cost, -1)
        step = Step(
            length=length,
            own=[
                Own(item.op, item.phase, item.module, item.kind, item.freed_phase)
                for item in entries
            ],
            sizes=[item.nbytes for item in entries],
            events=[(action, places[own]) for action, own in actions],
            states=[places[own] for own in states],
            logits=places[logits],
            costs={phase: cost for phase, cost in work.items() if cost.num_ops},
        )
        return outputs, step

    def _plan(self, first: Step, end: int, kwargs: Mapping[str, Any]) -> list[Stretch]:
        """Return stretches from ``first`` to the step at length ``end``.

        Raises:
            UnevenError: If there would be too many, or a step is not understood.
        """
        tried: dict[int, Step] = {first.length: first}

        def step_at(length: int) -> Step:
            if length not in tried:
                if len(tried) > _MOST_TRIED:
                    raise UnevenError
                tried[length] = self._try(length, kwargs)
            return tried[length]

        # Where every eighth step is wider, those between do not lie on a line.
        wider = step_at(first.length + _PERIOD)
        is_plain = first.is_like(wider) and Stretch(first, wider, 1).goes_through(
            step_at(first.length + 1)
        )
        period = 1 if is_plain else _PERIOD
        found: list[Stretch] = []
        for low in range(first.length, first.length + period):
            found += stretches_between(low, low + (end - low) // period * period, period, step_at)
        return found

    def _try(self, length: int, kwargs: Mapping[str, Any]) -> Step:
        """Return what a step with so many positions in the cache does; the trace stays as it is.

        Raises:
            UnevenError: If that is not understood.
        """
        before = Before(self._trace)
        step = self._watch_at(length, kwargs)
        is_forgotten = before.forget()
        if not is_forgotten:
            gc.collect()
            is_forgotten = before.forget()
        if step is None or not is_forgotten:
            raise UnevenError
        return step

    def _watch_at(self, length: int, kwargs: Mapping[str, Any]) -> Step | None:
        cache = copy.copy(kwargs["cache"])
        # The step that these arguments were for has made the cache one longer since.
        added = length + 1 - cache.get_seq_length()
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in cache.layers:
            for name in ("keys", "values"):
                shape = _shape(layer, name, _kept(layer, length))
                # Held by nothing else, so that it ends when the step replaces it.
                setattr(layer, name, kernels.new(*shape, "cat"))
            _set_length(layer, length)
        changed = {**kwargs, "cache": cache}
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if mask is not None:
            ones = torch.ones(len(mask), added, dtype=mask.dtype, device=mask.device)
            changed["attention_mask"] = torch.cat([mask, ones], dim=-1)
        if positions is not None:
            changed["position_ids"] = positions + added
        return self._watch(changed)[1]

    def _spare(self, cache: DynamicCache) -> Any:
        """Write a step into the trace; return what the model would have returned."""
        assert self._stretches is not None
        assert self._make_output is not None
        self._decoding.num_spared += 1
        self._length += 1
        length = self._length
        stretch = next(item for item in self._stretches if length in item.lengths)
        is_last = self._num_done == self._num_steps - 1
        trace, seen = self._trace, stretch.first
        # Of the step that holds the most, nothing is left out, so that the peak is right.
        events = seen.events if length == self._highest else stretch.events
        layers = [(layer, name) for layer in cache.layers for name in ("keys", "values")]
        shapes = [_shape(*item, _kept(item[0], length) + 1) for item in layers]
        # All that is asked of what is not there is its shape.
        unreal = {
            shape: torch.empty(shape[0], dtype=shape[1], device="meta") for shape in set(shapes)
        }
        made: dict[int, torch.Tensor] = {}
        numbers: dict[int, int] = {}
        before, self._numbers = self._numbers, None
        keep = {seen.logits: self._logits}
        if is_last:
            forms = zip(seen.states, shapes, strict=True)
            keep |= {place: kernels.contiguous(*shape) for place, shape in forms}
        with _in_forward(trace):
            for action, place in events:
                if place < 0:
                    if before is not None:
                        trace._end(before[~place], "forward")
                    else:
                        # What is real ends here, as it would.
                        setattr(*layers[~place], unreal[shapes[~place]])
                elif action == FREE:
                    trace._end(numbers.pop(place), seen.own[place].freed_phase)
                elif place in keep:
                    own = seen.own[place]
                    made[place] = tensor = kernels.like(keep[place], own.op, own.phase)
                    number = trace.number_of(tensor)
                    assert number is not None
                    trace.storages[number].module = own.module
                else:
                    own, size = seen.own[place], stretch.size(place, length)
                    numbers[place] = trace._begin(
                        size, own.op, own.phase, module=own.module, kind=own.kind
                    )
        for phase, cost in stretch.costs(length):
            trace.costs.setdefault(phase, Cost()).add(cost)
        for item, place, shape in zip(layers, seen.states, shapes, strict=True):
            state, kept = made[place] if is_last else unreal[shape], _kept(item[0], length + 1)
            setattr(*item, state[:, :, -kept:] if kept < state.shape[2] else state)
        for layer in cache.layers:
            _set_length(layer, length + 1)
        if not is_last:
            self._numbers = [numbers[place] for place in seen.states]
        return self._make_output(logits=made[seen.logits], cache=cache)


def _is_step(kwargs: Mapping[str, Any]) -> bool:
    """Whether the model is asked for one more token of each sequence, from a plain cache."""
    cache, ids = kwargs.get("cache"), kwargs.get("input_ids")
    if not isinstance(cache, DynamicCache):
        return False
    return bool(
        _KNOWN.issuperset(name for name, value in kwargs.items() if value is not None)
        and isinstance(ids, torch.Tensor)
        and ids.shape[1] == 1
        and all(type(layer) in _LAYERS and layer.is_initialized for layer in cache.layers)
        and not any(getattr(layer, "record_past", False) for layer in cache.layers)
        and cache.get_seq_length() > 0
        and not torch.is_grad_enabled()
    )


def _mask(kwargs: Mapping[str, Any]) -> bytes:
    """Return what is masked (B, L), which may decide from where on a window is full."""
    mask = kwargs.get("attention_mask")
    known = None if mask is None else values.value_of(mask)
    return b"" if known is None else known.contiguous().numpy().tobytes()


def _states(cache: DynamicCache) -> list[torch.Tensor]:
    return list(itertools.chain(*((layer.keys, layer.values) for layer in cache.layers)))


def _shape(
    layer: DynamicLayer, name: str, length: int
) -> tuple[tuple[int, int, int, int], torch.dtype]:
    """Return what a layer's keys or values (B, H, L, D) are with another length."""
    state = getattr(layer, name)
    batch, heads, _, dim = state.shape
    return (batch, heads, length, dim), state.dtype


def _kept(layer: DynamicLayer, length: int) -> int:
    """Return the positions that a layer keeps once it has seen so many."""
    if type(layer) is DynamicSlidingWindowLayer:
        return min(length, int(layer.sliding_window) - 1)
    return length


def _set_length(layer: DynamicLayer, length: int) -> None:
    if type(layer) is DynamicSlidingWindowLayer:
        layer.cumulative_length = length


@contextmanager
def _in_forward(trace: Trace) -> Iterator[None]:
    """Let what ends meanwhile end in the forward pass."""
    trace.module_depth += 1
    try:
        yield
    finally:
        trace.module_depth -= 1
