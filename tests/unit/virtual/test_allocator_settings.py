"""What PYTORCH_ALLOC_CONF says, and how sizes are rounded by it."""

from __future__ import annotations

import re

import pytest
from allocator_kit import DEFAULT, KIB, MIB

from autotune.errors import UnknownNameError, UsageError
from autotune.virtual.allocator import AllocatorSettings


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
