"""A micro-batch's events by layer: are the layers alike, and what would more of them do?

A *block* is one period of layers: one layer of most models, two where each second layer differs.
The forward pass runs through blocks 0 to N - 1, then comes what computes the loss, and the
backward pass runs through them from N - 1 to 0. The first and the last ones, the *edge*, touch on
other things than blocks; those between are the *inner* ones. Where these are alike, a run with two
of them tells what a run with any number does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autotune.virtual.trace import ALLOC, FREE, Cost, Trace

NUM_INNER = 2
"""Inner blocks that a thinned model runs."""


class Home(NamedTuple):
    """Where a storage was allocated: in which pass, by which block, as its how manieth.

    ``way`` is "forward", "backward" or, before these two and between them, "before" and "middle",
    whose block is -1. Workspaces, which come once, have negative places.
    """

    way: str
    block: int
    place: int


class Mark(NamedTuple):
    """The state of a trace between two layers.

    Attributes:
        event: Number of events so far.
        costs: Work so far, by phase.
        sums: Work so far of adding gradients.
        host_bytes: What the host holds.
    """

    event: int
    costs: dict[str, Cost]
    sums: Cost
    host_bytes: int


class Work(NamedTuple):
    """What one block adds to a trace's counters."""

    costs: dict[str, Cost]
    sums: Cost
    host_bytes: int


class Section(NamedTuple):
    """A range of events, and what they belong to."""

    way: str
    block: int
    events: range


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
        first_event: Its first event.
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
        first_event: int,
        forward: Sequence[Mark],
        backward: Sequence[Mark],
        period: int,
        edge: int,
    ) -> None:
        if len(forward) != len(backward) + 1 or not backward:
            raise UnevenError
        self.trace, self.edge = trace, edge
        num_layers = len(backward)
        firsts = first_layers(num_layers, period)
        self.num_blocks = len(firsts)
        lasts = [*(layer - 1 for layer in firsts[1:]), num_layers - 1]
        ends = [forward[layer + 1] for layer in lasts]
        starts = [backward[num_layers - 1 - layer] for layer in lasts]
        self.inner = range(edge, self.num_blocks - edge)
        if len(self.inner) < NUM_INNER:
            raise UnevenError
        last_event = len(trace.events)
        after = [starts[block - 1].event if block else last_event for block in range(len(lasts))]
        cuts = [forward[0].event, *(mark.event for mark in ends)]
        self.all = [
            Section("before", -1, range(first_event, cuts[0])),
            *(Section("forward", b, range(cuts[b], cuts[b + 1])) for b in range(len(lasts))),
            Section("middle", -1, range(cuts[-1], starts[-1].event)),
            *(
                Section("backward", b, range(starts[b].event, after[b]))
                for b in reversed(range(len(lasts)))
            ),
        ]
        self.work = {
            **{("forward", b): _between(ends[b - 1], ends[b]) for b in self.inner},
            **{("backward", b): _between(starts[b], starts[b - 1]) for b in self.inner},
        }
        self.homes: dict[int, Home] = {}
        self.numbers: dict[Home, int] = {}
        for section in self.all:
            places, workspaces = itertools.count(), itertools.count(1)
            for action, number in self._events(section):
                if action == ALLOC:
                    is_workspace = trace.storages[number].kind == "workspaces"
                    place = -next(workspaces) if is_workspace else next(places)
                    home = Home(section.way, section.block, place)
                    self.homes[number], self.numbers[home] = home, number
                elif action != FREE:
                    raise UnevenError

    def _events(self, section: Section) -> Iterator[tuple[int, int]]:
        events = self.trace.events
        return (events[index] for index in section.events)

    def check(self) -> None:
        """Make sure that the inner blocks are alike.

        Raises:
            UnevenError: If they are not.
        """
        by_way: dict[str, Section] = {}
        for section in self.all:
            if section.block not in self.inner:
                continue
            like = by_way.setdefault(section.way, section)
            if self._tokens(section) != self._tokens(like):
                raise UnevenError
            if not _same_work(
                self.work[section.way, section.block], self.work[like.way, like.block]
            ):
                raise UnevenError

    def _tokens(self, section: Section) -> list[object]:
        """Return what a section does, without regard to which block it is.

        What is freed between two allocations is freed in an order that makes no difference.
        """
        tokens: list[object] = []
        freed: list[tuple[str, int, int]] = []
        for action, number in self._events(section):
            if action == ALLOC:
                entry = self.trace.storages[number]
                tokens += [tuple(sorted(freed))] if freed else []
                freed = []
                tokens.append((entry.nbytes, entry.op, entry.phase, entry.kind))
            else:
                home = self.homes.get(number)
                if home is None or home.block < 0:
                    raise UnevenError
                if abs(home.block - section.block) > self.edge:
                    raise UnevenError
                freed.append((home.way, home.block - section.block, home.place))
        return [*tokens, tuple(sorted(freed))]

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
            for action, number in self._events(section):
                home = self.homes.get(number) if action == FREE else None
                if home is not None and home.block in self.inner:
                    key = (section.way, section.block, home.way, home.place)
                    blocks.setdefault(key, set()).add(home.block)
        found = set()
        for key, members in blocks.items():
            if members == set(self.inner):
                found.add(key)
            elif key[1] < 0 or len(members) > 1 or abs(min(members) - key[1]) > self.edge:
                raise UnevenError
        return found

    def survivors(self) -> set[Home]:
        """Return what is not freed."""
        freed = {
            number
            for section in self.all
            for action, number in self._events(section)
            if action == FREE
        }
        return {home for number, home in self.homes.items() if number not in freed}


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


