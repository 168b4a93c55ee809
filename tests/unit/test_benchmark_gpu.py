"""What the benchmark of predictions against a card says of given sides; no card, no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "report"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import gpu_comparison as comparison
from report_factory import make_measurement, make_result

from autotune.probe.result import MemoryPeak, Outcome
from autotune.space.knob import registry
from autotune.units import GIB, MIB
from autotune.virtual import cards

H200 = {
    "name": "NVIDIA H200",
    "total_bytes": cards.find("h200-sxm-141gb").memory_bytes,
    "capability": [9, 0],
    "multiprocessors": 132,
    "vendor": "nvidia",
}


def side(gib: float = 4.0, rate: float = 1000.0, **changes: Any) -> dict[str, Any]:
    phases = {
        "load": MemoryPeak(allocated_bytes=GIB, reserved_bytes=GIB, used_bytes=2 * GIB),
        "later_steps": MemoryPeak(
            allocated_bytes=round(gib * GIB),
            reserved_bytes=round((gib + 1) * GIB),
            used_bytes=round((gib + 2) * GIB),
        ),
    }
    measurement = make_measurement([rate] * 3, phases=phases, **changes)
    return comparison.side(make_result(measurement), hidden={})


def failed(outcome: Outcome = Outcome.DEVICE_OOM, **changes: Any) -> dict[str, Any]:
    result = make_result(outcome=outcome, detail="in /some/run/probes: no memory", **changes)
    return comparison.side(result, hidden={"/some/run": "FOLDER"})


def row(name: str, measured: Any, predicted: Any, **more: Any) -> dict[str, Any]:
    found = {"name": name, "measured": measured, "predicted": predicted, **more}
    return comparison.with_errors(found)


class TestConfigurations:
    def test_there_are_twenty_with_names_of_their_own(self) -> None:
        assert len({item.name for item in comparison.CONFIGURATIONS}) == 20
        assert len({str((i.knobs, i.budget_gib)) for i in comparison.CONFIGURATIONS}) == 20
        assert sum(item.snapshot for item in comparison.CONFIGURATIONS) == 2

    def test_they_name_knobs(self) -> None:
        known = {name for name, _ in registry}
        assert all(set(item.knobs) <= known for item in comparison.CONFIGURATIONS)

    def test_they_cover_what_is_claimed(self) -> None:
        values: dict[str, set[Any]] = {}
        for item in comparison.CONFIGURATIONS:
            for name, value in item.knobs.items():
                values.setdefault(name, set()).add(value)
        assert values["adaptation"] >= {"full", "lora", "lora_4bit"}
        assert values["batching"] == {"padded", "bfd", "padding_free"}
        assert values["checkpointing"] >= {"none", "full", "selective", "every_2_layers"}
        assert values["attn_implementation"] >= {"sdpa", "eager"}
        assert values["max_length"] == {comparison.SHORT, comparison.LONG}
        assert values["allocator"] == {"default", "expandable_segments"}
        assert "adamw_8bit" in values["optim"]
        assert "on" in values["activation_offloading"]

    def test_some_can_be_chosen(self) -> None:
        chosen = comparison.choose(["full-none", "full-fp32"])
        assert [item.name for item in chosen] == ["full-fp32", "full-none"]
        assert comparison.choose([]) == comparison.CONFIGURATIONS
        with pytest.raises(ValueError, match="no configuration is called 'x'; known: full-fp32"):
            comparison.choose(["x"])

    def test_a_budget_is_in_bytes(self) -> None:
        (item,) = comparison.choose(["full-fp32-in-8gib"])
        assert item.budget_bytes == 8 * GIB


class TestCards:
    def test_a_card_of_the_catalogue_is_found_by_name(self, tmp_path: Path) -> None:
        device, how = comparison.predicted_device(H200, tmp_path)
        assert device == "virtual:h200-sxm-141gb"
        assert "by name" in how
        assert list(tmp_path.iterdir()) == []

    def test_another_driver_s_memory_counts(self, tmp_path: Path) -> None:
        facts = {**H200, "total_bytes": round(0.98 * H200["total_bytes"])}
        device, how = comparison.predicted_device(facts, tmp_path)
        card = cards.find(device.partition(":")[2])
        assert card.memory_bytes == facts["total_bytes"]
        assert card.tflops == cards.find("h200-sxm-141gb").tflops
        assert how.startswith("h200-sxm-141gb with the memory")

    def test_of_two_of_one_name_the_memory_tells(self, tmp_path: Path) -> None:
        facts = {**H200, "name": "NVIDIA A100-SXM4-80GB"}
        facts["total_bytes"] = cards.find("a100-80gb").memory_bytes + MIB
        assert comparison.predicted_device(facts, tmp_path)[0] == "virtual:a100-80gb"

    def test_an_unknown_card_is_made_from_the_nearest(self, tmp_path: Path) -> None:
        facts = {
            "name": 'NVIDIA "L4" mini',
            "total_bytes": 16 * GIB,
            "capability": [8, 9],
            "multiprocessors": 40,
            "vendor": "nvidia",
        }
        device, how = comparison.predicted_device(facts, tmp_path)
        card = cards.find(device.partition(":")[2])
        assert (card.name, card.memory_bytes) == (facts["name"], 16 * GIB)
        assert (card.capability, card.multiprocessors) == ((8, 9), 40)
        assert card.driver_memory_mib == 16 * 1024
        assert "capability and multiprocessors" in how

    def test_amd_s_are_not_taken_for_nvidia_s(self) -> None:
        facts = {**H200, "capability": [9, 4], "vendor": "amd"}
        assert comparison.nearest_card(facts).vendor == "amd"


class TestSides:
    def test_a_finished_probe_tells_peaks_and_rate(self) -> None:
        found = side(4.0, 500.0)
        assert found["outcome"] == "ok"
        assert (found["allocated_bytes"], found["used_bytes"]) == (4 * GIB, 6 * GIB)
        assert found["phases_bytes"]["load"]["reserved"] == GIB
        assert found["tokens_per_s"]["median"] == pytest.approx(500.0)
        assert len(found["steps"]) == 3
        assert comparison.figure(found, "rate") == pytest.approx(500.0)

    def test_a_failed_one_tells_why_without_paths(self) -> None:
        found = failed()
        assert found["outcome"] == "device_oom"
        assert found["detail"] == "in FOLDER/probes: no memory"
        assert "traceback" not in found
        assert comparison.figure(found, "allocated") is None
        assert comparison.figure(found, "rate") is None
        crashed = failed(Outcome.CRASHED, traceback='File "/some/run/a.py"')
        assert crashed["traceback"] == 'File "FOLDER/a.py"'


class TestErrors:
    def test_they_are_in_percent_of_what_was_measured(self) -> None:
        found = row("a", side(4.0, 1000.0), side(3.0, 1250.0))
        expected = {"allocated": -25.0, "reserved": -20.0, "used": -16.667, "rate": 25.0}
        assert found["errors_pct"] == pytest.approx(expected, abs=1e-3)
        assert found["outcomes_agree"] is True

    def test_phases_are_those_of_the_same_steps(self) -> None:
        found = row("a", side(4.0), side(9.0), predicted_same_steps=side(5.0))
        assert found["phase_errors_pct"]["load"]["allocated"] == 0
        assert found["phase_errors_pct"]["later_steps"]["allocated"] == 25.0
        assert found["same_steps_errors_pct"]["allocated"] == 25.0

    def test_what_is_missing_has_none(self) -> None:
        found = row("a", failed(), side())
        assert set(found["errors_pct"].values()) == {None}
        assert found["outcomes_agree"] is False
        assert row("a", None, None)["outcomes_agree"] is None
        assert comparison.error_pct(1.0, 0.0) is None


class TestTotals:
    def test_they_count_and_take_absolute_errors(self) -> None:
        rows = [
            row("a", side(4.0, 1000.0), side(4.4, 900.0)),
            row("b", side(4.0, 2000.0), side(3.0, 2000.0)),
            row("c", side(4.0, 3000.0), side(4.0, 3300.0)),
            row("d", failed(), side()),
            row("e", side(), failed()),
            row("f", None, None, skipped="no flash-attn"),
        ]
        snapshots = [{"reserved_error_pct": -0.5}, {"skipped": "no time"}]
        found = comparison.totals(rows, snapshots)
        assert found["num_configurations"] == 6
        assert (found["num_measured"], found["num_skipped"], found["num_compared"]) == (5, 1, 3)
        assert (found["num_false_fits"], found["num_false_ooms"]) == (1, 1)
        assert found["num_outcomes_agree"] == 3
        assert found["allocated_max_abs_error_pct"] == pytest.approx(25.0)
        assert found["allocated_median_abs_error_pct"] == pytest.approx(10.0)
        assert found["rate_max_abs_error_pct"] == pytest.approx(10.0)
        assert found["rate_rank_correlation"] == 1.0
        assert (found["num_snapshots"], found["snapshot_reserved_max_abs_error_pct"]) == (1, 0.5)

    def test_nothing_is_made_up_where_there_is_nothing(self) -> None:
        found = comparison.totals([row("f", None, None, skipped="no time")])
        assert found["allocated_max_abs_error_pct"] is None
        assert found["rate_rank_correlation"] is None
        assert found["snapshot_reserved_max_abs_error_pct"] is None

    @pytest.mark.parametrize(
        ("pairs", "expected"),
        [
            ([], None),
            ([(1.0, 1.0)], None),
            ([(1.0, 1.0), (1.0, 2.0)], None),
            ([(1.0, 10.0), (2.0, 20.0), (3.0, 15.0)], 0.5),
            ([(3.0, 1.0), (2.0, 2.0), (1.0, 3.0)], -1.0),
        ],
    )
    def test_the_correlation_is_that_of_ranks(self, pairs: Any, expected: float | None) -> None:
        assert comparison.rank_correlation(pairs) == expected

    def test_equal_values_share_a_rank(self) -> None:
        assert comparison.ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]

    def test_the_context_is_what_the_allocator_does_not_hold(self) -> None:
        rows = [row("a", side(), None), row("b", failed(), None)]
        assert comparison.measured_context_bytes(rows) == GIB
        assert comparison.measured_context_bytes([]) is None


def test_the_table_shows_both_sides() -> None:
    rows = [
        row("good", side(4.0, 1000.0), side(4.4, 900.0)),
        row("too-large", failed(), side()),
        row("no-flash", None, None, skipped="no flash-attn"),
        row("late", side(), None),
    ]
    lines = comparison.table(rows).splitlines()
    assert lines[2].split() == [
        *("good", "4.000", "4.400", "+10.0", "5.000", "5.400", "+8.0", "1,000", "900", "-10.0"),
    ]
    assert lines[3] == "too-large  measured device_oom, predicted ok"
    assert lines[4] == "no-flash   skipped: no flash-attn"
    assert lines[5] == "late       measured ok, predicted not run"
    assert len({len(line) for line in (lines[1], lines[2])}) == 1
