"""Steps of a generation: what one does to a trace, and what those between two do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autotune.virtual.allocator_settings import SMALL_BYTES
from autotune.virtual.trace import ALLOC, BLOCK_BYTES, FREE, Cost

_TIME_SHARE = 0.02
"""By how much the time of a step may lie off the line, as tiles of products make it."""

_SHORT = 16
"""Steps of a stretch in which time may lie off the line."""


class Own(NamedTuple):
    """What is the same of a storage in all steps."""

    op: str
    phase: str
    module: str
    kind: str
    freed_phase: str


@dataclass(slots=True, kw_only=True)
class Step:
    """One step's forward pass.

    Attributes:
        length: Positions in the cache before it.
        own: What it allocated, in order.
        sizes: Bytes of each.
        events: Actions in order, with a place in ``own``; below 0, ``~place`` among the keys and
            values that were there.
        states: Places of the new keys and values, by layer.
        logits: Place of what it returned.
        costs: Its work by phase.
    """

    length: int
    own: list[Own]
    sizes: list[int]
    events: list[tuple[int, int]]
    states: list[int]
    logits: int
    costs: dict[str, Cost]

    def is_like(self, other: Step) -> bool:
        """Whether the other one did the same, sizes and work aside."""
        return (
            self.events == other.events
            and self.own == other.own
            and self.states == other.states
            and self.logits == other.logits
            and self.costs.keys() == other.costs.keys()
        )

    def seconds(self) -> float:
        """Return its predicted time."""
        return sum(cost.seconds for cost in self.costs.values())


class Stretch:
    """Steps whose sizes lie on lines between those of two that were seen.

    Args:
        first, last: The two, which are alike; or one and the same.
        period: Only every so manieth step is one of these.
    """

    def __init__(self, first: Step, last: Step, period: int) -> None:
        self.first, self.last = first, last
        self.lengths = range(first.length, last.length + 1, period)
        span = max(last.length - first.length, 1)
        self._slopes = [(b - a) // span for a, b in zip(first.sizes, last.sizes, strict=True)]
        self.is_whole = all(
            slope * span == b - a if first is not last else True
            for slope, a, b in zip(self._slopes, first.sizes, last.sizes, strict=True)
        )
        freed = {place for action, place in first.events if action == FREE}
        left_out = {
            place
            for place, (size, slope) in enumerate(zip(first.sizes, self._slopes, strict=True))
            if slope == 0 and size <= SMALL_BYTES and place in freed
        }
        self.events = [item for item in first.events if item[1] not in left_out]

    def tops(self) -> np.ndarray[Any, Any]:
        """Return the most bytes in use within each step, its cache included. Shape (steps,)."""
        first = self.first
        steps = np.arange(len(self.lengths))[:, None] * self.lengths.step
        slopes = np.array(self._slopes, dtype=np.int64)
        sizes = _rounded(np.array(first.sizes) + steps * slopes)
        states = np.array(first.states)
        there = _rounded(np.array(first.sizes)[states] + (steps - 1) * slopes[states])
        changes = np.empty((len(steps), len(first.events)), dtype=np.int64)
        for column, (action, place) in enumerate(first.events):
            changes[:, column] = (
                -there[:, ~place]
                if place < 0
                else sizes[:, place] * (1 if action == ALLOC else -1)
            )
        tops: np.ndarray[Any, Any] = there.sum(1) + changes.cumsum(1).max(1)
        return tops

    def size(self, place: int, length: int) -> int:
        """Return the bytes of a storage in the step at ``length``."""
        return self.first.sizes[place] + (length - self.first.length) * self._slopes[place]

    def costs(self, length: int) -> Iterator[tuple[str, Cost]]:
        """Yield the work of the step at ``length``, by phase."""
        share = (length - self.first.length) / max(self.last.length - self.first.length, 1)
        for phase, cost in self.first.costs.items():
            other = self.last.costs[phase]
            yield (
                phase,
                Cost(
                    flops=_between(cost.flops, other.flops, share),
                    moved_bytes=_between(cost.moved_bytes, other.moved_bytes, share),
                    link_bytes=_between(cost.link_bytes, other.link_bytes, share),
                    num_ops=round(_between(cost.num_ops, other.num_ops, share)),
                    seconds=_between(cost.seconds, other.seconds, share),
                ),
            )

    def goes_through(self, middle: Step) -> bool:
        """Whether a step between the two is where it should be."""
        if not (self.is_whole and self.first.is_like(self.last) and self.first.is_like(middle)):
            return False
        length = middle.length
        if any(self.size(place, length) != size for place, size in enumerate(middle.sizes)):
            return False
        seconds = sum(cost.seconds for _, cost in self.costs(length))
        off = abs(seconds - middle.seconds())
        return len(self.lengths) <= _SHORT or off <= _TIME_SHARE * middle.seconds()


class _Uneven(Exception):  # noqa: N818 - not an error: the generation is run in full
    """A step that does what is not understood."""


def stretches_between(
    first: int, last: int, period: int, step_at: Callable[[int], Step]
) -> Iterator[Stretch]:
    """Yield stretches from one length to another, every ``period`` of them."""
    waiting = [(first, last)]
    while waiting:
        low, high = waiting.pop()
        lowest, highest = step_at(low), step_at(high)
        if high - low <= period:
            yield Stretch(lowest, lowest, period)
            if high > low:
                yield Stretch(highest, highest, period)
            continue
        middle = low + (high - low) // period // 2 * period
        if lowest.is_like(highest):
            stretch = Stretch(lowest, highest, period)
            if stretch.goes_through(step_at(middle)):
                yield stretch
                continue
        waiting += [(middle, high), (low, middle)]


def _rounded(sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = -(-sizes // BLOCK_BYTES) * BLOCK_BYTES
    return found


def highest(stretches: Sequence[Stretch]) -> int:
    """Return the length at which most is in use within a step."""
    most, at = -1, -1
    for stretch in stretches:
        tops = stretch.tops()
        place = int(tops.argmax())
        if tops[place] > most:
            most, at = int(tops[place]), stretch.lengths[place]
    return at


def _between(first: float, last: float, share: float) -> float:
    return first + (last - first) * share
