"""A micro-batch's events by layer: are the layers alike, and what would more of them do?

A *block* is one period of layers: one layer of most models, two where each second layer differs.
The forward pass runs through blocks 0 to N - 1, then comes what computes the loss, and the
backward pass runs through them from N - 1 to 0. The first and the last ones, the *edge*, touch on
other things than blocks; those between are the *inner* ones. Where these are alike, a run with two
of them tells what a run with any number does.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from autotune.virtual.trace import ALLOC, FREE, Cost, Trace

NUM_INNER = 2
"""Inner blocks that a thinned model runs."""


class Mark(NamedTuple):
    """The state of a trace between two layers.

    Attributes:
        event: Number of events so far.
        number: Number of storages so far.
        costs: Work so far, by phase.
        sums: Work so far of adding gradients.
        host_bytes: What the host holds.
    """

    event: int
    number: int
    costs: dict[str, Cost]
    sums: Cost
    host_bytes: int


class Work(NamedTuple):
    """What one block adds to a trace's counters."""

    costs: dict[str, Cost]
    sums: Cost
    host_bytes: int


class Section(NamedTuple):
    """Events that belong together.

    Attributes:
        way: "before" the layers, "forward", "middle" (between the passes) or "backward".
        block: Which one; -1 if it is none.
        events: Range of the trace's events.
        numbers: Range of the storages that it allocates.
    """

    way: str
    block: int
    events: range
    numbers: range


class UnevenError(Exception):
    """The blocks are not alike, or what lies between them can't be told from two of them."""


def first_layers(num_layers: int, period: int) -> list[int]:
    """Return each block's first layer; the first block takes what the period leaves over."""
    rest = num_layers % period
    return [0, *range(rest + period, num_layers, period)]


