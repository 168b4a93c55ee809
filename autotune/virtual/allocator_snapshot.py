"""Check of :mod:`autotune.virtual.allocator` against what PyTorch recorded on a card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.virtual.allocator import CachingAllocator, OutOfMemory
from autotune.virtual.allocator_settings import AllocatorSettings


@dataclass(frozen=True, slots=True)
class SnapshotReplay:
    """What a recorded history and its replay have in common.

    Attributes:
        num_events: Events that were replayed.
        recorded_peak_reserved_bytes: By the recorded segments.
        replayed_peak_reserved_bytes: By this allocator.
        replayed_peak_allocated_bytes: By this allocator; a history has no block sizes.
        peak_requested_bytes: The most that was asked for at once; the same in both.
        largest_difference_bytes: Of reserved bytes after an event, replayed less recorded.
        first_difference: The number of the first event after which they differ; None if none.
        num_unknown_frees: Blocks freed that were allocated before the history began.
        num_streams: Streams in it; more than one is not modelled.
        out_of_memory: Whether the replay ended early, with its limit reached.
    """

    num_events: int
    recorded_peak_reserved_bytes: int
    replayed_peak_reserved_bytes: int
    replayed_peak_allocated_bytes: int
    peak_requested_bytes: int
    largest_difference_bytes: int
    first_difference: int | None
    num_unknown_frees: int
    num_streams: int
    out_of_memory: bool


def replay_snapshot(
    events: Iterable[Mapping[str, Any]],
    settings: AllocatorSettings | None = None,
    limit_bytes: int | None = None,
) -> SnapshotReplay:
    """Replay what PyTorch recorded of its own allocator and compare the reserved bytes.

    Segments that were given back are, in the replay, a call of empty_cache; with a limit, those
    that were given back to serve a request are left to the replay's own decision.

    Args:
        events: One device's list of ``device_traces`` in ``torch.cuda.memory._snapshot()``,
            recorded from before the first allocation on.
        settings: Those of the recorded run.
        limit_bytes: The card's memory less what others took, or None if there was enough.
    """
    allocator = CachingAllocator(settings or AllocatorSettings(), limit_bytes)
    recorded = peak = peak_requested = worst = unknown = count = 0
    first: int | None = None
    released = failed = False
    streams = set()
    for number, event in enumerate(events):
        action, size = event["action"], int(event.get("size", 0))
        if action in ("segment_free", "segment_unmap"):
            recorded -= size
            released = True
            continue
        grows = action in ("segment_alloc", "segment_map")
        if released and (limit_bytes is None or not grows):
            allocator.empty_cache()
        released = False
        if grows:
            recorded += size
            peak = max(peak, recorded)
            continue
        if action == "alloc":
            streams.add(event.get("stream", 0))
            try:
                allocator.malloc(event["addr"], size)
            except OutOfMemory:
                failed = True
        elif action == "free_completed":
            try:
                allocator.free(event["addr"])
            except KeyError:
                unknown += 1
        else:
            continue
        count += 1
        peak_requested = max(peak_requested, allocator.requested_bytes)
        difference = allocator.reserved_bytes - recorded
        if difference and first is None:
            first = number
        if abs(difference) > abs(worst):
            worst = difference
        if failed:
            break
    return SnapshotReplay(
        count,
        peak,
        allocator.peak_reserved_bytes,
        allocator.peak_allocated_bytes,
        peak_requested,
        worst,
        first,
        unknown,
        len(streams),
        failed,
    )
