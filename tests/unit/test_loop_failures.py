"""Probes that fail in the loop of a search: repeated, told, or the end of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_kit import ROOMY, told
from optuna.trial import TrialState

from autotune.errors import AutotuneError, BaselineError, ExecutorError
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_loop
from autotune.tuner import load_trials

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def fault_at(endings: dict[int, Any]) -> Callable[[ProbeSpec], Any]:
    """Return a fault for the probes whose number in the order of submission is a key."""
    count = iter(range(10**9))
    return lambda spec: endings.get(next(count))


def fault_of(outcomes: dict[str, Any]) -> Callable[[ProbeSpec], Any]:
    """Return a fault by the probe's name."""
    return lambda spec: outcomes.get(spec.probe_id)


def test_a_crash_is_repeated_once_and_only_the_last_outcome_told(tmp_path: Path) -> None:
    fault = fault_of({"0001": Outcome.CRASHED})
    executor = FakeExecutor(wall=MemoryWall(capacity_bytes=10**14), fault=fault)
    loop = make_loop(tmp_path, executor)
    loop.run(2, None)
    trial = loop.trials[1]
    assert [item.outcome for item in trial.results] == [Outcome.CRASHED, Outcome.OK]
    assert [item.probe_id for item in trial.results] == ["0001", "0001-1"]
    assert trial.outcome is Outcome.OK
    assert trial.feasible
    assert not trial.confirmed
    assert [item.state for item in told(tmp_path)] == [TrialState.COMPLETE] * 2


@pytest.mark.parametrize(("outcome", "num_probes"), [(Outcome.CRASHED, 2), (Outcome.LOST, 3)])
def test_what_goes_on_failing_is_told_as_fail(
    outcome: Outcome, num_probes: int, tmp_path: Path
) -> None:
    executor = FakeExecutor(
        wall=ROOMY, fault=lambda spec: outcome if spec.probe_id.startswith("0001") else None
    )
    loop = make_loop(tmp_path, executor)
    loop.run(3, None)
    trial = loop.trials[1]
    assert trial.outcome is outcome
    assert trial.num_probes == num_probes
    assert not trial.feasible
    assert loop.trials[2].outcome is Outcome.OK
    states = [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert [item.state for item in told(tmp_path)] == states


@pytest.mark.parametrize(
    "outcome", [Outcome.HOST_OOM, Outcome.TIMEOUT, Outcome.DIVERGED, Outcome.UNSUPPORTED]
)
def test_a_verdict_is_not_repeated(outcome: Outcome, tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY, fault=fault_at({1: outcome}))
    loop = make_loop(tmp_path, executor)
    loop.run(3, None)
    assert [trial.outcome for trial in loop.trials] == [Outcome.OK, outcome, Outcome.OK]
    assert len(executor.submitted) == 3
    assert told(tmp_path)[1].constraints == {outcome.value: 1.0}


def test_only_out_of_device_memory_implies_anything(tmp_path: Path) -> None:
    def fault(spec: ProbeSpec) -> Outcome | None:
        return None if spec.probe_id == "0000" else Outcome.HOST_OOM

    loop = make_loop(tmp_path, FakeExecutor(wall=ROOMY, fault=fault), sampler="random")
    loop.run(20, None)
    assert not any(trial.skipped_because for trial in loop.trials)


def test_three_crashes_in_a_row_stop_the_search(tmp_path: Path) -> None:
    executor = FakeExecutor(
        wall=ROOMY, fault=lambda spec: Outcome.CRASHED if spec.probe_id >= "0002" else None
    )
    loop = make_loop(tmp_path, executor)
    with pytest.raises(AutotuneError, match="3 probes in a row") as caught:
        loop.run(30, None)
    assert not isinstance(caught.value, BaselineError)
    assert caught.value.exit_code == 1
    assert "0004-1" in caught.value.hint
    assert len(load_trials(RunFolder(tmp_path))) == 5


def test_two_crashes_and_a_success_do_not(tmp_path: Path) -> None:
    crashing = {"0001", "0002", "0004", "0005"}
    executor = FakeExecutor(
        wall=ROOMY,
        fault=lambda spec: Outcome.CRASHED if spec.probe_id[:4] in crashing else None,
    )
    loop = make_loop(tmp_path, executor)
    loop.run(8, None)
    assert loop.num_probed == 8


@pytest.mark.parametrize("outcome", [Outcome.UNSUPPORTED, Outcome.CRASHED])
def test_a_broken_baseline_stops_the_search(outcome: Outcome, tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY, fault=lambda spec: outcome)
    loop = make_loop(tmp_path, executor)
    with pytest.raises(BaselineError, match=outcome.value) as caught:
        loop.run(30, None)
    assert "probes" in caught.value.hint
    assert [trial.outcome for trial in load_trials(RunFolder(tmp_path))] == [outcome]


@pytest.mark.parametrize("outcome", [Outcome.UNSUPPORTED, Outcome.CRASHED])
def test_a_resumed_run_tries_a_broken_baseline_again(outcome: Outcome, tmp_path: Path) -> None:
    with pytest.raises(BaselineError):
        make_loop(tmp_path, FakeExecutor(fault=lambda spec: outcome)).run(30, None)
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor, trials=load_trials(RunFolder(tmp_path)))
    loop.run(3, None)
    assert [(trial.number, trial.outcome) for trial in loop.trials] == [
        (number, Outcome.OK) for number in range(3)
    ]
    assert load_trials(RunFolder(tmp_path))[0].outcome is Outcome.OK


@pytest.mark.parametrize(
    "outcome",
    [Outcome.DEVICE_OOM, Outcome.HOST_OOM, Outcome.TIMEOUT, Outcome.DIVERGED, Outcome.LOST],
)
def test_a_baseline_that_does_not_work_is_news(outcome: Outcome, tmp_path: Path) -> None:
    executor = FakeExecutor(
        wall=ROOMY, fault=lambda spec: outcome if spec.probe_id.startswith("0000") else None
    )
    loop = make_loop(tmp_path, executor)
    loop.run(4, None)
    assert loop.trials[0].outcome is outcome
    assert any(trial.feasible for trial in loop.trials[1:])


def test_a_result_is_recorded_before_anything_else_happens_with_it(tmp_path: Path) -> None:
    def on_trial(trial: Trial) -> None:
        if trial.number == 3:
            raise RuntimeError("the screen is gone")

    loop = make_loop(tmp_path, FakeExecutor(wall=ROOMY), on_trial=on_trial)
    with pytest.raises(RuntimeError, match="screen"):
        loop.run(10, None)
    assert [trial.number for trial in load_trials(RunFolder(tmp_path))] == [0, 1, 2, 3]


def test_an_executor_that_fails_leaves_what_was_found(tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY, fault=fault_at({4: ExecutorError("The worker is gone.")}))
    loop = make_loop(tmp_path, executor)
    with pytest.raises(ExecutorError, match="gone"):
        loop.run(10, None)
    assert [trial.number for trial in load_trials(RunFolder(tmp_path))] == [0, 1, 2, 3]


def test_an_executor_that_fails_in_one_slot_does_not_lose_the_other(tmp_path: Path) -> None:
    # Of the probes 1 to 4, four at once, one could not be run.
    for broken in (1, 2, 3, 4):
        folder = tmp_path / str(broken)
        fault = fault_at({broken: ExecutorError("The worker is gone.")})
        loop = make_loop(folder, FakeExecutor(wall=ROOMY, slots=4, fault=fault))
        with pytest.raises(ExecutorError):
            loop.run(5, None)
        assert len(load_trials(RunFolder(folder))) == 4
