"""What settings change: oversize blocks, garbage collection, expandable segments."""

from __future__ import annotations

import pytest
from allocator_kit import DEFAULT, EXPANDABLE, GIB, MIB, fill, layout, make

from autotune.virtual.allocator import CachingAllocator, OutOfMemory


class TestMaxSplitSize:
    def test_oversize_blocks_are_neither_split_nor_lent_to_smaller_requests(self):
        allocator = make("max_split_size_mb:50")
        allocator.malloc(1, 101 * MIB)
        assert layout(allocator) == [[(102 * MIB, True)]]
        allocator.free(1)
        allocator.malloc(2, 40 * MIB)
        assert layout(allocator) == [[(102 * MIB, False)], [(40 * MIB, True)]]

    def test_oversize_requests_take_blocks_within_the_rounding(self):
        allocator = make("max_split_size_mb:50")
        allocator.malloc(1, 100 * MIB)
        allocator.free(1)
        allocator.malloc(2, 80 * MIB)  # 20 MiB less: too much is lost
        assert allocator.reserved_bytes == 180 * MIB
        allocator.free(2)
        allocator.malloc(3, 80 * MIB + 512)
        assert layout(allocator) == [[(100 * MIB, True)], [(80 * MIB, False)]]
        assert allocator.allocated_bytes == 100 * MIB

    def test_the_rounding_can_be_set(self):
        allocator = make("max_split_size_mb:50,max_non_split_rounding_mb:40")
        allocator.malloc(1, 100 * MIB)
        allocator.free(1)
        allocator.malloc(2, 61 * MIB)
        assert layout(allocator) == [[(100 * MIB, True)]]

    def test_smaller_segments_are_split_as_ever(self):
        allocator = make("max_split_size_mb:50")
        allocator.malloc(1, 40 * MIB)
        allocator.free(1)
        allocator.malloc(2, 10 * MIB)
        assert layout(allocator) == [[(10 * MIB, True), (30 * MIB, False)]]

    def test_one_large_enough_block_is_given_back_before_the_whole_cache(self):
        allocator = make("max_split_size_mb:50", 300 * MIB)
        for key in fill(allocator, 60 * MIB, 100 * MIB, 130 * MIB):
            allocator.free(key)
        allocator.malloc(9, 40 * MIB)  # the smallest of at least 50 goes
        assert [sum(size for size, _ in blocks) // MIB for blocks in layout(allocator)] == [
            100,
            130,
            40,
        ]
        assert allocator.num_alloc_retries == 0

    def test_several_are_given_back_from_the_largest_on(self):
        allocator = make("max_split_size_mb:50", 300 * MIB)
        for key in fill(allocator, 60 * MIB, 100 * MIB, 130 * MIB):
            allocator.free(key)
        allocator.malloc(9, 200 * MIB)
        assert [sum(size for size, _ in blocks) // MIB for blocks in layout(allocator)] == [
            60,
            200,
        ]
        assert allocator.num_alloc_retries == 0


