"""Predictions for this very CPU, against probes on it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from trl_kit import plan_of, predicted_beside, write_jsonl

from autotune.executors.subprocess import SubprocessExecutor
from autotune.virtual import cards

pytestmark = pytest.mark.trl

BOUND = 0.2
"""What the predicted peak may differ by. A process on the CPU holds more than its tensors, such as
what oneDNN keeps of every product; that is not predicted, and the sampler corrects for it."""


def test_predicted_peaks_are_near_those_of_probes(
    executor: SubprocessExecutor, model: str, chats: list[dict], tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "chats.jsonl", chats)
    pins = {"adaptation": "full", "batching": "padded", "dtype": "float32", "max_length": 1024}
    plan = plan_of(
        executor, tmp_path / "run", model, data, space="demo", pins=pins, global_batch=4
    )
    candidates = (plan.space.baseline, {**plan.space.baseline, "checkpointing": "none"})
    screening, found = predicted_beside(
        executor, plan, tmp_path / "run", candidates, first_worst_steps=1
    )
    card = cards.find(str(tmp_path / "run" / "work" / "stand-in.toml"))
    assert 100 << 20 < card.context_bytes < 1 << 30
    assert all(0.001 < rate < 100 and math.isfinite(rate) for rate in card.tflops.values())
    assert len(screening.guesses()) == plan.space.size()
    peaks, rates = [], []
    for result, guess in found:
        peak, rate = guess.values
        assert result.measurement is not None
        assert peak == pytest.approx(result.measurement.peak_bytes, rel=BOUND)
        peaks.append(peak or 0.0)
        rates.append(rate or 0.0)
    # Without checkpointing it takes more and is faster.
    assert 0 < peaks[0] < peaks[1]
    assert 0 < rates[0] < rates[1]
