"""Writing a micro-batch that was run with few layers into its trace as one with all of them."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autotune.virtual import kernels, sections
from autotune.virtual.layerlist import take_mark
from autotune.virtual.sections import Sections, UnevenError
from autotune.virtual.state import current
from autotune.virtual.trace import ALLOC, FREE, Cost, Storage, Trace


class Before:
    """A trace at the start of a micro-batch that may be taken back."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.mark = take_mark(trace)
        self.allocated_bytes, self.peak_bytes = trace.allocated_bytes, trace.peak_bytes
        self.sums = dict(trace.sums)
        session = current()
        self.has_workspace = set() if session is None else set(session.has_workspace)
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def take_back(self, made: Sequence[torch.nn.Parameter]) -> None:
        """Undo what was done since.

        Args:
            made: Those whose gradients go.
        """
        trace, mark = self.trace, self.mark
        # A model with LayerDrop draws which layers run: the same ones again.
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        np.random.set_state(self._random[2])
        for parameter in made:
            parameter.grad = None
        gc.collect()
        # What still lives stays in the trace: it is less than all layers leave.
        self.forget()
        trace.sums, trace.sums_cost = dict(self.sums), mark.sums

    def forget(self) -> bool:
        """Take out of the trace what was done since, and its work.

        Returns:
            Whether all of it is out; what still lives, perhaps uncollected, stays.
        """
        trace, mark = self.trace, self.mark
        is_forgotten = trace.take_back(mark.event, mark.number, self.peak_bytes)
        session = current()
        if is_forgotten and session is not None:
            session.has_workspace = self.has_workspace
        trace.costs.clear()
        trace.costs.update({phase: replace(cost) for phase, cost in mark.costs.items()})
        return is_forgotten


class Writer:
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
        before: Before,
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
                trace.costs.setdefault(phase, Cost()).add(cost, count)
            trace.sums_cost.add(work.sums, count)
            if way == "forward":
                # The host holds most when the forward pass is over.
                trace.host_peak_bytes += count * work.host_bytes


def _trained(layers: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    return [p for layer in layers for p in layer.parameters() if p.requires_grad]
