"""What a reader of a predicted peak is told beside its make-up."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.probe import peaks
from autotune.probe.result import Measurement, MemoryPeak
from autotune.units import GIB


def measured(**phases: tuple[int, int]) -> Measurement:
    """Return a prediction with so many GiB allocated and reserved per phase."""
    found = {
        name: MemoryPeak(
            allocated_bytes=allocated * GIB,
            reserved_bytes=reserved * GIB,
            used_bytes=(reserved + 1) * GIB,
        )
        for name, (allocated, reserved) in phases.items()
    }
    return Measurement(
        source="predicted", device_kind="virtual", accumulation_steps=1, steps=(), phases=found
    )


def test_a_verdict_decided_in_another_phase_is_explained() -> None:
    note = peaks.note_on_decision(measured(later_steps=(20, 21), eval=(18, 25)), 23 * GIB)
    assert "peak of allocated memory, 20.00 GiB in the later steps" in note
    assert "in eval: 25.00 GiB reserved there, for at most 18.00 GiB allocated" in note
    assert "fragmentation" in note


def test_fragmentation_in_the_same_phase_is_explained() -> None:
    assert peaks.note_on_decision(measured(later_steps=(20, 25)), 23 * GIB)
    assert not peaks.note_on_decision(measured(later_steps=(24, 25)), 23 * GIB)


@pytest.mark.parametrize(
    ("config", "largest", "found"),
    [
        ({"packing": True}, [("bitwise_and", "model", 4)], 4),
        ({"padding_free": True}, [("where", "model.layers.*.self_attn", 2)], 2),
        ({"padding_free": True}, [("where", "model.layers.*.mlp", 2)], 0),
        ({"packing": True}, [("mm", "", 5)] * 3 + [("bitwise_and", "model", 4)], 0),
        ({"packing": True}, [("mm", "", 9), ("bitwise_and", "model", 0.5)], 0),
        ({"packing": True, "attn_implementation": "eager"}, [("bitwise_and", "model", 4)], 0),
        ({}, [("bitwise_and", "model", 4)], 0),
    ],
)
def test_a_mask_counts_only_among_the_largest(
    config: dict[str, Any], largest: list[tuple[str, str, float]], found: int
) -> None:
    groups = [{"op": op, "module": name, "bytes": size * GIB} for op, name, size in largest]
    makeup = {"largest": groups, "peak_bytes": 10 * GIB}
    assert peaks.mask_bytes(config, makeup) == found * GIB
    assert peaks.mask_bytes(config, None) == 0
