"""Fixed segments, limits, and the numbers that PyTorch publishes for both kinds of segment."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
from allocator_kit import DEFAULT, EXPANDABLE, GIB, KIB, MIB, fill, layout, make

from autotune.virtual import allocator, allocator_pool, allocator_settings, allocator_snapshot
from autotune.virtual.allocator import CachingAllocator, OutOfMemory


class TestFixedSegments:
    def test_small_requests_share_a_segment(self):
        allocator = make()
        fill(allocator, 100, 600, MIB)
        assert layout(allocator) == [
            [(512, True), (1024, True), (MIB, True), (MIB - 1536, False)],
        ]
        assert allocator.allocated_bytes == MIB + 1536
        assert allocator.requested_bytes == MIB + 700
        assert allocator.reserved_bytes == 2 * MIB

    def test_a_small_segment_is_split_to_the_last_block(self):
        allocator = make()
        fill(allocator, MIB, MIB - 512, 512)
        assert layout(allocator) == [[(MIB, True), (MIB - 512, True), (512, True)]]

    def test_requests_of_one_to_ten_mib_share_twenty(self):
        allocator = make()
        fill(allocator, MIB + 1, 9 * MIB, 8 * MIB)
        assert layout(allocator) == [
            [
                (MIB + 512, True),
                (9 * MIB, True),
                (8 * MIB, True),
                (2 * MIB - 512, False),
            ]
        ]

    def test_a_large_rest_of_a_mib_is_not_split_off(self):
        allocator = make()
        fill(allocator, 9 * MIB, 10 * MIB - 512)
        # 1 MiB and 512 bytes would remain: split. Of 11 MiB in 12, 1 MiB would: not split.
        assert layout(allocator)[0][1:] == [(10 * MIB - 512, True), (MIB + 512, False)]
        allocator.malloc(9, 11 * MIB)
        assert layout(allocator)[1] == [(12 * MIB, True)]
        assert allocator.allocated_bytes == 9 * MIB + 10 * MIB - 512 + 12 * MIB
        assert allocator.requested_bytes == 9 * MIB + 10 * MIB - 512 + 11 * MIB

    def test_large_requests_get_segments_rounded_to_two_mib(self):
        allocator = make()
        fill(allocator, 10 * MIB, 100 * MIB + 1)
        assert layout(allocator) == [
            [(10 * MIB, True)],
            [(100 * MIB + 512, True), (2 * MIB - 512, False)],
        ]
        assert allocator.reserved_bytes == 112 * MIB

    def test_zero_bytes_are_no_block(self):
        allocator = make()
        allocator.malloc(1, 0)
        assert allocator.reserved_bytes == 0
        allocator.free(1)

    def test_keys_are_checked(self):
        allocator = make()
        allocator.malloc(1, 1)
        with pytest.raises(ValueError, match="in use"):
            allocator.malloc(1, 1)
        with pytest.raises(KeyError):
            allocator.free(2)

    def test_neighbours_merge_on_both_sides(self):
        allocator = make()
        a, b, c, _ = fill(allocator, 4 * MIB, 4 * MIB, 4 * MIB, 8 * MIB)
        allocator.free(a)
        allocator.free(c)
        assert layout(allocator) == [
            [(4 * MIB, False), (4 * MIB, True), (4 * MIB, False), (8 * MIB, True)]
        ]
        allocator.free(b)
        assert layout(allocator) == [[(12 * MIB, False), (8 * MIB, True)]]

    def test_segments_never_merge(self):
        allocator = make()
        for key in fill(allocator, 20 * MIB, 20 * MIB):
            allocator.free(key)
        allocator.malloc(9, 40 * MIB)
        assert allocator.reserved_bytes == 80 * MIB

    def test_the_smallest_block_that_fits_is_used(self):
        allocator = make()
        keys = fill(allocator, 60 * MIB, 30 * MIB, 40 * MIB)
        for key in keys:
            allocator.free(key)
        allocator.malloc(9, 32 * MIB)
        assert layout(allocator) == [
            [(60 * MIB, False)],
            [(30 * MIB, False)],
            [(32 * MIB, True), (8 * MIB, False)],
        ]

    def test_of_two_blocks_of_one_size_the_lower_is_used(self):
        allocator = make()
        a, b = fill(allocator, 30 * MIB, 30 * MIB)
        allocator.free(b)
        allocator.free(a)
        allocator.malloc(9, 30 * MIB)
        assert layout(allocator) == [[(30 * MIB, True)], [(30 * MIB, False)]]

    def test_pools_do_not_lend_to_each_other(self):
        allocator = make()
        allocator.malloc(1, 20 * MIB)
        allocator.free(1)
        allocator.malloc(2, MIB)
        assert allocator.reserved_bytes == 22 * MIB

    def test_peaks_are_kept_and_start_anew(self):
        allocator = make()
        allocator.malloc(1, 30 * MIB)
        allocator.free(1)
        allocator.empty_cache()
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
        assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 30 * MIB
        allocator.reset_peaks()
        assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 0

    def test_a_segment_partly_in_use_cannot_be_given_back(self):
        allocator = make()
        a, b = fill(allocator, 4 * MIB, 4 * MIB)
        allocator.free(a)
        allocator.empty_cache()
        assert allocator.reserved_bytes == 20 * MIB
        assert allocator.inactive_split_bytes == 16 * MIB
        assert allocator.fragmentation_ratio == pytest.approx(0.8)
        allocator.free(b)
        assert allocator.inactive_split_bytes == 0
        allocator.empty_cache()
        assert allocator.reserved_bytes == 0
        assert allocator.fragmentation_ratio == 0


class TestLimit:
    def test_a_retry_gives_cached_segments_back(self):
        allocator = make(limit=100 * MIB)
        a, _ = fill(allocator, 60 * MIB, 20 * MIB)
        allocator.free(a)
        allocator.malloc(9, 80 * MIB)
        assert allocator.num_alloc_retries == 1
        assert allocator.reserved_bytes == 100 * MIB
        assert allocator.num_ooms == 0

    def test_fragments_lead_to_out_of_memory(self):
        allocator = make(limit=60 * MIB)
        keys = fill(allocator, *[20 * MIB] * 3)
        allocator.free(keys[0])
        fill(allocator, 2 * MIB, first=10)  # in the first segment, which it now holds
        with pytest.raises(OutOfMemory) as caught:
            allocator.malloc(9, 19 * MIB - 3)
        error = caught.value
        assert error.requested_bytes == 19 * MIB - 3
        assert error.allocated_bytes == 42 * MIB
        assert error.reserved_bytes == 60 * MIB
        assert error.limit_bytes == 60 * MIB
        assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 1)
        allocator.free(keys[1])
        allocator.malloc(9, 19 * MIB)

    def test_the_message_is_pytorchs(self):
        allocator = make(limit=8 * GIB)
        fill(allocator, 6 * GIB - 2 * MIB, 512)
        with pytest.raises(OutOfMemory) as caught:
            allocator.malloc(9, 3 * GIB)
        assert str(caught.value) == (
            "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of"
            " 8.00 GiB of which 2.00 GiB is free. Of the allocated memory 6.00 GiB is allocated"
            " by PyTorch, and 2.00 MiB is reserved by PyTorch but unallocated."
        )
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value)

    def test_the_exact_limit_still_fits(self):
        allocator = make(limit=22 * MIB)
        fill(allocator, 20 * MIB, 1)
        with pytest.raises(OutOfMemory):
            allocator.malloc(9, 1100 * KIB)

    def test_an_allowed_share_counts_whole_segments(self):
        allocator = make(allowed_bytes=30 * MIB)
        fill(allocator, 20 * MIB)
        with pytest.raises(OutOfMemory) as caught:
            allocator.malloc(9, 2 * MIB)
        assert caught.value.segment_bytes == 20 * MIB
        assert caught.value.limit_bytes == 30 * MIB


class TestPublished:
    """Numbers that PyTorch's test_cuda.py expects of real cards.

    test_graph_memory_stats_and_use_result_after_destroy_graph runs ``b = a.clone()`` and five
    times ``b = b.clone() + 1`` in a pool of its own.
    """

    ODD_SEGMENT = 12 * MIB
    CASES = (
        # bytes, segments, reserved, reserved at the end; expandable: reserved, at the end
        (512, 1, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB),
        (MIB, 2, 4 * MIB, 2 * MIB, 4 * MIB, 2 * MIB),
        (MIB + 512, 1, 20 * MIB, 20 * MIB, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 2, 40 * MIB, 20 * MIB, 40 * MIB, 40 * MIB),
        (10 * MIB + 512, 3, 3 * ODD_SEGMENT, ODD_SEGMENT, 40 * MIB, 20 * MIB),
    )

    @staticmethod
    def run(allocator: CachingAllocator, nbytes: int) -> None:
        allocator.malloc(0, nbytes)
        for step in range(5):
            fill(allocator, nbytes, nbytes, first=2 * step + 1)
            allocator.free(2 * step + 1)
            allocator.free(2 * step)

    @pytest.mark.parametrize("case", CASES)
    def test_fixed_segments(self, case):
        nbytes, segments, reserved, at_end, _, _ = case
        allocator = CachingAllocator(DEFAULT)
        self.run(allocator, nbytes)
        assert len(allocator.segments()) == segments
        assert allocator.reserved_bytes == reserved
        assert allocator.requested_bytes == nbytes
        allocator.empty_cache()
        assert (len(allocator.segments()), allocator.reserved_bytes) == (1, at_end)

    @pytest.mark.parametrize("case", CASES)
    def test_expandable_segments(self, case):
        nbytes, _, _, _, reserved, at_end = case
        allocator = CachingAllocator(EXPANDABLE)
        self.run(allocator, nbytes)
        assert allocator.reserved_bytes == reserved
        allocator.empty_cache()
        assert allocator.reserved_bytes == at_end
        assert allocator.allocated_bytes == nbytes


@pytest.mark.parametrize(
    "module", [allocator, allocator_pool, allocator_settings, allocator_snapshot]
)
def test_torch_is_not_imported(module):
    names = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    assert not any(name.split(".")[0] == "torch" for name in names)


def test_memory_beside_the_pools_comes_from_the_driver_and_goes_back() -> None:
    allocator = make(limit=100 * MIB)
    allocator.malloc(1, 40 * MIB)
    allocator.free(1)
    assert allocator.reserved_bytes == 40 * MIB
    # The cache is in the way, and is given back; a page is 2 MiB.
    allocator.take_beside(2, 79 * MIB)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 80 * MIB
    with pytest.raises(OutOfMemory):
        allocator.take_beside(3, 22 * MIB)
    allocator.free(2)
    assert allocator.reserved_bytes == allocator.allocated_bytes == allocator.requested_bytes == 0
    assert allocator.peak_allocated_bytes == allocator.peak_reserved_bytes == 80 * MIB
