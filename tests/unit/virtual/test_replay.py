from __future__ import annotations

import pytest

pytest.importorskip("torch")

from autotune.errors import UnknownNameError, UsageError
from autotune.units import MIB
from autotune.virtual.allocator import OutOfMemory
from autotune.virtual.replay import Replay
from autotune.virtual.trace import FREE, Trace


class Run:
    """A trace that a test writes itself."""

    def __init__(self) -> None:
        self.trace = Trace()

    def take(self, mib: float) -> int:
        self.trace.reserve(int(mib * MIB), "test")
        return len(self.trace.storages) - 1

    def give_back(self, number: int) -> None:
        self.trace.events.append((FREE, number))


@pytest.fixture
def run() -> Run:
    return Run()


def test_it_lags_behind_the_trace_and_catches_up(run: Run) -> None:
    replay = Replay(run.trace, limit_bytes=None)
    first = run.take(30)
    assert replay.peak_allocated_bytes == 0
    replay.advance()
    assert replay.peak_allocated_bytes == 30 * MIB
    run.give_back(first)
    run.trace.mark("later")
    run.take(40)
    assert replay.peak_allocated_bytes == 30 * MIB
    replay.advance()
    replay.advance()
    # The first block's segment is kept, and too small for the second.
    assert replay.peak_allocated_bytes == 40 * MIB
    assert replay.peak_reserved_bytes == 70 * MIB


def test_peaks_start_anew_from_what_is_in_use(run: Run) -> None:
    replay = Replay(run.trace, limit_bytes=None)
    run.take(12)
    run.give_back(run.take(50))
    replay.advance()
    assert replay.peak_allocated_bytes == 62 * MIB
    replay.reset_peaks()
    assert replay.peak_allocated_bytes == 12 * MIB
    assert replay.peak_reserved_bytes == 62 * MIB


def test_the_limit_is_set_before_anything_is_allocated(run: Run) -> None:
    replay = Replay(run.trace, limit_bytes=10 * MIB)
    run.trace.mark("start")
    replay.advance()
    assert not replay.has_begun
    replay.limit(100 * MIB)
    run.take(50)
    replay.advance()
    assert replay.has_begun
    for limit in (200 * MIB, None):
        with pytest.raises(ValueError, match="before anything is allocated"):
            replay.limit(limit)


def test_the_limit_can_be_lifted(run: Run) -> None:
    replay = Replay(run.trace, limit_bytes=10 * MIB)
    replay.limit(None)
    run.take(500)
    replay.advance()
    assert replay.peak_reserved_bytes == 500 * MIB


def test_the_cache_is_given_back_before_it_gives_up(run: Run) -> None:
    replay = Replay(run.trace, limit_bytes=80 * MIB)
    for number in [run.take(30), run.take(30)]:
        run.give_back(number)
    replay.advance()
    assert replay.num_alloc_retries == 0
    run.take(60)
    replay.advance()
    assert replay.num_alloc_retries == 1


def test_what_does_not_fit_surfaces(run: Run) -> None:
    replay = Replay(run.trace, limit_bytes=80 * MIB)
    run.take(60)
    run.take(30)
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 30\.00 MiB") as caught:
        replay.advance()
    assert caught.value.allocated_bytes == 60 * MIB
    assert caught.value.limit_bytes == 80 * MIB
    assert replay.peak_allocated_bytes == 60 * MIB


def test_settings_are_read_from_text(run: Run) -> None:
    run.take(1.5)
    plain = Replay(run.trace, limit_bytes=None)
    grown = Replay(run.trace, settings="expandable_segments:True", limit_bytes=None)
    for replay in (plain, grown):
        replay.advance()
    assert plain.peak_reserved_bytes == 20 * MIB
    assert plain.peak_allocated_bytes == grown.peak_allocated_bytes
    larger = Replay(run.trace, settings="large_segment_size_mb:32", limit_bytes=None)
    larger.advance()
    assert larger.peak_reserved_bytes == 32 * MIB


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_a_share_of_the_card_limits_as_well(share: float, run: Run) -> None:
    replay = Replay(
        run.trace,
        settings=f"per_process_memory_fraction:{share}",
        limit_bytes=90 * MIB,
        total_bytes=100 * MIB,
    )
    run.take(60)
    if share < 0.6:
        with pytest.raises(OutOfMemory):
            replay.advance()
    else:
        replay.advance()
    lifted = Replay(
        run.trace,
        settings=f"per_process_memory_fraction:{share}",
        limit_bytes=90 * MIB,
        total_bytes=100 * MIB,
    )
    lifted.limit(None)
    lifted.advance()
    assert lifted.peak_reserved_bytes == 60 * MIB


def test_a_wrong_setting_is_refused(run: Run) -> None:
    with pytest.raises(UnknownNameError, match="max_split_size"):
        Replay(run.trace, settings="max_split_size:30", limit_bytes=None)
    with pytest.raises(UsageError, match="expandable_segments"):
        Replay(run.trace, settings="expandable_segments:maybe", limit_bytes=None)
