"""Deep models: layers that are alike are the same work, done once.

A *thinned* model has few of the layers in its list of them. If they did the same, but for the
first and the last ones (:mod:`autotune.virtual.sections`), what the others would have done is
written into the trace, where they would have done it, and their gradients are made.

The first micro-batch tells how few layers do. It runs seven at each end, if all are of the same
modules with the same attributes and that is fewer than there are; else it runs all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autotune.virtual import sections
from autotune.virtual.errors import OutOfMemory
from autotune.virtual.expansion import Before, Writer
from autotune.virtual.layerlist import (
    Layers,
    Marked,
    Marks,
    are_alike,
    find_layers,
    take_mark,
    traits,
)
from autotune.virtual.sections import Mark, Sections, UnevenError
from autotune.virtual.trace import Trace

_PERIODS = (1, 2, 3, 4, 5, 6, 8)
"""Layers after which a model repeats itself: 2 for sliding and full attention in turn (Gemma 2), 4
for ``every_n_layers``: 4, 6 for five sliding ones and a full one (Gemma 3)."""

_EDGES = (1, 2, 3, 4, 6)
"""Blocks at each end that may differ. Offloading frees a tensor five later ones after it: one per
layer where layers are checkpointed (``max_fwd_stash_size`` in TRL's activation_offloading.py)."""

_MOST_RUN = 0.7
"""Share of the layers above which thinning is not worth its own work."""


class Depth:
    """Runs micro-batches of one model, with all of its layers or with few.

    Args:
        trace: Of the device that the model runs on.
        model: The model; it must have one list of layers.

    Attributes:
        num_thinned: Micro-batches that were run with few layers.
    """

    def __init__(self, trace: Trace, model: torch.nn.Module) -> None:
        self.num_thinned = 0
        self._trace = trace
        self._place = find_layers(model)
        self._parameters = list(model.parameters())
        self._shape: tuple[int, int] | None = None
        self._is_known = self._has_run = False

    def give_up(self) -> None:
        """Run all layers from now on."""
        self._place = None

    def run_few(self, step: Callable[[], Any], *, accumulates: bool) -> tuple[Any] | None:
        """Run a micro-batch with few layers, and count it as if all had been run.

        Args:
            step: Runs it forward and backward, and returns its loss.
            accumulates: Whether gradients are there already.

        Returns:
            The loss; None if all layers must be run.
        """
        if self._place is None:
            return None
        is_first, self._is_known = not self._is_known, True
        if is_first:
            self._shape = _likely_shape(list(getattr(*self._place)))
        if self._shape is None:
            return None
        found = self._run_thin(step, accumulates, is_first=is_first)
        if found is None:
            self._shape = None
            self._has_run = not is_first
        return found

    def run_all(self, step: Callable[[], Any]) -> Any:
        """Run a micro-batch with all layers, and see whether fewer would do."""
        if self._place is None or self._has_run:
            return step()
        self._has_run = True
        layers = list(getattr(*self._place))
        start = take_mark(self._trace)
        with self._with_layers(layers) as marks:
            result = step()
        self._shape = self._fewest(start, marks)
        return result

    def _fewest(self, start: Mark, marks: Marks) -> tuple[int, int] | None:
        """Return the period and the edge with which few layers would have told the same."""
        for shape in _shapes(marks.forward, marks.backward):
            try:
                parts = Sections(self._trace, start, marks.forward, marks.backward, *shape)
                parts.check()
                parts.together()
            except UnevenError:
                continue
            return shape
        return None

    @contextmanager
    def _with_layers(self, layers: Sequence[torch.nn.Module]) -> Iterator[Marks]:
        """Let the model have these layers alone, each with its marks."""
        assert self._place is not None
        holder, name = self._place
        usual = getattr(holder, name)
        marks = Marks(self._trace)
        few = [Marked(layer, marks) for layer in layers]
        setattr(holder, name, Layers(usual, few))
        try:
            yield marks
        finally:
            setattr(holder, name, usual)

    def _run_thin(
        self, step: Callable[[], Any], accumulates: bool, *, is_first: bool
    ) -> tuple[Any] | None:
        """Return the loss; None if this could not be done."""
        assert self._place is not None
        assert self._shape is not None
        layers = list(getattr(*self._place))
        firsts = sections.first_layers(len(layers), self._shape[0])
        blocks = [
            layers[first:end]
            for first, end in zip(firsts, [*firsts[1:], len(layers)], strict=True)
        ]
        before = Before(self._trace)
        # What fails there holds tensors until that function has returned.
        found = self._try(step, before, blocks, accumulates, is_first=is_first)
        if found is None:
            before.take_back([] if accumulates else self._parameters)
            return None
        result, writer = found
        writer.write()
        self.num_thinned += 1
        return (result,)

    def _try(
        self,
        step: Callable[[], Any],
        before: Before,
        blocks: Sequence[Sequence[torch.nn.Module]],
        accumulates: bool,
        *,
        is_first: bool,
    ) -> tuple[Any, Writer] | None:
        """Return the loss, and what writes the rest; None if few layers do not tell."""
        assert self._place is not None
        assert self._shape is not None
        edge = self._shape[1]
        few = itertools.chain(*blocks[: edge + 1], *blocks[-edge - 1 :])
        try:
            with self._with_layers(list(few)) as marks:
                result = step()
            parts = Sections(self._trace, before.mark, marks.forward, marks.backward, *self._shape)
            parts.check()
            writer = Writer(before, parts, blocks, self._place[1], accumulates)
        except OutOfMemory:
            raise
        except Exception:  # noqa: BLE001 - it is run again, and fails again if it must
            # A model that counts its layers, or a micro-batch that treats them unlike.
            return None
        if is_first:
            self._shape = self._fewest(before.mark, marks) or self._shape
        return result, writer


def _likely_shape(layers: Sequence[torch.nn.Module]) -> tuple[int, int] | None:
    """Return a period and an edge that will do if layers made alike run alike; None for all."""
    edge = max(_EDGES)
    found: list[list[tuple[Any, ...]]] = []
    for period in _PERIODS:
        if _num_run(len(layers), period, edge) > _MOST_RUN * len(layers):
            return None
        found = found or [traits(layer) for layer in layers]
        pairs = zip(range(len(layers)), range(period, len(layers)), strict=False)
        if all(are_alike(found[a], a, found[b], b) for a, b in pairs):
            return period, edge
    return None


def _shapes(forward: Sequence[Mark], backward: Sequence[Mark]) -> Iterator[tuple[int, int]]:
    """Yield the periods and edges that may do, those that run the fewest layers first."""
    num_layers = len(backward)
    events = [
        [b.event - a.event for a, b in itertools.pairwise(forward)],
        [b.event - a.event for a, b in itertools.pairwise(reversed(backward))],
    ]
    shapes = [(period, edge) for period in _PERIODS for edge in _EDGES]
    for period, edge in sorted(shapes, key=lambda shape: _num_run(num_layers, *shape)):
        if _num_run(num_layers, period, edge) > _MOST_RUN * num_layers:
            return
        inner = slice(num_layers % period + period * edge, num_layers - period * edge)
        # Far cheaper than to compare what the events are.
        if all(_repeats(counts[inner], period) for counts in events):
            yield period, edge


def _repeats(counts: Sequence[int], period: int) -> bool:
    return counts[period:] == counts[: len(counts) - period]


def _num_run(num_layers: int, period: int, edge: int) -> int:
    return num_layers % period + period * (2 * edge + sections.NUM_INNER)
