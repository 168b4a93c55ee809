"""Deep models: layers that are alike are the same work, done once.

The first micro-batch runs all layers. If it did the same in each but the first and the last ones
(:mod:`autotune.virtual.sections`), the next ones that must be run are run by a *thinned* model,
with few of the layers in its list of them. What the others would have done is then written into
the trace, where they would have done it, and their gradients are made.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autotune.virtual import kernels, sections
from autotune.virtual.errors import OutOfMemory
from autotune.virtual.sections import Home, Mark, Sections, UnevenError
from autotune.virtual.trace import ALLOC, Cost, Storage, Trace

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

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Yield the layer's modules by the names that they have without this one."""
        return self.layer.named_modules(*args, **kwargs)

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
        trace = self._trace
        costs = {phase: replace(cost) for phase, cost in trace.costs.items()}
        return Mark(len(trace.events), costs, replace(trace.sums_cost), trace.host_bytes)


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
        self._shape: tuple[int, int] | None = None
        self._is_known = self._place is None

    def give_up(self) -> None:
        """Run all layers from now on."""
        self._place = None

    def run(self, step: Callable[[], Any], *, accumulates: bool) -> Any:
        """Run a micro-batch forward and backward.

        Args:
            step: Does it, and returns its loss.
            accumulates: Whether gradients are there already.
        """
        if self._place is None or (self._is_known and self._shape is None):
            return step()
        if not self._is_known:
            return self._run_all(step)
        found = self._run_thin(step, accumulates)
        if found is None:  # which leaves less behind than running it with all layers does
            self._shape = None
            return step()
        return found[0]

    def _run_all(self, step: Callable[[], Any]) -> Any:
        assert self._place is not None
        self._is_known = True
        layers = list(getattr(*self._place))
        first_event = len(self._trace.events)
        with self._with_layers(layers) as marks:
            result = step()
        shapes = sorted(
            ((period, edge) for period in _PERIODS for edge in _EDGES),
            key=lambda shape: _num_run(len(layers), *shape),
        )
        for shape in shapes:
            if _num_run(len(layers), *shape) > _MOST_RUN * len(layers):
                break
            try:
                parts = Sections(self._trace, first_event, marks.forward, marks.backward, *shape)
                parts.check()
                parts.together()
            except UnevenError:
                continue
            self._shape = shape
            break
        return result

    @contextmanager
    def _with_layers(self, layers: Sequence[torch.nn.Module]) -> Iterator[_Marks]:
        """Let the model have these layers alone, each with its marks."""
        assert self._place is not None
        holder, name = self._place
        usual = getattr(holder, name)
        marks = _Marks(self._trace)
        setattr(holder, name, torch.nn.ModuleList(_Marked(layer, marks) for layer in layers))
        try:
            yield marks
        finally:
            setattr(holder, name, usual)

    def _run_thin(self, step: Callable[[], Any], accumulates: bool) -> tuple[Any] | None:
        """Return the loss; None if this could not be done."""
        assert self._place is not None
        assert self._shape is not None
        period, edge = self._shape
        layers = list(getattr(*self._place))
        firsts = sections.first_layers(len(layers), period)
        blocks = [
            layers[first:end]
            for first, end in zip(firsts, [*firsts[1:], len(layers)], strict=True)
        ]
        thin = list(itertools.chain(*blocks[: edge + 1], *blocks[-edge - 1 :]))
        before = _Before(self._trace)
        try:
            with self._with_layers(thin) as marks:
                result = step()
            parts = Sections(
                self._trace, before.first_event, marks.forward, marks.backward, period, edge
            )
            parts.check()
            writer = _Writer(before, parts, blocks, self._place[1], accumulates)
        except OutOfMemory:
            raise
        except Exception:  # noqa: BLE001 - it is run again, and fails again if it must
            # A model that needs its layers' number, or a micro-batch that treats them unlike.
            before.forget([] if accumulates else [p for layer in thin for p in layer.parameters()])
            return None
        writer.write()
        self.num_thinned += 1
        return (result,)


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
        self.first_event, self.first_number = len(trace.events), len(trace.storages)
        self.allocated_bytes, self.peak_bytes = trace.allocated_bytes, trace.peak_bytes
        self.costs = {phase: replace(cost) for phase, cost in trace.costs.items()}
        self.sums, self.sums_cost = dict(trace.sums), replace(trace.sums_cost)

    def forget(self, made: Sequence[torch.nn.Parameter]) -> None:
        """Take back what was counted as work, and the gradients that were made."""
        for parameter in made:
            parameter.grad = None
        self.trace.costs.clear()
        self.trace.costs.update(self.costs)
        self.trace.sums, self.trace.sums_cost = dict(self.sums), replace(self.sums_cost)


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
        self._num = len(blocks)
        self._events, alive = sections.expand(thin, self._num)
        self._left_out = sections.left_out(thin, self._num)
        self._period = len(blocks[1])
        self._firsts = sections.first_layers(sum(map(len, blocks)), self._period)
        trained = [_trained(block) for block in blocks]
        edge = thin.edge
        template = trained[-edge - 1]
        forms = [kernels.form(p.grad) for p in template if p.grad is not None]
        gradients = self._gradients(template, accumulates)
        if len(forms) != len(template) or any(
            len(p) != len(template) for p in trained[edge:-edge]
        ):
            raise UnevenError
        self._made: dict[Home, tuple[torch.nn.Parameter, Any]] = {}
        self._added: dict[Home, torch.nn.Parameter] = {}
        for block in self._left_out:
            for parameter, home, form in zip(trained[block], gradients, forms, strict=False):
                if accumulates:
                    self._added[home._replace(block=block)] = parameter
                else:
                    self._made[home._replace(block=block)] = (parameter, form)
        stays = {home._replace(block=self._full(home.block)) for home in thin.survivors()}
        if alive != stays | self._made.keys():
            raise UnevenError

    def _gradients(self, template: Sequence[torch.nn.Parameter], accumulates: bool) -> list[Home]:
        """Return where the gradients of the second inner block were allocated.

        Of those that were added to others it may be unknown; then none is returned.
        """
        trace = self._trace
        numbers = [trace.number_of(p.grad) if p.grad is not None else None for p in template]
        if accumulates:
            numbers = [None if number is None else trace.sums.get(number) for number in numbers]
            if None in numbers:
                return []
        homes = [self._thin.homes.get(-1 if number is None else number) for number in numbers]
        found = [home for home in homes if home is not None]
        where = {(home.way, home.block) for home in found}
        if len(set(found)) != len(template) or where - {("backward", self._thin.inner[-1])}:
            raise UnevenError
        return found

    def write(self) -> None:
        """Do it; nothing may be freed meanwhile."""
        trace, thin, first = self._trace, self._thin, self._before.first_number
        made = [key for action, key in self._events if action == ALLOC]
        numbers: dict[Home | int, int] = {key: first + place for place, key in enumerate(made)}
        moved = {
            number: numbers[home._replace(block=self._full(home.block))]
            for number, home in thin.homes.items()
        }
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            trace.renumber(moved)
            self._write_events(numbers)
        finally:
            if was_enabled:
                gc.enable()
        self._count_work()
        trace.sums = {
            number: moved.get(last, last) if last is not None else None
            for number, last in trace.sums.items()
        }
        for home, parameter in self._added.items():
            number = trace.number_of(parameter.grad) if parameter.grad is not None else None
            if number is not None:
                trace.sums[number] = numbers[home]

    def _write_events(self, numbers: Mapping[Home | int, int]) -> None:
        trace, before = self._trace, self._before
        old = trace.storages[before.first_number :]
        del trace.storages[before.first_number :], trace.events[before.first_event :]
        trace.allocated_bytes, trace.peak_bytes = before.allocated_bytes, before.peak_bytes
        for action, key in self._events:
            if isinstance(key, int):
                trace.end_again(key)
            elif action == ALLOC:
                like = self._thin.numbers[sections.source(key, self._thin, self._num)]
                self._allocate(key, old[like - before.first_number])
            else:
                trace.end_again(numbers[key])

    def _full(self, block: int) -> int:
        return sections.full(block, self._thin, self._num)

    def _allocate(self, home: Home, like: Storage) -> None:
        """Count a storage of the full run, and make the gradient that it belongs to."""
        trace = self._trace
        module = like.module
        if home.block in self._left_out:
            module = self._module(home, module)
            if home in self._made:
                parameter, form = self._made[home]
                parameter.grad = kernels.like(form, like.op, like.phase)
                entry = trace.storages[-1]
                entry.module, entry.kind = module, like.kind
                return
        trace.begin_again(like, module)

    def _module(self, home: Home, module: str) -> str:
        """Return the path of the module that is in this block what ``module`` is in another."""
        block = sections.source(home, self._thin, self._num).block
        moved = self._firsts[home.block] - self._firsts[self._full(block)]
        parts = module.split(".")
        for index, (part, number) in enumerate(itertools.pairwise(parts)):
            if part == self._name and number.isdecimal():
                parts[index + 1] = str(int(number) + moved)
                break
        return ".".join(parts)

    def _count_work(self) -> None:
        trace, count = self._trace, len(self._left_out)
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
