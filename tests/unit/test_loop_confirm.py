"""The front is probed again at the end of a search."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_kit import GIB, ROOMY

from autotune import loop as loop_module
from autotune.probe.result import Outcome
from autotune.runfolder import RunFolder
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_fake_plan, make_loop
from autotune.tuner import load_trials

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def test_finalists_are_confirmed_one_at_a_time(tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY, slots=3)
    loop = make_loop(tmp_path, executor)
    loop.run(20, None)
    before = len(executor.submitted)
    loop.confirm(None)
    again = executor.submitted[before:]
    assert again
    assert all(spec.probe_id.endswith("-again") for spec in again)
    assert not loop._running
    finalists = loop.finalists()
    assert finalists
    assert all(trial.confirmed and trial.num_probes == 2 for trial in finalists)
    recorded = {trial.number: trial for trial in load_trials(RunFolder(tmp_path))}
    assert all(recorded[trial.number] == trial for trial in loop.trials)
    # A second call has nothing to do.
    loop.confirm(None)
    assert len(executor.submitted) == before + len(again)


@pytest.mark.parametrize("outcome", [Outcome.DEVICE_OOM, Outcome.TIMEOUT])
def test_a_confirmation_that_fails_makes_the_trial_infeasible(
    outcome: Outcome, tmp_path: Path
) -> None:
    executor = FakeExecutor(
        wall=ROOMY, fault=lambda spec: outcome if spec.probe_id.endswith("again") else None
    )
    loop = make_loop(tmp_path, executor)
    loop.run(10, None)
    first = {trial.number for trial in loop.finalists()}
    loop.confirm(None)
    for trial in loop.trials:
        if trial.number in first:
            assert trial.outcome is outcome
            assert not trial.feasible
            assert trial.measurements  # kept, but overruled
    assert first.isdisjoint(trial.number for trial in loop.finalists())


def test_a_confirmation_that_says_nothing_changes_nothing(tmp_path: Path) -> None:
    executor = FakeExecutor(
        wall=ROOMY, fault=lambda spec: Outcome.LOST if "again" in spec.probe_id else None
    )
    loop = make_loop(tmp_path, executor)
    loop.run(6, None)
    first = [trial.number for trial in loop.finalists()]
    loop.confirm(None)
    assert [trial.number for trial in loop.finalists()] == first
    assert all(trial.outcome is Outcome.OK for trial in loop.finalists())
    assert not any(trial.confirmed for trial in loop.finalists())
    folders = [spec.folder for spec in executor.submitted]
    assert len(folders) == len(set(folders))


def test_a_peak_that_grows_over_the_budget_makes_the_trial_infeasible(tmp_path: Path) -> None:
    plan = make_fake_plan(tmp_path, memory_budget_bytes=6 * GIB)
    loop = make_loop(tmp_path, FakeExecutor(wall=ROOMY), plan=plan)
    loop.run(6, None)
    trial = loop.finalists()[-1]
    result = trial.results[0]
    assert result.measurement is not None
    import dataclasses

    peak = dataclasses.replace(result.measurement.phases["later_steps"], resident_bytes=7 * GIB)
    grown = dataclasses.replace(
        result,
        measurement=dataclasses.replace(
            result.measurement, phases={**result.measurement.phases, "later_steps": peak}
        ),
    )
    confirmed = loop.with_result(trial, grown)
    assert confirmed.outcome is Outcome.OK
    assert confirmed.violations["memory_budget"] > 0
    assert not confirmed.feasible


def test_at_most_eight_spread_over_the_front_are_confirmed(tmp_path: Path) -> None:
    executor = FakeExecutor(wall=MemoryWall(capacity_bytes=10**14, noise_ratio=0.0))
    plan = make_fake_plan(tmp_path, space="sft", pins={"adaptation": "full"})
    loop = make_loop(tmp_path, executor, plan=plan, sampler="random")
    loop.run(60, None)
    finalists = loop.finalists()
    assert len(finalists) <= loop_module.MAX_FINALISTS
    from autotune.report.pareto import pareto_set

    members = pareto_set(loop.trials, loop._objectives)
    assert {finalists[0].number, finalists[-1].number} <= {item.number for item in members}
    assert finalists[0].peak_bytes == min(item.peak_bytes for item in members)
    assert finalists[-1].peak_bytes == max(item.peak_bytes for item in members)