def expand(thin: Sections, num_blocks: int) -> tuple[list[tuple[int, Home | int]], set[Home]]:
    """Return what a run of ``num_blocks`` blocks does, from one of fewer.

    Args:
        thin: Checked, with :data:`NUM_INNER` inner blocks.
        num_blocks: More than that.

    Returns:
        Events in order: the action, and the storage's home in the full run or, if it was there
        before, its number. And what stays allocated.

    Raises:
        UnevenError: If something would be freed that is not there.
    """
    edge = thin.edge
    together = thin.together()
    events: list[tuple[int, Home | int]] = []
    inner = range(edge, num_blocks - edge)

    def near(section: Section, home: Home) -> bool:
        return min(section.block, home.block) >= 0 and abs(section.block - home.block) <= edge

    def emit(section: Section, block: int) -> None:
        done: set[tuple[str, int]] = set()
        is_inner = section.block in thin.inner
        for action, number in thin._events(section):
            home = thin.homes.get(number)
            if home is None:
                events.append((action, number))
                continue
            if action == ALLOC:
                events.append((ALLOC, home._replace(block=block)))
                continue
            key = (section.way, section.block, home.way, home.place)
            if home.block in thin.inner and not is_inner and key in together:
                if key[2:] not in done:
                    done.add(key[2:])
                    events.extend((FREE, home._replace(block=other)) for other in inner)
                continue
            if is_inner or near(section, home):
                freed = block + home.block - section.block
            else:
                freed = full(home.block, thin, num_blocks)
            events.append((FREE, home._replace(block=freed)))

    copies = left_out(thin, num_blocks)
    for section in thin.all:
        emit(section, full(section.block, thin, num_blocks))
        if section.way == "forward" and section.block == edge:
            for block in copies:
                emit(section, block)
        elif section.way == "backward" and section.block == edge + 1:
            for block in reversed(copies):
                emit(section, block)
    alive: set[Home] = set()
    for action, key in events:
        if isinstance(key, int):
            continue
        if action == ALLOC:
            alive.add(key)
        elif key in alive:
            alive.remove(key)
        else:
            raise UnevenError
    return events, alive


def left_out(thin: Sections, num_blocks: int) -> range:
    """Return the blocks of the full run that the thinned one does not run."""
    return range(thin.edge + 1, num_blocks - thin.edge - 1)


def full(block: int, thin: Sections, num_blocks: int) -> int:
    """Return which block of the full run one of the thinned run is; -1 stays."""
    return block if block <= thin.edge else block + num_blocks - thin.num_blocks


def source(home: Home, thin: Sections, num_blocks: int) -> Home:
    """Return which storage of the thinned run one of the full run is like."""
    if home.block <= thin.edge:
        return home
    if home.block > num_blocks - thin.edge - 2:
        return home._replace(block=home.block - num_blocks + thin.num_blocks)
    return home._replace(block=thin.edge + (home.way == "backward"))
