"""Predictions multiplied by what a run's own trials say of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "report"))
from report_factory import make_measurement

from autotune import standin


def test_peaks_and_times_are_multiplied_and_rates_divided() -> None:
    before = make_measurement(peak_gib=4.0)
    after = standin.corrected(before, memory_ratio=1.5, time_ratio=2.0)
    assert after.peak_bytes == pytest.approx(1.5 * before.peak_bytes)
    assert after.tokens_per_s.median == pytest.approx(before.tokens_per_s.median / 2.0)
    assert after.phases.keys() == before.phases.keys()


def test_what_is_not_known_stays_unknown() -> None:
    after = standin.corrected(make_measurement(), memory_ratio=1.5, time_ratio=2.0)
    assert {peak.allocated_bytes for peak in after.phases.values()} == {None}
