"""A search that starts out of memory: what loading proves, and the lean second trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_kit import GIB

from autotune.loop import SearchLoop
from autotune.probe.result import Outcome
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.testing.contexts import make_context, make_gpu
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_fake_plan, make_loop
from autotune.tuner import load_trials

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

SAMPLERS = ["tpe", "random", "grid", "nsgaii"]
TIGHT = MemoryWall(capacity_bytes=2 * GIB, weights_bytes=GIB, bytes_per_token=1 << 19)
"""A wall that the baseline hits in its first step, and QLoRA with small micro-batches does not."""

HEAVY = MemoryWall(capacity_bytes=9 * GIB, weights_bytes=10 * GIB, bytes_per_token=1 << 16)
"""A wall that float32 weights hit while they are loaded."""


def gpu_plan(folder: Path, **asked: Any) -> Any:
    context = make_context(device=make_gpu(), global_batch=8)
    return make_fake_plan(folder, context=context, global_batch=8, **asked)


def loop_of(folder: Path, wall: MemoryWall, plan: Any = None, **options: Any) -> SearchLoop:
    executor = options.pop("executor", None) or FakeExecutor(wall=wall)
    return make_loop(folder, executor, plan=plan or gpu_plan(folder), **options)


def weights_of(trial: Trial) -> tuple[bool, str]:
    is_quantised = "bit" in trial.candidate["adaptation"]
    return is_quantised, trial.candidate["dtype"]


# --- what loading proves ------------------------------------------------------------------------


def test_one_failure_to_load_stands_for_all_with_the_same_weights(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, HEAVY, sampler="random", num_trials=None)
    loop.run(None, None)
    assert loop.trials[0].results[-1].phase == "load"
    failed = [item for item in loop.trials if weights_of(item) == (False, "float32")]
    assert {item.candidate["adaptation"] for item in failed} == {"full", "lora"}
    assert [item.number for item in failed if item.num_probes] == [0]
    for trial in failed[1:]:
        assert trial.outcome is Outcome.DEVICE_OOM
        assert trial.skipped_because == "loads at least the weights that trial 0 had no room for"


def test_a_later_failure_proves_nothing_about_loading(tmp_path: Path) -> None:
    wall = MemoryWall(capacity_bytes=1, weights_bytes=0)
    loop = loop_of(tmp_path, wall, sampler="random")
    loop.run(12, None)
    assert all(item.results[-1].phase == "first_step" for item in loop.trials if item.results)
    assert not any("loads" in (item.skipped_because or "") for item in loop.trials)


def test_a_resumed_search_knows_what_failed_to_load(tmp_path: Path) -> None:
    plan = gpu_plan(tmp_path)
    loop_of(tmp_path, HEAVY, plan, sampler="random").run(1, None)
    loop = loop_of(
        tmp_path, HEAVY, plan, sampler="random", trials=load_trials(RunFolder(tmp_path))
    )
    loop.run(8, None)
    failed = [item for item in loop.trials if weights_of(item) == (False, "float32")]
    assert [item.number for item in failed if item.num_probes] == [0]


# --- the lean second trial ----------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_baseline_that_does_not_fit_is_followed_by_the_leanest(
    sampler: str, tmp_path: Path
) -> None:
    loop = loop_of(tmp_path, TIGHT, sampler=sampler)
    loop.run(8, None)
    assert loop.trials[0].outcome is Outcome.DEVICE_OOM
    assert loop.trials[1].candidate == loop._plan.space.leanest
    assert loop.trials[1].feasible
    assert len({item.digest for item in loop.trials}) == len(loop.trials)


def test_a_baseline_over_the_budget_is_followed_by_the_leanest(tmp_path: Path) -> None:
    context = make_context(device=make_gpu(free_bytes=3 * GIB), global_batch=8)
    plan = make_fake_plan(tmp_path, context=context, global_batch=8)
    wall = MemoryWall(capacity_bytes=100 * GIB, weights_bytes=GIB)
    loop = loop_of(tmp_path, wall, plan)
    loop.run(3, None)
    assert loop.trials[0].outcome is Outcome.OK
    assert loop.trials[0].violations["memory_budget"] > 0
    assert loop.trials[1].candidate == plan.space.leanest


def test_a_baseline_that_fits_is_not(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, MemoryWall(capacity_bytes=100 * GIB), sampler="random")
    loop.run(3, None)
    assert loop.trials[0].feasible
    assert loop.trials[1].candidate != loop._plan.space.leanest


def test_a_resumed_search_goes_on_with_the_leanest_and_only_once(tmp_path: Path) -> None:
    plan = gpu_plan(tmp_path)
    loop_of(tmp_path, TIGHT, plan).run(1, None)
    for num_trials in (2, 4):
        loop = loop_of(tmp_path, TIGHT, plan, trials=load_trials(RunFolder(tmp_path)))
        loop.run(num_trials, None)
    lean = [item.number for item in loop.trials if item.candidate == plan.space.leanest]
    assert lean == [1]


def test_pins_that_leave_only_the_baseline_as_leanest(tmp_path: Path) -> None:
    pins = {
        "adaptation": "full",
        "dtype": "bfloat16",
        "batching": "padded",
        "max_length": "1024",
        "per_device_train_batch_size": "1",
    }
    plan = gpu_plan(tmp_path, pins=pins)
    assert plan.space.leanest == plan.space.baseline
    loop = loop_of(tmp_path, MemoryWall(capacity_bytes=1), plan, sampler="random")
    loop.run(None, None)
    assert len([item for item in loop.trials if item.candidate == plan.space.leanest]) == 1
    assert loop.exhausted


def test_what_another_host_probes_is_not_the_second_trial_here(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    leanest = []
    for owner in ("a", "b"):
        folder = tmp_path / owner
        loop = loop_of(folder, TIGHT, owner=owner, storage=url)
        loop.run(3, None)
        leanest += [item for item in loop.trials if item.candidate == loop._plan.space.leanest]
    assert len(leanest) == 1


def test_slots_beside_the_leanest_go_on_with_others(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, TIGHT, executor=FakeExecutor(wall=TIGHT, slots=4))
    loop.run(6, None)
    numbers = [item.number for item in loop.trials if item.candidate == loop._plan.space.leanest]
    assert numbers == [1]
    assert loop.num_probed == 6
