"""Predictions for this very card, by what stands for it, against probes on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.executors.subprocess import SubprocessExecutor

pytestmark = pytest.mark.gpu

BOUND = 0.1
"""Allocated bytes are predicted to about 1 %; what the context takes differs by driver."""


def test_predicted_peaks_are_those_of_probes(
    executor: SubprocessExecutor, made: dict[str, str], device: str, tmp_path: Path
) -> None:
    from trl_kit import plan_of, predicted_beside

    asked = {"device": device, "global_batch": 4, "measured_steps": 3, "space": "demo"}
    pins = {"adaptation": "full", "batching": "padded", "max_length": 1024}
    run = tmp_path / "run"
    plan = plan_of(executor, run, made["model"], made["dataset"], pins=pins, **asked)
    candidates = (plan.space.baseline, {**plan.space.baseline, "checkpointing": "none"})
    _, found = predicted_beside(executor, plan, run, candidates, timeout_s=170.0)
    for result, guess in found:
        assert result.measurement is not None
        peak, rate = guess.values
        assert peak == pytest.approx(result.measurement.peak_bytes, rel=BOUND)
        assert rate
