from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from autotune.errors import UnknownNameError, UsageError
from autotune.virtual import allocator, allocator_pool, allocator_settings, allocator_snapshot
from autotune.virtual.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from autotune.virtual.allocator_snapshot import replay_snapshot

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def make(conf: str = "", limit: int | None = None, **options) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.parse(conf), limit, **options)


def fill(allocator: CachingAllocator, *sizes: int, first: int = 1) -> list[int]:
    keys = list(range(first, first + len(sizes)))
    for key, size in zip(keys, sizes, strict=True):
        allocator.malloc(key, size)
    return keys


def layout(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    return [
        [(block.size_bytes, block.allocated) for block in segment.blocks]
        for segment in allocator.segments()
    ]


class TestSettings:
    def test_the_defaults_are_those_of_an_empty_value(self):
        assert AllocatorSettings.parse("") == DEFAULT
        assert AllocatorSettings.parse(" ") == DEFAULT

    def test_all_that_changes_memory_is_read(self):
        settings = AllocatorSettings.parse(
            "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb:64,"
            "garbage_collection_threshold:0.8,roundup_power2_divisions:4,"
            "large_segment_size_mb:40,per_process_memory_fraction:0.5,backend:native"
        )
        assert settings == AllocatorSettings(
            expandable_segments=True,
            max_split_size_bytes=128 * MIB,
            max_non_split_rounding_bytes=64 * MIB,
            garbage_collection_threshold=0.8,
            roundup_power2_divisions=(4,) * 16,
            large_segment_size_bytes=40 * MIB,
            per_process_memory_fraction=0.5,
        )

    def test_the_rounding_without_a_split_follows_the_segment_size(self):
        settings = AllocatorSettings.parse("large_segment_size_mb:40")
        assert settings.max_non_split_rounding_bytes == 40 * MIB

    @pytest.mark.parametrize(
        ("value", "expected"),
        # As PyTorch 2.13's own parser fills its table, read out of libc10.
        [
            ("[64:8,256:4,1024:4,>:1]", (8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1)),
            ("[256:1,512:2,1024:4,>:8]", (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8)),
            ("4", (4,) * 16),
            ("[1:2,>:0]", (2, *(0,) * 15)),
            ("[>:4]", (0, *(4,) * 15)),
            ("[131072:4]", (4,) * 16),
            ("[64:8,]", (8, 8, 8, 8, 8, 8, 8, *(0,) * 9)),
            ("[]", (0,) * 16),
        ],
    )
    def test_divisions_fill_the_intervals_as_pytorch_does(self, value, expected):
        settings = AllocatorSettings.parse(f"roundup_power2_divisions:{value}")
        assert settings.roundup_power2_divisions == expected

    @pytest.mark.parametrize(
        "key_value",
        [
            "pinned_use_background_threads:True",
            "pinned_num_register_threads:8",
            "pinned_use_cuda_host_register:False",
            "release_lock_on_cudamalloc:True",
            "graph_capture_record_stream_reuse:True",
            "throw_on_cudamalloc_oom:False",
            "expandable_segments:False,",
        ],
    )
    def test_what_does_not_change_device_memory_is_ignored(self, key_value):
        assert AllocatorSettings.parse(key_value) == DEFAULT

    def test_an_unknown_key_names_the_nearest(self):
        with pytest.raises(UnknownNameError, match="'max_split_size_mb'"):
            AllocatorSettings.parse("expandable_segments:True,max_splt_size_mb:128")

    @pytest.mark.parametrize(
        "text",
        [
            "expandable_segments:true",
            "expandable_segments",
            "expandable_segments:",
            "expandable_segments:[True]",
            "max_split_size_mb:19",
            "max_split_size_mb:30.5",
            "max_split_size_mb:-1",
            "large_segment_size_mb:10",
            "large_segment_size_mb:40,max_split_size_mb:30",
            "max_non_split_rounding_mb:19",
            "garbage_collection_threshold:1.0",
            "garbage_collection_threshold:0",
            "garbage_collection_threshold:nan",
            "per_process_memory_fraction:1.5",
            "roundup_power2_divisions:0",
            "roundup_power2_divisions:3",
            "roundup_power2_divisions:[3:2]",
            "roundup_power2_divisions:[64:3]",
            "roundup_power2_divisions:[64:8,256:4",
            "roundup_power2_divisions:[64]",
            "pinned_num_register_threads:many",
            "backend:mine",
        ],
    )
    def test_bad_values_are_refused_by_name(self, text):
        name = re.search(r"([a-z]\w*)(:[^:]*)?$", text.partition(":[")[0])[1]
        with pytest.raises(UsageError) as caught:
            AllocatorSettings.parse(text)
        assert name in str(caught.value)

    @pytest.mark.parametrize("text", ["backend:cudaMallocAsync", "throw_on_cudamalloc_oom:True"])
    def test_what_is_not_modelled_is_refused(self, text):
        with pytest.raises(UsageError, match="not supported"):
            AllocatorSettings.parse(text)

    def test_a_short_list_of_divisions_is_refused(self):
        with pytest.raises(ValueError, match="16"):
            AllocatorSettings(roundup_power2_divisions=(4,))


class TestRounding:
    @pytest.mark.parametrize(
        ("asked", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
    )
    def test_requests_are_whole_blocks(self, asked, block):
        assert DEFAULT.round_size(asked) == block

    def test_divisions_round_up_between_powers_of_two(self):
        # The example in PyTorch's documentation of roundup_power2_divisions.
        settings = AllocatorSettings.parse("roundup_power2_divisions:4")
        assert settings.round_size(1200 * KIB) == 1280 * KIB
        assert settings.round_size(1281 * KIB) == 1536 * KIB
        assert settings.round_size(1024 * KIB) == 1024 * KIB
        assert settings.round_size(1537 * KIB) == 1792 * KIB
        assert settings.round_size(1793 * KIB) == 2048 * KIB

    def test_small_requests_are_not_rounded_by_divisions(self):
        settings = AllocatorSettings.parse("roundup_power2_divisions:4")
        assert settings.round_size(2048) == 2048
        assert settings.round_size(1025) == 1536
        assert settings.round_size(2049) == 2560

    def test_each_size_has_its_interval(self):
        # test_allocator_settings of PyTorch's test_cuda.py allocates 84 and 400 MiB with this.
        settings = AllocatorSettings.parse(
            "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"
        )
        assert settings.round_size(84 * MIB) == 88 * MIB
        assert settings.round_size(400 * MIB) == 512 * MIB
        assert settings.round_size(300 * MIB) == 384 * MIB
        assert settings.round_size(1100 * MIB) == 1100 * MIB

    def test_segments_for_each_size_of_block(self):
        assert DEFAULT.segment_size(512) == 2 * MIB
        assert DEFAULT.segment_size(MIB) == 2 * MIB
        assert DEFAULT.segment_size(MIB + 512) == 20 * MIB
        assert DEFAULT.segment_size(10 * MIB - 512) == 20 * MIB
        assert DEFAULT.segment_size(10 * MIB) == 10 * MIB
        assert DEFAULT.segment_size(11 * MIB) == 12 * MIB
        assert DEFAULT.segment_size(21 * MIB + 512) == 22 * MIB
        assert (
            AllocatorSettings.parse("large_segment_size_mb:32").segment_size(2 * MIB) == 32 * MIB
        )


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


class TestSnapshot:
    @staticmethod
    def event(action: str, addr: int, size: int) -> dict[str, object]:
        return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": []}

    def freed(self, addr: int, size: int) -> list[dict[str, object]]:
        return [self.event("free_requested", addr, size), self.event("free_completed", addr, size)]

    def history(self) -> list[dict[str, object]]:
        base = 0x7F0000000000
        return [
            self.event("segment_alloc", base, 20 * MIB),
            self.event("alloc", base, 3 * MIB),
            self.event("alloc", base + 3 * MIB, 5 * MIB),
            self.event("segment_alloc", base + 20 * MIB, 50 * MIB),
            self.event("alloc", base + 20 * MIB, 50 * MIB - 100),
            *self.freed(base, 3 * MIB),
            self.event("alloc", base, 2 * MIB),
            *self.freed(base + 20 * MIB, 50 * MIB - 100),
            self.event("segment_free", base + 20 * MIB, 50 * MIB),
            {"action": "snapshot", "addr": 0, "size": 7 * MIB, "stream": 0},
            self.event("segment_alloc", base + 80 * MIB, 60 * MIB),
            self.event("alloc", base + 80 * MIB, 60 * MIB),
        ]

    def test_a_history_agrees(self):
        found = replay_snapshot(self.history())
        assert found.first_difference is None
        assert found.largest_difference_bytes == 0
        assert found.recorded_peak_reserved_bytes == 80 * MIB
        assert found.replayed_peak_reserved_bytes == 80 * MIB
        # 2 MiB in a block of 3: the rest of exactly a MiB is not split off.
        assert found.replayed_peak_allocated_bytes == 68 * MIB
        assert found.peak_requested_bytes == 67 * MIB
        assert (found.num_events, found.num_streams) == (7, 1)
        assert not found.out_of_memory

    def test_a_retry_is_the_replays_own_with_a_limit(self):
        events = [event for event in self.history() if event["action"] != "snapshot"]
        assert replay_snapshot(events, limit_bytes=100 * MIB).first_difference is None
        assert replay_snapshot(events, limit_bytes=70 * MIB).out_of_memory

    def test_a_difference_is_found(self):
        events = self.history()
        events[3]["size"] = 52 * MIB
        found = replay_snapshot(events)
        assert found.first_difference == 4
        assert found.largest_difference_bytes == -2 * MIB

    def test_blocks_from_before_are_counted(self):
        assert replay_snapshot(self.freed(1, 512)).num_unknown_frees == 1

    def test_mapped_pages_count(self):
        base = 0x300000000
        events = [
            self.event("segment_map", base, 40 * MIB),
            self.event("alloc", base, 30 * MIB),
            self.event("segment_map", base + 40 * MIB, 20 * MIB),
            self.event("alloc", base + 30 * MIB, 25 * MIB),
            *self.freed(base, 30 * MIB),
            self.event("segment_unmap", base, 20 * MIB),
        ]
        found = replay_snapshot(events, EXPANDABLE)
        assert found.first_difference is None
        assert found.recorded_peak_reserved_bytes == 60 * MIB


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
