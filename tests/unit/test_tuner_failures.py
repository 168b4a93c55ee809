"""Searches that find nothing, break, or are refused before they begin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tuner_kit import GIB, make_executor, make_tuner

from autotune.errors import (
    BaselineError,
    ExecutorError,
    JournalError,
    NoFeasibleConfigError,
    SpaceError,
    UnknownNameError,
    UsageError,
)
from autotune.listener import Budget, Silent
from autotune.probe.result import Outcome
from autotune.report.model import Report
from autotune.testing.contexts import make_context
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_answers

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def test_a_budget_below_the_weights_is_refused(run: Path) -> None:
    executor = make_executor()
    tuner = make_tuner(run, executor, memory_budget_bytes=GIB // 4)
    with pytest.raises(UsageError, match="below the weights") as caught:
        tuner.search(Budget(3))
    assert "--memory-budget" in caught.value.hint
    assert executor.submitted == []
    assert not (run / "run.json").exists()
    # The next attempt may use the same folder.
    assert make_tuner(run).search(Budget(2)).finished


def test_where_nothing_fits_there_is_no_pick(run: Path) -> None:
    executor = make_executor(wall=MemoryWall(capacity_bytes=GIB // 8))
    report = make_tuner(run, executor).search(Budget(6))
    assert report.finished
    assert report.pareto == ()
    assert report.picks() == {}
    assert list(run.rglob("*.yaml")) == []
    # Only on a virtual card can a probe take more than there is.
    assert not any(spec.beyond_device for spec in executor.submitted)
    with pytest.raises(NoFeasibleConfigError):
        report.pick("balanced")


def test_nothing_fits_a_budget_that_each_trial_exceeds(run: Path) -> None:
    # An accelerator without a cap: probes finish, but over the limit.
    from autotune.testing.contexts import make_gpu

    context = make_context(device=make_gpu(free_bytes=GIB))
    report = make_tuner(run, make_executor(context)).search(Budget(5))
    assert any(trial.outcome is Outcome.OK for trial in report.trials)
    assert not any(trial.feasible for trial in report.trials)
    with pytest.raises(NoFeasibleConfigError, match="GiB"):
        report.pick("balanced")


def test_a_broken_baseline_leaves_a_report(run: Path) -> None:
    executor = make_executor(fault=lambda spec: Outcome.CRASHED)
    with pytest.raises(BaselineError):
        make_tuner(run, executor).search(Budget(5))
    report = Report.load(run / "report.json")
    assert not report.finished
    assert [trial.outcome for trial in report.trials] == [Outcome.CRASHED]
    # Once it is mended, the search goes on.
    assert make_tuner(run, resume=True).search(Budget(3)).finished


def test_an_executor_that_fails_leaves_a_report(run: Path) -> None:
    count = iter(range(100))
    error = ExecutorError("The worker is gone.")
    executor = make_executor(fault=lambda spec: error if next(count) == 3 else None)
    with pytest.raises(ExecutorError):
        make_tuner(run, executor).search(Budget(5))
    assert len(Report.load(run / "report.json").trials) == 3
    assert make_tuner(run, resume=True).search(Budget(5)).finished


def test_a_full_disk_ends_the_search_with_what_was_found(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from autotune.probe import journal

    full = [False]
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    monkeypatch.setattr(journal.os, "fsync", fsync)

    class Filling(Silent):
        def on_trial(self, trial: Any, report: Report) -> None:
            full[0] = trial.number == 2

    with pytest.raises(JournalError, match="space"):
        make_tuner(run, listener=Filling()).search(Budget(8))
    full[0] = False
    report = make_tuner(run, resume=True).search(Budget(8))
    assert report.finished
    assert sum(trial.num_probes > 0 for trial in report.trials) == 8


def test_errors_of_the_worker_reach_the_caller(run: Path) -> None:
    def refuse(request: Any) -> dict[str, Any]:
        raise UsageError("no row of the data set holds a token.", hint="Look.")

    executor = FakeExecutor(answers={**make_answers(), "prepare": refuse})
    with pytest.raises(UsageError, match="no row"):
        make_tuner(run, executor).search(Budget(5))
    assert not (run / "run.json").exists()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"space": "sfft"}, UnknownNameError),
        ({"sampler": "tpe2"}, UnknownNameError),
        ({"trainer": "dpo"}, UsageError),
        ({"weights": "none"}, UsageError),
        ({"min_coverage": 1.5}, UsageError),
        ({"phases": ("test",)}, UsageError),
        ({"global_batch": 0}, UsageError),
        ({"measured_steps": 0}, UsageError),
        ({"warmup_steps": -1}, UsageError),
        ({"probe_timeout_s": 0}, UsageError),
    ],
)
def test_a_wrong_request_is_refused_at_once(
    options: dict[str, Any], error: type[Exception], run: Path
) -> None:
    with pytest.raises(error):
        make_tuner(run, **options)
    assert not run.exists()


@pytest.mark.parametrize(
    ("pins", "error"),
    [
        ({"no_such_knob": "1"}, UnknownNameError),
        ({"per_device_train_batch_size": "many"}, SpaceError),
        ({"per_device_train_batch_size": "3"}, SpaceError),
        ({"adaptation": "fulll"}, SpaceError),
    ],
)
def test_a_wrong_pin_is_refused_before_any_probe(
    pins: dict[str, Any], error: type[Exception], run: Path
) -> None:
    executor = make_executor()
    with pytest.raises(error):
        make_tuner(run, executor, pins=pins).search(Budget(3))
    assert executor.submitted == []


@pytest.mark.parametrize("values", [(0, None), (-1, None), (None, 0.0), (3, -1.0)])
def test_a_budget_of_nothing_is_refused(values: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError):
        Budget(*values)
