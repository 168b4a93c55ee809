"""Deep models: layers that are alike are the same work, done once.

A *thinned* model has few of the layers in its list of them. If they did the same, but for the
first and the last ones (:mod:`autotune.virtual.sections`), what the others would have done is
written into the trace, where they would have done it, and their gradients are made.

The first micro-batch tells how few layers do. It runs seven at each end, if those between are
alike as far as can be seen (:mod:`autotune.virtual.likeness`) and that is fewer than there are;
else it runs all. What cannot be seen to be alike is never thinned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from autotune.virtual import sections
from autotune.virtual.errors import REFUSALS, OutOfMemory
from autotune.virtual.expansion import Before, Writer
from autotune.virtual.layerlist import Layers, Marked, Marks, find_layers
from autotune.virtual.likeness import Likeness
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
        if self._place is not None:
            self._layers = list(getattr(*self._place))
            self._likeness = Likeness(model, self._layers)
            if not self._likeness.is_known:
                self.give_up()

    def give_up(self) -> None:
        """Run all layers from now on."""
        self._place = None

    def run_few(
        self, step: Callable[[], Any], can_repeat: Callable[[], bool], *, accumulates: bool
    ) -> tuple[Any] | None:
        """Run a micro-batch with few layers, and count it as if all had been run.

        Args:
            step: Runs it forward and backward, and returns its loss.
            can_repeat: Whether what was done would be done again.
            accumulates: Whether gradients are there already.

        Returns:
            The loss; None if all layers must be run.
        """
        if self._place is None:
            return None
        is_first, self._is_known = not self._is_known, True
        if is_first:
            self._shape = self._likely_shape()
        if self._shape is None:
            return None
        found = self._run_thin(step, can_repeat, accumulates, is_first=is_first)
        if found is None:
            self._shape = None
            self._has_run = not is_first
        return found

    def run_all(self, step: Callable[[], Any], *, accumulates: bool) -> Any:
        """Run a micro-batch with all layers, and see whether fewer would do."""
        if self._place is None or self._has_run:
            return step()
        self._has_run = True
        before = Before(self._trace)
        found = self._watch(step, before)
        if found is None:
            before.take_back([] if accumulates else self._parameters)
            self.give_up()
            return step()
        return found[0]

    def _watch(self, step: Callable[[], Any], before: Before) -> tuple[Any] | None:
        """Return the loss, of all layers; None if the model does not take layers with marks."""
        try:
            with self._with_layers(self._layers) as marks:
                result = step()
        except _ENDS:
            raise
        except Exception:  # noqa: BLE001 - it is run again without, and fails again if it must
            return None
        if marks.called == self._layers:
            self._shape = self._fewest(before.mark, marks)
        return (result,)

    def _fewest(self, start: Mark, marks: Marks) -> tuple[int, int] | None:
        """Return the period and the edge with which few layers would have told the same."""
        for shape in _shapes(marks.forward, marks.backward):
            if not self._allows(shape):
                continue
            try:
                parts = Sections(self._trace, start, marks.forward, marks.backward, *shape)
                parts.check()
                parts.together()
            except UnevenError:
                continue
            return shape
        return None

    def _likely_shape(self) -> tuple[int, int] | None:
        """Return a period and an edge that will do if what looks alike is; None for all layers."""
        edge, num_layers = max(_EDGES), len(self._layers)
        for period in _PERIODS:
            if _num_run(num_layers, period, edge) > _MOST_RUN * num_layers:
                return None
            if self._allows((period, edge)):
                return period, edge
        return None

    def _allows(self, shape: tuple[int, int]) -> bool:
        """Whether the layers that would be left out are like those that would be run."""
        period, edge = shape
        blocks = _blocks(len(self._layers), period)
        inner = range(blocks[edge].start, blocks[-edge - 1].stop)
        return self._likeness.allows(_kept(blocks, edge), inner, period)

    @contextmanager
    def _with_layers(
        self, layers: Sequence[torch.nn.Module], *, once: bool = False
    ) -> Iterator[Marks]:
        """Let the model have these layers alone, each with its marks; to be called ``once``."""
        assert self._place is not None
        holder, name = self._place
        usual = getattr(holder, name)
        marks = Marks(self._trace, most=len(layers) if once else None)
        few = [Marked(layer, marks) for layer in layers]
        setattr(holder, name, Layers(usual, few))
        try:
            yield marks
        finally:
            setattr(holder, name, usual)

    def _run_thin(
        self,
        step: Callable[[], Any],
        can_repeat: Callable[[], bool],
        accumulates: bool,
        *,
        is_first: bool,
    ) -> tuple[Any] | None:
        """Return the loss; None if this could not be done."""
        assert self._place is not None
        assert self._shape is not None
        before = Before(self._trace)
        # What fails there holds tensors until that function has returned.
        found = self._try(step, can_repeat, before, accumulates, is_first=is_first)
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
        can_repeat: Callable[[], bool],
        before: Before,
        accumulates: bool,
        *,
        is_first: bool,
    ) -> tuple[Any, Writer] | None:
        """Return the loss, and what writes the rest; None if few layers do not tell."""
        assert self._place is not None
        assert self._shape is not None
        blocks = _blocks(len(self._layers), self._shape[0])
        few = [self._layers[number] for number in _kept(blocks, self._shape[1])]
        try:
            with self._with_layers(few, once=True) as marks:
                result = step()
            if marks.called != few or not can_repeat():
                return None
            parts = Sections(self._trace, before.mark, marks.forward, marks.backward, *self._shape)
            parts.check()
            layers = [[self._layers[number] for number in block] for block in blocks]
            writer = Writer(before, parts, layers, self._place[1], accumulates)
        except _ENDS:
            raise
        except Exception:  # noqa: BLE001 - it is run again, and fails again if it must
            # A model that counts its layers, or a micro-batch that treats them unlike.
            return None
        if is_first:
            self._shape = self._fewest(before.mark, marks) or self._shape
        return result, writer


_ENDS = (OutOfMemory, MemoryError, *REFUSALS)
"""What ends a run, however many layers it has."""


def _blocks(num_layers: int, period: int) -> list[range]:
    """Return the numbers of each block's layers."""
    firsts = sections.first_layers(num_layers, period)
    return [range(*pair) for pair in itertools.pairwise([*firsts, num_layers])]


def _kept(blocks: Sequence[range], edge: int) -> list[int]:
    """Return the numbers of the layers that a thinned model has."""
    return list(itertools.chain(*blocks[: edge + 1], *blocks[-edge - 1 :]))


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