class TestGarbageCollection:
    def test_whole_free_segments_go_before_new_ones_come(self):
        allocator = make("garbage_collection_threshold:0.5", allowed_bytes=200 * MIB)
        a, _ = fill(allocator, 60 * MIB, 30 * MIB)
        allocator.free(a)
        allocator.malloc(10, 80 * MIB)  # 90 of 200 MiB: not yet
        assert allocator.reserved_bytes == 170 * MIB
        allocator.malloc(11, 70 * MIB)
        assert allocator.reserved_bytes == 180 * MIB
        assert allocator.num_alloc_retries == 0

    def test_blocks_unused_for_less_than_the_average_stay(self):
        allocator = make("garbage_collection_threshold:0.13", allowed_bytes=GIB)
        old, young, _ = fill(allocator, 100 * MIB, 102 * MIB, 2 * MIB)
        allocator.free(old)
        for _ in range(10):
            allocator.malloc(10, 3 * MIB)
            allocator.free(10)
        allocator.free(young)
        allocator.malloc(11, 200 * MIB)  # 222 MiB are 89 over 0.13 GiB
        assert [segment.total_bytes // MIB for segment in allocator.segments()] == [102, 20, 200]

    def test_without_enough_age_all_go(self):
        allocator = make("garbage_collection_threshold:0.1", allowed_bytes=GIB)
        for key in fill(allocator, 100 * MIB, 102 * MIB):
            allocator.free(key)
        allocator.malloc(11, 200 * MIB)
        assert allocator.reserved_bytes == 200 * MIB

    def test_it_needs_an_allowed_share(self):
        allocator = make("garbage_collection_threshold:0.5", 200 * MIB)
        allocator.malloc(1, 120 * MIB)
        allocator.free(1)
        allocator.malloc(2, 130 * MIB)
        assert allocator.num_alloc_retries == 1


class TestExpandableSegments:
    def test_pages_of_twenty_and_of_two_mib_are_mapped(self):
        allocator = CachingAllocator(EXPANDABLE)
        allocator.malloc(1, 11 * MIB)
        assert allocator.reserved_bytes == 20 * MIB
        assert layout(allocator) == [[(11 * MIB, True), (9 * MIB, False)]]
        allocator.malloc(2, 100)
        assert allocator.reserved_bytes == 22 * MIB
        assert all(segment.expandable for segment in allocator.segments())

    def test_the_page_follows_the_segment_size(self):
        allocator = make("expandable_segments:True,large_segment_size_mb:32")
        allocator.malloc(1, 33 * MIB)
        assert allocator.reserved_bytes == 64 * MIB

    def test_the_end_grows_by_what_it_lacks(self):
        allocator = CachingAllocator(EXPANDABLE)
        fill(allocator, 15 * MIB, 30 * MIB)
        assert allocator.reserved_bytes == 60 * MIB
        assert layout(allocator) == [[(15 * MIB, True), (30 * MIB, True), (15 * MIB, False)]]

    def test_large_blocks_are_split_to_the_last_block(self):
        allocator = CachingAllocator(EXPANDABLE)
        allocator.malloc(1, 20 * MIB - 512)
        assert layout(allocator) == [[(20 * MIB - 512, True), (512, False)]]
        assert allocator.allocated_bytes == 20 * MIB - 512

    def test_growing_sizes_leave_no_fragments_where_fixed_segments_do(self):
        reserved = []
        for settings in (DEFAULT, EXPANDABLE):
            allocator = CachingAllocator(settings)
            for size in (40, 44, 48, 52, 56):
                keys = fill(allocator, *[size * MIB] * 4)
                for key in keys:
                    allocator.free(key)
            reserved.append(allocator.reserved_bytes // MIB)
        assert reserved == [4 * (40 + 44 + 48 + 52 + 56), 240]

    def test_a_block_that_can_grow_is_used_last(self):
        allocator = CachingAllocator(EXPANDABLE)
        a, _ = fill(allocator, 12 * MIB, 20 * MIB)
        allocator.free(a)
        # Free: 12 MiB at the start, and 8 at the end, which the unmapped rest follows. 8 is the
        # best fit for 5, but it counts as large as it can grow.
        allocator.malloc(9, 5 * MIB)
        assert layout(allocator) == [
            [(5 * MIB, True), (7 * MIB, False), (20 * MIB, True), (8 * MIB, False)]
        ]

    def test_whole_free_pages_are_given_back(self):
        allocator = CachingAllocator(EXPANDABLE)
        a, b, _ = fill(allocator, 15 * MIB, 50 * MIB, 15 * MIB)
        allocator.free(b)
        allocator.empty_cache()
        # 15 to 65 MiB were free: the pages from 20 to 60 go.
        assert allocator.reserved_bytes == 40 * MIB
        assert layout(allocator) == [
            [(15 * MIB, True), (5 * MIB, False)],
            [(5 * MIB, False), (15 * MIB, True)],
        ]
        allocator.malloc(9, 45 * MIB)  # fills the gap again, from the lowest address
        assert allocator.reserved_bytes == 80 * MIB
        assert layout(allocator) == [
            [(15 * MIB, True), (45 * MIB, True), (5 * MIB, False), (15 * MIB, True)]
        ]
        allocator.free(a)
        assert allocator.inactive_split_bytes == 0

    def test_all_pages_can_be_given_back_and_mapped_again(self):
        allocator = CachingAllocator(EXPANDABLE)
        for key in fill(allocator, 100 * MIB, 3 * MIB, 77):
            allocator.free(key)
        allocator.empty_cache()
        assert allocator.reserved_bytes == 0
        assert allocator.segments() == []
        allocator.malloc(1, 30 * MIB)
        assert allocator.reserved_bytes == 40 * MIB

    def test_a_retry_unmaps_pages_of_the_other_pool(self):
        allocator = CachingAllocator(EXPANDABLE, 24 * MIB)
        for key in fill(allocator, *[MIB] * 6):
            allocator.free(key)
        allocator.malloc(9, 15 * MIB)
        assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (1, 20 * MIB)

    def test_pages_that_do_not_fit_are_out_of_memory(self):
        allocator = CachingAllocator(EXPANDABLE, 30 * MIB)
        allocator.malloc(1, 15 * MIB)
        with pytest.raises(OutOfMemory):
            allocator.malloc(2, 6 * MIB)  # would need a second page of 20
        assert allocator.reserved_bytes == 20 * MIB
        allocator.malloc(3, 5 * MIB)

    def test_oversize_blocks_still_grow_in_place(self):
        allocator = make("expandable_segments:True,max_split_size_mb:50")
        allocator.malloc(1, 100 * MIB)
        allocator.free(1)
        allocator.malloc(2, 10 * MIB)  # not lent, but the lowest address with room is the same
        assert allocator.reserved_bytes == 100 * MIB
