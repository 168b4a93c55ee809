"""Predictions for this very card, by what stands for it, against probes on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune import objectives
from autotune.executors.subprocess import SubprocessExecutor
from autotune.probe.result import Outcome, Timeline
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.screen import Screening

pytestmark = pytest.mark.gpu

BOUND = 0.1
"""Allocated bytes are predicted to about 1 %; what the context takes differs by driver."""


def test_predicted_peaks_are_those_of_probes(
    executor: SubprocessExecutor, made: dict[str, str], device: str, tmp_path: Path
) -> None:
    from trl_kit import plan_of, probe

    asked = {"device": device, "global_batch": 4, "measured_steps": 3, "space": "demo"}
    pins = {"adaptation": "full", "batching": "padded", "max_length": 1024}
    plan = plan_of(executor, tmp_path / "run", made["model"], made["dataset"], pins=pins, **asked)
    candidates = (plan.space.baseline, {**plan.space.baseline, "checkpointing": "none"})
    measured = [
        probe(executor, plan, tmp_path / f"probe-{number}", candidate, timeout_s=170.0)
        for number, candidate in enumerate(candidates)
    ]
    assert [result.outcome for result in measured] == [Outcome.OK, Outcome.OK]
    baseline = Trial(
        number=0,
        candidate=plan.space.baseline,
        config={},
        outcome=Outcome.OK,
        # As if it took so long that all candidates may be predicted.
        results=(replace(measured[0], timeline=Timeline(total_s=3600.0)),),
        digest=plan.space.digest(plan.space.baseline),
    )
    run = RunFolder(tmp_path / "run")
    screening = Screening(plan, run, (objectives.peak_memory(), objectives.tokens_per_s()))
    screening.run(executor, [baseline], None, None)
    assert screening.notices == ()
    known = {plan.space.digest(dict(item.candidate)): item for item in screening.guesses()}
    for candidate, result in zip(candidates, measured, strict=True):
        assert result.measurement is not None
        peak, rate = known[plan.space.digest(candidate)].values
        assert peak == pytest.approx(result.measurement.peak_bytes, rel=BOUND)
        assert rate
