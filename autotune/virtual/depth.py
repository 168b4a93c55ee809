"""Deep models: layers that are alike are the same work, done once.

A *thinned* model has few of the layers in its list of them. If they did the same, but for the
first and the last ones (:mod:`autotune.virtual.sections`), what the others would have done is
written into the trace, where they would have done it, and their gradients are made.

The first micro-batch tells how few layers do. It runs seven at each end, if all are of the same
modules with the same attributes and that is fewer than there are; else it runs all.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autotune.virtual import kernels, sections
from autotune.virtual.errors import OutOfMemory
from autotune.virtual.sections import Mark, Sections, UnevenError
from autotune.virtual.state import current
from autotune.virtual.trace import ALLOC, FREE, Cost, Storage, Trace

_PERIODS = (1, 2, 3, 4, 5, 6, 8)
"""Layers after which a model repeats itself: 2 for sliding and full attention in turn (Gemma 2), 4
for ``every_n_layers``: 4, 6 for five sliding ones and a full one (Gemma 3)."""

_EDGES = (1, 2, 3, 4, 6)
"""Blocks at each end that may differ. Offloading frees a tensor five later ones after it: one per
layer where layers are checkpointed (``max_fwd_stash_size`` in TRL's activation_offloading.py)."""

_MOST_RUN = 0.7
"""Share of the layers above which thinning is not worth its own work."""


class _Marked(torch.nn.Module):  # type: ignore[misc]
    """A layer that tells when its forward pass is over and when its backward pass begins."""

    def __init__(self, layer: torch.nn.Module, marks: _Marks) -> None:
        super().__init__()
        self.layer = layer
        self.marks = marks

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; its result is a tensor (B, L, D), or a tuple that begins with it."""
        self.marks.before_first()
        result = self.layer(*args, **kwargs)
        self.marks.after_forward()
        hidden = result if isinstance(result, torch.Tensor) else result[0]
        if hidden.requires_grad:
            # Called when its whole gradient is there: all later layers are done.
            hidden.register_hook(self.marks.before_backward)
        return result


class _Layers(torch.nn.ModuleList):  # type: ignore[misc]
    """A list of layers that holds them all, and gives a few to those that go through it.

    Whoever asks the model for its modules, to name them, hook into them or find parameters, sees
    them all: such things are done once.

    Args:
        layers: All of them.
        few: Those to run, in order.
    """

    _few: Sequence[torch.nn.Module] = ()

    def __init__(self, layers: Sequence[torch.nn.Module], few: Sequence[torch.nn.Module]) -> None:
        super().__init__(layers)
        self._few = list(few)

    def __len__(self) -> int:
        return len(self._few)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._few)

    def __getitem__(self, index: Any) -> Any:
        return self._few[index]


class _Marks:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.forward: list[Mark] = []
        self.backward: list[Mark] = []

    def before_first(self) -> None:
        if not self.forward:
            self.forward.append(self._mark())

    def after_forward(self) -> None:
        self.forward.append(self._mark())

    def before_backward(self, grad: torch.Tensor) -> None:
        self.backward.append(self._mark())

    def _mark(self) -> Mark:
        return _mark(self._trace)


def _mark(trace: Trace) -> Mark:
    return Mark(
        len(trace.events),
        len(trace.storages),
        {phase: replace(cost) for phase, cost in trace.costs.items()},
        replace(trace.sums_cost),
        trace.host_bytes,
    )


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
        self._place = _find_layers(model)
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
        start = _mark(self._trace)
        with self._with_layers(layers) as marks:
            result = step()
        self._shape = self._fewest(start, marks)
        return result

    def _fewest(self, start: Mark, marks: _Marks) -> tuple[int, int] | None:
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
    def _with_layers(self, layers: Sequence[torch.nn.Module]) -> Iterator[_Marks]:
        """Let the model have these layers alone, each with its marks."""
        assert self._place is not None
        holder, name = self._place
        usual = getattr(holder, name)
        marks = _Marks(self._trace)
        few = [_Marked(layer, marks) for layer in layers]
        setattr(holder, name, _Layers(usual, few))
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
        before = _Before(self._trace)
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
        before: _Before,
        blocks: Sequence[Sequence[torch.nn.Module]],
        accumulates: bool,
        *,
        is_first: bool,
    ) -> tuple[Any, _Writer] | None:
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
            writer = _Writer(before, parts, blocks, self._place[1], accumulates)
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
    traits: list[list[tuple[Any, ...]]] = []
    for period in _PERIODS:
        if _num_run(len(layers), period, edge) > _MOST_RUN * len(layers):
            return None
        traits = traits or [_traits(layer) for layer in layers]
        pairs = zip(range(len(layers)), range(period, len(layers)), strict=False)
        if all(_are_alike(traits[a], a, traits[b], b) for a, b in pairs):
            return period, edge
    return None


def _traits(layer: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Return what a layer is made of: modules, plain attributes, parameters, buffers and hooks."""
    found: list[tuple[Any, ...]] = []
    for name, module in layer.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        found.append((name, type(module), hooks))
        found += [item for item in vars(module).items() if isinstance(item[1], _PLAIN)]
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                found.append((key, value.shape, value.dtype, value.requires_grad))
    return found


_PLAIN = (bool, int, float, str, type(None))


def _are_alike(
    one: Sequence[tuple[Any, ...]], a: int, other: Sequence[tuple[Any, ...]], b: int
) -> bool:
    """Whether traits are the same, but for those that say which layer it is: ``a`` or ``b``."""
    return len(one) == len(other) and all(
        x == y or (x[0] == y[0] and x[1:] == (a,) and y[1:] == (b,))
        for x, y in zip(one, other, strict=True)
    )


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


def _find_layers(model: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
    """Return where a model keeps its layers: the module and the name in it; None if unclear."""
    found: list[tuple[torch.nn.Module, str]] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for name, child in module.named_children():
            if not isinstance(child, torch.nn.ModuleList):
                waiting.append(child)
            elif len(child) > sections.NUM_INNER and len({type(item) for item in child}) == 1:
                found.append((module, name))
    return found[0] if len(found) == 1 else None


class _Before:
    """A trace at the start of a micro-batch that may be taken back."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.mark = _mark(trace)
        self.allocated_bytes, self.peak_bytes = trace.allocated_bytes, trace.peak_bytes
        self.sums = dict(trace.sums)
        session = current()
        self.has_workspace = set() if session is None else set(session.has_workspace)

    def take_back(self, made: Sequence[torch.nn.Parameter]) -> None:
        """Undo what was done since.

        Args:
            made: Those whose gradients go.
        """
        trace, mark = self.trace, self.mark
        for parameter in made:
            parameter.grad = None
        gc.collect()
        # What still lives stays in the trace: it is less than all layers leave.
        is_forgotten = trace.take_back(mark.event, mark.number, self.peak_bytes)
        session = current()
        if is_forgotten and session is not None:
            session.has_workspace = self.has_workspace
        trace.costs.clear()
        trace.costs.update(mark.costs)
        trace.sums, trace.sums_cost = dict(self.sums), mark.sums


class _Writer:
    """Writes a thinned micro-batch into its trace as the full one.

    Args:
        before: The trace before it.
        thin: What it did.
        blocks: Layers of each block of the full model.
        name: The name of the list of layers.
        accumulates: Whether gradients were there before.

    Raises:
        UnevenError: If what the layers left out would have done can't be told.
    """

    def __init__(
        self,
        before: _Before,
        thin: Sections,
        blocks: Sequence[Sequence[torch.nn.Module]],
        name: str,
        accumulates: bool,
    ) -> None:
        self._before = before
        self._trace = before.trace
        self._thin = thin
        self._name = name
        self._full = full = sections.Expansion(thin, len(blocks))
        self._firsts = sections.first_layers(sum(map(len, blocks)), len(blocks[1]))
        trained = [_trained(block) for block in blocks]
        template = trained[-thin.edge - 1]
        forms = [kernels.form(p.grad) for p in template if p.grad is not None]
        places = self._gradients(template, accumulates)
        if any(len(p) != len(forms) for p in trained[thin.edge : -thin.edge]):
            raise UnevenError
        self._made: dict[int, tuple[torch.nn.Parameter, Any]] = {}
        self._added: dict[int, torch.nn.Parameter] = {}
        for block in full.left_out:
            for parameter, place, form in zip(trained[block], places, forms, strict=False):
                number = full.number("backward", block, place)
                if accumulates:
                    self._added[number] = parameter
                else:
                    self._made[number] = (parameter, form)
        events = self._trace.events[before.mark.event :]
        freed = {number for action, number in events if action == FREE}
        stays = {
            full.moved(number)
            for action, number in events
            if action == ALLOC and number not in freed
        }
        if full.alive != stays | self._made.keys():
            raise UnevenError

    def _gradients(self, template: Sequence[torch.nn.Parameter], accumulates: bool) -> list[int]:
        """Return the places of gradients among what the second inner block's backward allocates.

        Of those that were added to others it may be unknown; then none is returned.
        """
        trace, thin = self._trace, self._thin
        numbers = [trace.number_of(p.grad) if p.grad is not None else None for p in template]
        if accumulates:
            numbers = [None if number is None else trace.sums.get(number) for number in numbers]
            if None in numbers:
                return []
        found = []
        for number in numbers:
            home = None if number is None else thin.home(number)
            if number is None or home is None:
                raise UnevenError
            if (home.way, home.block) != ("backward", thin.inner[-1]):
                raise UnevenError
            found.append(thin.place(number, home))
        if len(set(found)) != len(template):
            raise UnevenError
        return found

    def write(self) -> None:
        """Do it; nothing may be freed meanwhile."""
        trace, full = self._trace, self._full
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            entries = self._entries()
            trace.renumber(full.moved)
            self._write_events(entries)
        finally:
            if was_enabled:
                gc.enable()
        self._count_work()
        trace.sums = {
            number: None if last is None else full.moved(last)
            for number, last in trace.sums.items()
        }
        for number, parameter in self._added.items():
            gradient = trace.number_of(parameter.grad) if parameter.grad is not None else None
            if gradient is not None:
                trace.sums[gradient] = number

    def _entries(self) -> list[Storage]:
        """Return the storages of the full run."""
        storages, entries = self._trace.storages, []
        number = self._before.mark.number
        for span in self._full.spans:
            modules: dict[str, str] = {}
            numbers = span.section.numbers
            for entry in storages[numbers.start : numbers.stop]:
                if span.is_copy:
                    module = modules.get(entry.module)
                    if module is None:
                        module = modules[entry.module] = self._module(span, entry.module)
                    entry = replace(entry, index=number, module=module)
                entries.append(entry)
                number += 1
        # Only now, since some are templates of others.
        for number, entry in enumerate(entries, self._before.mark.number):
            entry.index = number
        return entries

    def _write_events(self, entries: Sequence[Storage]) -> None:
        trace, before = self._trace, self._before
        first = before.mark.number
        del trace.storages[first:], trace.events[before.mark.event :]
        trace.allocated_bytes, trace.peak_bytes = before.allocated_bytes, before.peak_bytes
        for action, number in self._full.events:
            if action == FREE:
                trace.end_again(number)
                continue
            entry = entries[number - first]
            if number in self._made:
                parameter, form = self._made[number]
                parameter.grad = kernels.like(form, entry.op, entry.phase)
                trace.storages[number].module = entry.module
            else:
                trace.begin_again(entry)

    def _module(self, span: sections.Span, module: str) -> str:
        """Return the path of the module that is in this block what ``module`` is in another."""
        moved = self._firsts[span.block] - self._firsts[self._full.full(span.section.block)]
        parts = module.split(".")
        for index, (part, number) in enumerate(itertools.pairwise(parts)):
            if part == self._name and number.isdecimal():
                parts[index + 1] = str(int(number) + moved)
                break
        return ".".join(parts)

    def _count_work(self) -> None:
        trace, count = self._trace, len(self._full.left_out)
        for way, block in zip(("forward", "backward"), self._thin.inner, strict=True):
            work = self._thin.work[way, block]
            for phase, cost in work.costs.items():
                trace.costs.setdefault(phase, Cost()).add(_times(cost, count))
            trace.sums_cost.add(_times(work.sums, count))
            if way == "forward":
                # The host holds most when the forward pass is over.
                trace.host_peak_bytes += count * work.host_bytes


def _times(cost: Cost, count: int) -> Cost:
    return Cost(
        flops=count * cost.flops,
        moved_bytes=count * cost.moved_bytes,
        link_bytes=count * cost.link_bytes,
        num_ops=count * cost.num_ops,
        seconds=count * cost.seconds,
    )


def _trained(layers: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return [p for layer in layers for p in layer.parameters() if p.requires_grad]