class Sections:
    """A micro-batch's events in sections.

    Args:
        trace: Where it ran.
        start: A mark at its start.
        forward: A mark before the first layer's forward pass, and one after each layer's.
        backward: A mark before each layer's backward pass, from the last layer to the first.
        period: Layers per block.
        edge: Blocks at each end that are not inner ones. Blocks may free each other's storages if
            they are no further apart.

    Raises:
        UnevenError: If layers have no marks, or there are too few.
    """

    def __init__(
        self,
        trace: Trace,
        start: Mark,
        forward: Sequence[Mark],
        backward: Sequence[Mark],
        period: int,
        edge: int,
    ) -> None:
        if len(forward) != len(backward) + 1 or not backward:
            raise UnevenError
        self.trace, self.edge, self.first_number = trace, edge, start.number
        num_layers = len(backward)
        firsts = first_layers(num_layers, period)
        self.num_blocks = count = len(firsts)
        self.inner = range(edge, count - edge)
        if len(self.inner) < NUM_INNER:
            raise UnevenError
        lasts = [*(layer - 1 for layer in firsts[1:]), num_layers - 1]
        ends = [forward[0], *(forward[layer + 1] for layer in lasts)]
        starts = [backward[num_layers - 1 - layer] for layer in lasts]
        names = [
            ("before", -1),
            *(("forward", block) for block in range(count)),
            ("middle", -1),
            *(("backward", block) for block in reversed(range(count))),
        ]
        cuts = [(mark.event, mark.number) for mark in (start, *ends, *reversed(starts))]
        cuts.append((len(trace.events), len(trace.storages)))
        self.all = [
            Section(*name, range(a[0], b[0]), range(a[1], b[1]))
            for name, (a, b) in zip(names, itertools.pairwise(cuts), strict=True)
        ]
        self._firsts = [section.numbers.start for section in self.all]
        self.work = {
            **{("forward", b): _between(ends[b], ends[b + 1]) for b in self.inner},
            **{("backward", b): _between(starts[b], starts[b - 1]) for b in self.inner},
        }
        self._workspaces = [
            entry.index for entry in trace.storages[start.number :] if entry.kind == "workspaces"
        ]

    def home(self, number: int) -> Section | None:
        """Return the section that allocated a storage; None if it was there before."""
        if number < self.first_number:
            return None
        return self.all[bisect.bisect_right(self._firsts, number) - 1]

    def place(self, number: int, home: Section) -> int:
        """Return a storage's place among those of its section but for workspaces, which come once.

        Those have negative ones.
        """
        place = number - home.numbers.start
        for other in self._workspaces:
            if other == number:
                return -1 - number
            place -= home.numbers.start <= other < number
        return place

    def number(self, place: int, home: Section) -> int:
        """Return the storage at that place of a section."""
        number = home.numbers.start + place
        for other in self._workspaces:
            number += home.numbers.start <= other <= number
        return number

    def check(self) -> None:
        """Make sure that the inner blocks are alike.

        Raises:
            UnevenError: If they are not.
        """
        found: dict[str, tuple[Section, list[object]]] = {}
        for section in self.all:
            if section.block not in self.inner:
                continue
            tokens = self._tokens(section)
            like, wanted = found.setdefault(section.way, (section, tokens))
            if tokens != wanted or not _same_work(
                self.work[section.way, section.block], self.work[like.way, like.block]
            ):
                raise UnevenError

    def _tokens(self, section: Section) -> list[object]:
        """Return what a section does, without regard to which block it is.

        What is freed between two allocations is freed in an order that makes no difference.
        """
        tokens: list[object] = []
        freed: list[tuple[str, int, int]] = []
        storages = self.trace.storages
        for action, number in self.trace.events[section.events.start : section.events.stop]:
            if action == ALLOC:
                entry = storages[number]
                if freed:
                    tokens.append(sorted(freed))
                    freed = []
                tokens.append((entry.nbytes, entry.op, entry.phase, entry.kind))
                continue
            home = section if number in section.numbers else self.home(number)
            if action != FREE or home is None or home.block < 0:
                raise UnevenError
            if abs(home.block - section.block) > self.edge:
                raise UnevenError
            freed.append((home.way, home.block - section.block, self.place(number, home)))
        return [*tokens, sorted(freed)]

    def together(self) -> set[tuple[str, int, str, int]]:
        """Return what other sections free for all inner blocks at once.

        Returns:
            Section (way, block) and the storage's way and place.

        Raises:
            UnevenError: If they free something for several inner blocks, or for one far away.
        """
        blocks: dict[tuple[str, int, str, int], set[int]] = {}
        for section in self.all:
            if section.block in self.inner:
                continue
            for action, number in self.trace.events[section.events.start : section.events.stop]:
                home = self.home(number) if action == FREE else None
                if home is not None and home.block in self.inner:
                    key = (section.way, section.block, home.way, self.place(number, home))
                    blocks.setdefault(key, set()).add(home.block)
        found = set()
        for key, members in blocks.items():
            if members == set(self.inner):
                found.add(key)
            elif key[1] < 0 or len(members) > 1 or abs(min(members) - key[1]) > self.edge:
                raise UnevenError
        return found


def _between(first: Mark, second: Mark) -> Work:
    costs = {}
    for phase, cost in second.costs.items():
        costs[phase] = total = Cost()
        total.add(cost)
        if phase in first.costs:
            total.add(first.costs[phase], -1)
    sums = Cost()
    sums.add(second.sums)
    sums.add(first.sums, -1)
    return Work(costs, sums, second.host_bytes - first.host_bytes)


def _same_work(one: Work, other: Work) -> bool:
    if one.host_bytes != other.host_bytes or one.sums.num_ops != other.sums.num_ops:
        return False
    for phase in {*one.costs, *other.costs}:
        a, b = one.costs.get(phase, Cost()), other.costs.get(phase, Cost())
        # Differences of large sums: the last digits are noise.
        if a.num_ops != b.num_ops or not all(
            math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-12)
            for x, y in (
                (a.flops, b.flops),
                (a.moved_bytes, b.moved_bytes),
                (a.link_bytes, b.link_bytes),
                (a.seconds, b.seconds),
            )
        ):
            return False
    return True


