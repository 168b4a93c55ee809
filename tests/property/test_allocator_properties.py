from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.virtual.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from autotune.virtual.allocator_snapshot import replay_snapshot

MIB = 1 << 20

SETTINGS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "expandable_segments:True,large_segment_size_mb:32",
        "max_split_size_mb:24",
        "max_split_size_mb:40,max_non_split_rounding_mb:30",
        "expandable_segments:True,max_split_size_mb:24",
        "roundup_power2_divisions:[1:8,32:2,>:1]",
        "garbage_collection_threshold:0.4",
        "garbage_collection_threshold:0.2,max_split_size_mb:24",
    ]
).map(AllocatorSettings.parse)

SIZES = st.one_of(
    st.integers(0, 2 * MIB),
    st.integers(1, 24).map(lambda count: count * MIB),
    st.integers(MIB, 70 * MIB),
)
# A size to allocate, or None to free the block of the given rank among the live ones.
STEPS = st.lists(st.tuples(SIZES | st.none(), st.integers(0, 1000)), max_size=120)
LIMITS = st.none() | st.integers(1, 200).map(lambda count: count * MIB)


def check(allocator: CachingAllocator, live: dict[int, int]) -> None:
    assert allocator.reserved_bytes >= allocator.allocated_bytes >= allocator.requested_bytes
    assert allocator.requested_bytes == sum(live.values())
    assert allocator.peak_allocated_bytes >= allocator.allocated_bytes
    assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
    if allocator.limit_bytes is not None:
        assert allocator.peak_reserved_bytes <= allocator.limit_bytes
    segments = allocator.segments()
    assert sum(segment.total_bytes for segment in segments) == allocator.reserved_bytes
    used = [block for segment in segments for block in segment.blocks if block.allocated]
    assert sum(block.size_bytes for block in used) == allocator.allocated_bytes
    assert sorted(block.requested_bytes for block in used) == sorted(filter(None, live.values()))
    end = 0
    for segment in segments:
        assert segment.address >= end
        end = segment.address + segment.total_bytes
        place = segment.address
        for block in segment.blocks:
            assert block.address == place
            assert block.size_bytes >= max(block.requested_bytes, 512)
            assert block.size_bytes % 512 == 0
            place += block.size_bytes
        assert place == end
        states = [block.allocated for block in segment.blocks]
        assert all(one or other for one, other in pairwise(states))


def play(allocator: CachingAllocator, steps) -> dict[int, int]:
    live: dict[int, int] = {}
    for number, (size, rank) in enumerate(steps):
        if size is not None:
            try:
                allocator.malloc(number, size)
            except OutOfMemory:
                assert allocator.num_ooms <= allocator.num_alloc_retries
            else:
                live[number] = size
        elif live:
            key = sorted(live)[rank % len(live)]
            allocator.free(key)
            del live[key]
        check(allocator, live)
    return live


@settings(deadline=None)
@given(SETTINGS, LIMITS, LIMITS, STEPS)
def test_what_holds_after_every_event(conf, limit, allowed, steps):
    allocator = CachingAllocator(conf, limit, allowed_bytes=allowed)
    live = play(allocator, steps)
    allocator.empty_cache()
    check(allocator, live)
    for key in live:
        allocator.free(key)
    assert allocator.allocated_bytes == allocator.requested_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.segments() == []


@settings(deadline=None)
@given(STEPS)
def test_the_best_fit_is_used_if_there_is_one(steps):
    allocator = CachingAllocator(AllocatorSettings())
    live: list[int] = []
    for number, (size, rank) in enumerate(steps):
        if not size:
            if live:
                allocator.free(live.pop(rank % len(live)))
            continue
        block_bytes = max(-(-size // 512), 1) * 512
        free = [
            (block.size_bytes, block.address)
            for segment in allocator.segments()
            if segment.small == (block_bytes <= MIB)
            for block in segment.blocks
            if not block.allocated and block.size_bytes >= block_bytes
        ]
        before = allocator.reserved_bytes
        allocator.malloc(number, size)
        live.append(number)
        assert (allocator.reserved_bytes == before) == bool(free)
        if free:
            expected = min(free)[1]
            found = [b for s in allocator.segments() for b in s.blocks if b.address == expected]
            assert found[0].requested_bytes == size


@settings(deadline=None)
@given(STEPS)
def test_expandable_segments_reserve_little_more_than_was_ever_in_use(steps):
    # Only holes left by frees can cost more, so nothing is freed here.
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    play(allocator, [(size or 512, 0) for size, _ in steps])
    assert allocator.reserved_bytes <= allocator.allocated_bytes + 22 * MIB


@settings(deadline=None)
@given(st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:24"]), STEPS)
def test_its_own_history_replays_without_a_difference(conf, steps):
    parsed = AllocatorSettings.parse(conf)
    allocator = CachingAllocator(parsed)
    events: list[dict[str, object]] = []
    live: dict[int, int] = {}
    for number, (size, rank) in enumerate(steps):
        before = allocator.reserved_bytes
        if size:
            allocator.malloc(number, size)
            live[number] = size
            if allocator.reserved_bytes > before:
                grown = allocator.reserved_bytes - before
                events.append({"action": "segment_alloc", "addr": 0, "size": grown})
            events.append({"action": "alloc", "addr": number, "size": size})
        elif live:
            key = sorted(live)[rank % len(live)]
            events.append({"action": "free_completed", "addr": key, "size": live.pop(key)})
            allocator.free(key)
        if rank % 50 == 0:
            before = allocator.reserved_bytes
            allocator.empty_cache()
            freed = before - allocator.reserved_bytes
            if freed:
                events.append({"action": "segment_free", "addr": 0, "size": freed})
    found = replay_snapshot(events, parsed)
    assert found.first_difference is None
    assert found.replayed_peak_reserved_bytes == found.recorded_peak_reserved_bytes
    assert found.replayed_peak_allocated_bytes == allocator.peak_allocated_bytes


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_the_same_events_give_the_same_numbers(conf):
    parsed = AllocatorSettings.parse(conf)
    runs = [CachingAllocator(parsed, 500 * MIB) for _ in range(2)]
    for run in runs:
        play(run, [(size * 300_000, 3) if size % 4 else (None, size) for size in range(1, 90)])
    assert runs[0].segments() == runs[1].segments()
