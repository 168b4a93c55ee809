"""A recorded history is replayed, and where the two part is told."""

from __future__ import annotations

from allocator_kit import EXPANDABLE, MIB

from autotune.virtual.allocator_snapshot import replay_snapshot


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
