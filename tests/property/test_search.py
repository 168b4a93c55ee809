"""What holds for every search, wherever the memory wall stands and whatever goes wrong."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import AutotuneError
from autotune.loop import MAX_CRASHES_IN_A_ROW, SearchLoop
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.pareto import dominates, pareto_set
from autotune.runfolder import RunFolder
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_fake_plan, make_loop
from autotune.tuner import load_trials

GIB = 1 << 30
OUTCOMES = st.sampled_from([None] * 8 + [item for item in Outcome if item is not Outcome.OK])
WALLS = st.builds(
    MemoryWall,
    capacity_bytes=st.integers(2, 40).map(lambda n: n * GIB),
    noise_ratio=st.sampled_from([0.0, 0.01, 0.3]),
)


def check(loop: SearchLoop, executor: FakeExecutor, folder: Path, num_trials: int) -> None:
    trials = loop.trials
    numbers = [trial.number for trial in trials]
    # Every trial is on the disk, as it is in memory; numbers have no gap.
    assert load_trials(RunFolder(folder)) == sorted(trials, key=lambda trial: trial.number)
    assert sorted(numbers) == list(range(len(numbers)))
    # Nothing is tried twice, and the budget holds.
    digests = [trial.digest for trial in trials]
    assert len(set(digests)) == len(digests)
    assert loop.num_probed <= num_trials
    assert not loop._running
    # The baseline changes nothing and comes first.
    if trials:
        assert trials[0].number == 0
        assert trials[0].changed == {}
        assert trials[0].changes == ()
    folders = [spec.folder for spec in executor.submitted]
    assert len(set(folders)) == len(folders)
    for trial in trials:
        # Values exist exactly where something was measured.
        assert (trial.outcome is Outcome.OK) <= (trial.measurement is not None)
        assert trial.feasible <= (trial.outcome is Outcome.OK)
        assert (trial.skipped_because is None) == (trial.num_probes > 0)
        assert trial.num_probes <= 3
        if trial.outcome is Outcome.OK:
            assert set(trial.violations) == {"memory_budget"}
            assert trial.feasible == (trial.violations["memory_budget"] <= 0)
    members = pareto_set(trials)
    assert bool(members) == any(trial.feasible for trial in trials)
    assert not any(dominates(a, b) for a in members for b in members)


@settings(max_examples=30, deadline=None)
@given(
    wall=WALLS,
    faults=st.lists(OUTCOMES, max_size=20),
    sampler=st.sampled_from(["random", "tpe", "grid", "nsgaii"]),
    slots=st.integers(1, 3),
    num_trials=st.integers(1, 16),
    seed=st.integers(0, 3),
)
def test_what_holds_for_every_search(
    wall: MemoryWall,
    faults: list[Outcome | None],
    sampler: str,
    slots: int,
    num_trials: int,
    seed: int,
) -> None:
    left = iter(faults)

    def fault(spec: ProbeSpec) -> Outcome | None:
        return next(left, None)

    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(os, "fsync", return_value=None),
    ):
        folder = Path(name)
        executor = FakeExecutor(wall=wall, slots=slots, fault=fault)
        plan = make_fake_plan(folder, seed=seed, memory_budget_bytes=20 * GIB)
        loop = make_loop(folder, executor, plan=plan, sampler=sampler, num_trials=num_trials)
        try:
            loop.run(num_trials, None)
        except AutotuneError:
            baseline = loop.trials[0].outcome
            tail = [trial.outcome for trial in loop.trials[-MAX_CRASHES_IN_A_ROW:]]
            assert baseline in (Outcome.UNSUPPORTED, Outcome.CRASHED) or tail == (
                [Outcome.CRASHED] * MAX_CRASHES_IN_A_ROW
            )
            return
        assert loop.exhausted or loop.num_probed == num_trials
        check(loop, executor, folder, num_trials)
        loop.confirm(None)
        folders = [spec.folder for spec in executor.submitted]
        assert len(set(folders)) == len(folders)
        assert load_trials(RunFolder(folder)) == sorted(
            loop.trials, key=lambda trial: trial.number
        )


@settings(max_examples=15, deadline=None)
@given(
    capacity=st.integers(2, 40).map(lambda n: n * GIB),
    first=st.integers(1, 8),
    second=st.integers(1, 8),
)
def test_a_search_in_two_parts_is_a_search(capacity: int, first: int, second: int) -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(os, "fsync", return_value=None),
    ):
        folder = Path(name)
        executor = FakeExecutor(wall=MemoryWall(capacity_bytes=capacity))
        plan = make_fake_plan(folder)
        make_loop(folder, executor, plan=plan).run(first, None)
        loop = make_loop(folder, executor, plan=plan, trials=load_trials(RunFolder(folder)))
        loop.run(first + second, None)
        check(loop, executor, folder, first + second)
        assert len(executor.submitted) == loop.num_probed
