"""Predictions for this very CPU, against probes on it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from trl_kit import plan_of, probe, write_jsonl

from autotune import objectives
from autotune.executors.subprocess import SubprocessExecutor
from autotune.probe.result import Outcome, Timeline
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.screen import Screening
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
    measured = [
        probe(executor, plan, tmp_path / f"probe-{number}", candidate, first_worst_steps=1)
        for number, candidate in enumerate(candidates)
    ]
    assert [result.outcome for result in measured] == [Outcome.OK, Outcome.OK]
    baseline = Trial(
        number=0,
        candidate=plan.space.baseline,
        changed={},
        changes=(),
        config={},
        coverage=1.0,
        outcome=Outcome.OK,
        # As if it took so long that all candidates may be predicted.
        results=(replace(measured[0], timeline=Timeline(total_s=3600.0)),),
        digest=plan.space.digest(plan.space.baseline),
    )
    screening = Screening(
        plan, RunFolder(tmp_path / "run"), (objectives.peak_memory(), objectives.tokens_per_s())
    )
    screening.run(executor, [baseline], None, None)
    assert screening.notices == ()
    card = cards.find(str(tmp_path / "run" / "work" / "stand-in.toml"))
    assert 100 << 20 < card.context_bytes < 1 << 30
    assert all(0.001 < rate < 100 and math.isfinite(rate) for rate in card.tflops.values())
    guesses = screening.guesses()
    assert len(guesses) == plan.space.size()
    by_candidate = {plan.space.digest(dict(item.candidate)): item for item in guesses}
    peaks, rates = [], []
    for candidate, result in zip(candidates, measured, strict=True):
        peak, rate = by_candidate[plan.space.digest(candidate)].values
        assert result.measurement is not None
        assert peak == pytest.approx(result.measurement.peak_bytes, rel=BOUND)
        peaks.append(peak or 0.0)
        rates.append(rate or 0.0)
    # Without checkpointing it takes more and is faster.
    assert 0 < peaks[0] < peaks[1]
    assert 0 < rates[0] < rates[1]