class Span(NamedTuple):
    """Storages of the full run that one section allocates.

    Attributes:
        section: The thinned run's section that they are like.
        block: The block, of the full run.
        start: Number of the first one.
        is_copy: Whether no such section was run.
    """

    section: Section
    block: int
    start: int
    is_copy: bool


class Expansion:
    """What a run of more blocks does, from a thinned one with :data:`NUM_INNER` inner blocks.

    Args:
        thin: The thinned run, checked.
        num_blocks: Blocks of the full run: more.

    Attributes:
        events: Of the full run, in order; storages are numbered from the thinned run's first on.
        spans: Which storages belong to what.
        alive: Those that stay allocated.

    Raises:
        UnevenError: If something would be freed that is not there.
    """

    def __init__(self, thin: Sections, num_blocks: int) -> None:
        self.thin, self.num_blocks = thin, num_blocks
        self.events: list[tuple[int, int]] = []
        self.spans: list[Span] = []
        self.left_out = range(thin.edge + 1, num_blocks - thin.edge - 1)
        self._inner = range(thin.edge, num_blocks - thin.edge)
        self._by_name: dict[tuple[str, int], Span] = {}
        self._together = thin.together()
        self._next = thin.first_number
        for section in thin.all:
            self._emit(section, self.full(section.block), is_copy=False)
            if section.way == "forward" and section.block == thin.edge:
                for block in self.left_out:
                    self._emit(section, block, is_copy=True)
            elif section.way == "backward" and section.block == thin.edge + 1:
                for block in reversed(self.left_out):
                    self._emit(section, block, is_copy=True)
        self.alive: set[int] = set()
        for action, number in self.events:
            if action == ALLOC:
                self.alive.add(number)
            elif number in self.alive:
                self.alive.remove(number)
            elif number >= thin.first_number:
                raise UnevenError

    def full(self, block: int) -> int:
        """Return which block of the full run one of the thinned run is; -1 stays."""
        thin = self.thin
        return block if block <= thin.edge else block + self.num_blocks - thin.num_blocks

    def _emit(self, section: Section, block: int, *, is_copy: bool) -> None:
        thin, start, first = self.thin, self._next, section.numbers.start
        span = Span(section, block, start, is_copy)
        self.spans.append(span)
        self._by_name[section.way, block] = span
        self._next += len(section.numbers)
        append = self.events.append
        done: set[tuple[str, int]] = set()
        for action, number in thin.trace.events[section.events.start : section.events.stop]:
            if number in section.numbers:
                append((action, start + number - first))
                continue
            home = thin.home(number)
            if home is None:
                append((FREE, number))
                continue
            place = thin.place(number, home)
            for freed in self._freed(section, block, home, place, done):
                append((FREE, self.number(home.way, freed, place)))

    def _freed(
        self, section: Section, block: int, home: Section, place: int, done: set[tuple[str, int]]
    ) -> Sequence[int]:
        """Return for which blocks ``section``, run as that block, frees what another allocated."""
        thin = self.thin
        is_inner = section.block in thin.inner
        key = (section.way, section.block, home.way, place)
        if home.block in thin.inner and not is_inner and key in self._together:
            if key[2:] in done:
                return ()
            done.add(key[2:])
            return self._inner
        distance = home.block - section.block
        is_near = min(section.block, home.block) >= 0 and abs(distance) <= thin.edge
        return (block + distance if is_inner or is_near else self.full(home.block),)

    def number(self, way: str, block: int, place: int) -> int:
        """Return the number of a storage of the full run.

        Raises:
            UnevenError: If there is none yet.
        """
        span = self._by_name.get((way, block))
        if span is None:
            raise UnevenError
        found = self.thin.number(place, span.section) if place >= 0 else -1 - place
        if found not in span.section.numbers:
            raise UnevenError
        return span.start + found - span.section.numbers.start

    def moved(self, number: int) -> int:
        """Return the number in the full run of a storage of the thinned one, or from before."""
        home = self.thin.home(number)
        if home is None:
            return number
        span = self._by_name[home.way, self.full(home.block)]
        return span.start + number - home.numbers.start
