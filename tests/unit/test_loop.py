"""The loop of a search on a machine that does not exist: what is probed, and until when."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from loop_kit import GIB, ROOMY, told
from optuna.trial import TrialState

from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.runfolder import RunFolder
from autotune.testing.contexts import make_context
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_fake_plan, make_loop

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def probed_configs(executor: FakeExecutor) -> list[str]:
    return [repr(sorted(spec.config.items(), key=str)) for spec in executor.submitted]


def small_plan(folder: Path, **asked: Any) -> Any:
    """Return a plan with eight candidates."""
    pins = {"adaptation": "full", "max_length": "1024", "batching": "padded"}
    return make_fake_plan(folder, pins=pins, global_batch=8, **asked)


def _monotone_plan(folder: Path) -> Any:
    """Return a plan in which only batch size and length vary: most candidates are comparable."""
    pins = {
        "adaptation": "full",
        "batching": "padded",
        "optim": "adamw_torch",
        "checkpointing": "none",
        "dtype": "float32",
        "pad_to_multiple_of": "none",
        "activation_offloading": "off",
        "allocator": "default",
        "attn_implementation": "sdpa",
    }
    return make_fake_plan(folder, space="sft", pins=pins, global_batch=64)


# --- the order of things ------------------------------------------------------------------------


def test_the_baseline_is_trial_0_and_runs_first(tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor)
    loop.run(5, None)
    first = loop.trials[0]
    assert first.number == 0
    assert first.candidate == loop._plan.space.baseline
    assert first.changed == {}
    assert executor.submitted[0].probe_id == "0000"
    assert [trial.number for trial in loop.trials if trial.num_probes] == [0, 1, 2, 3, 4]


def test_the_baseline_runs_alone_whatever_the_slots(tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY, slots=4)
    seen: list[tuple[int, int]] = []
    loop = make_loop(
        tmp_path,
        executor,
        on_probe=lambda number, candidate: seen.append((number, len(loop.trials))),
    )
    loop.run(9, None)
    assert seen[0] == (0, 0)
    # No other probe started before the baseline had ended.
    assert all(finished >= 1 for number, finished in seen[1:])
    assert loop.num_probed == 9


def test_slots_are_filled_and_not_overfilled(tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY, slots=2)
    loop = make_loop(tmp_path, executor)
    running = []
    original = executor.submit

    def submit(spec: ProbeSpec) -> Any:
        running.append(len(loop._running))
        return original(spec)

    executor.submit = submit  # type: ignore[method-assign]
    loop.run(8, None)
    assert set(running) == {0, 1}
    assert loop.num_probed == 8


def test_each_probe_has_a_folder_and_the_exported_config(tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor)
    loop.run(4, None)
    for spec, trial in zip(executor.submitted, loop.trials, strict=True):
        assert Path(spec.folder) == RunFolder(tmp_path).probe_folder(spec.probe_id)
        assert Path(spec.folder).is_dir()
        assert dict(spec.config) == dict(trial.config) == loop._plan.config(trial.candidate)
        assert spec.overlay == {}
        assert spec.memory_budget_bytes == loop._plan.budget_bytes


def test_an_accelerator_has_no_cap_but_the_budget_asked_for(tmp_path: Path) -> None:
    from autotune.testing.contexts import make_gpu

    context = make_context(device=make_gpu())
    for budget, cap in ((None, None), (20 * GIB, 20 * GIB)):
        folder = tmp_path / str(cap)
        executor = FakeExecutor(wall=ROOMY)
        plan = make_fake_plan(folder, context=context, memory_budget_bytes=budget)
        make_loop(folder, executor, plan=plan).run(1, None)
        assert executor.submitted[0].memory_budget_bytes == cap


# --- what is not probed -------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "nsgaii"])
def test_no_candidate_is_probed_twice(sampler: str, tmp_path: Path) -> None:
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor, sampler=sampler)
    loop.run(30, None)
    digests = [trial.digest for trial in loop.trials]
    assert len(digests) == len(set(digests))
    assert len(set(probed_configs(executor))) == len(executor.submitted) == 30


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", "nsgaii"])
def test_an_exhausted_space_ends_the_search(sampler: str, tmp_path: Path) -> None:
    executor = FakeExecutor(wall=MemoryWall(capacity_bytes=10**15))
    plan = small_plan(tmp_path)
    loop = make_loop(tmp_path, executor, plan=plan, sampler=sampler, num_trials=None)
    loop.run(None, None)
    digests = {plan.space.digest(item) for item in plan.space.enumerate()}
    assert loop.exhausted
    assert {trial.digest for trial in loop.trials} == digests
    assert len(executor.submitted) == len(digests) >= 8


def test_out_of_memory_implies_what_needs_more(tmp_path: Path) -> None:
    # The baseline, 8 x 1024 tokens, does not fit; nothing that needs more is tried.
    wall = MemoryWall(capacity_bytes=5 * GIB, weights_bytes=1 * GIB)
    executor = FakeExecutor(wall=wall)
    plan = make_fake_plan(tmp_path)
    loop = make_loop(tmp_path, executor, plan=plan, num_trials=None, sampler="random")
    loop.run(None, None)
    implied = [trial for trial in loop.trials if trial.skipped_because]
    assert implied
    by_number = {trial.number: trial for trial in loop.trials}
    states = {trial.user_attrs.get("trial"): trial for trial in told(tmp_path)}
    for trial in implied:
        assert trial.outcome is Outcome.DEVICE_OOM
        assert trial.results == ()
        assert not trial.feasible
        culprit = by_number[int(trial.skipped_because.split("trial ")[1].split()[0])]
        assert culprit.outcome is Outcome.DEVICE_OOM
        assert culprit.num_probes == 1
        assert plan.space.demands_at_least(trial.candidate, culprit.candidate)
        # The wall agrees: it would not have fitted.
        assert wall.peak_bytes(trial.config) > wall.capacity_bytes
        assert states[trial.number].state is TrialState.PRUNED
        assert states[trial.number].constraints == {"device_oom": 1.0}
    assert len(executor.submitted) + len(implied) == len(loop.trials)
    assert loop.num_probed == len(executor.submitted)


def test_implied_trials_do_not_use_up_the_budget(tmp_path: Path) -> None:
    # Small batches fit: the leanest candidate, which comes second, must not imply all others.
    executor = FakeExecutor(wall=MemoryWall(capacity_bytes=5 * GIB, weights_bytes=GIB))
    loop = make_loop(tmp_path, executor, plan=_monotone_plan(tmp_path), sampler="random")
    loop.run(4, None)
    assert any(trial.skipped_because for trial in loop.trials)
    assert loop.num_probed == len(executor.submitted) == 4
    numbers = [trial.number for trial in loop.trials]
    assert sorted(numbers) == list(range(len(numbers)))


def test_what_runs_elsewhere_is_not_probed_here(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    digests: list[str] = []
    for owner in ("a", "b"):
        folder = tmp_path / owner
        executor = FakeExecutor(wall=ROOMY)
        loop = make_loop(folder, executor, owner=owner, sampler="random", storage=url)
        loop.run(6, None)
        digests += [trial.digest for trial in loop.trials]
    # Each run has its own baseline, to compare with; all else is probed once.
    assert len(digests) == 12
    assert len(set(digests)) == 11


# --- time ---------------------------------------------------------------------------------------


def test_no_probe_starts_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    loop = make_loop(
        tmp_path,
        FakeExecutor(wall=MemoryWall(capacity_bytes=10**14)),
        on_trial=lambda trial: setattr(clock, "now_s", clock.now_s + 10.0),
    )
    loop.run(None, 35.0)
    # At 0, 10, 20 and 30 s a probe starts, at 40 s none.
    assert loop.num_probed == 4
    assert not loop.exhausted
    loop.confirm(35.0)
    assert not any(trial.confirmed for trial in loop.trials)
    loop.confirm(45.0)
    assert any(trial.confirmed for trial in loop.trials)


def test_the_deadline_holds_where_candidate_after_candidate_is_implied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    started: list[float] = []
    executor = FakeExecutor(fault=lambda spec: Outcome.DEVICE_OOM)
    loop = make_loop(
        tmp_path,
        executor,
        plan=_monotone_plan(tmp_path),
        sampler="random",
        on_probe=lambda number, candidate: started.append(clock.now_s),
        on_trial=lambda trial: setattr(clock, "now_s", clock.now_s + 1.0),
    )
    loop.run(None, 3.5)
    assert max(started) <= 3.5
    assert len(loop.trials) == 4
    assert any(trial.skipped_because for trial in loop.trials)
    assert not loop.exhausted


def test_a_deadline_in_the_past_leaves_the_baseline(tmp_path: Path) -> None:
    """A budget that preparing used up must not look as if nothing fitted."""
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor)
    loop.run(5, time.monotonic() - 1)
    assert [trial.number for trial in loop.trials] == [0]
    assert not loop.exhausted


# --- chance -------------------------------------------------------------------------------------


def test_global_generators_do_not_change_a_search(tmp_path: Path) -> None:
    def run(name: str, reseed: bool) -> list[str]:
        loop = make_loop(
            tmp_path / name,
            FakeExecutor(wall=MemoryWall(capacity_bytes=14 * GIB, noise_ratio=0.0)),
            on_trial=lambda trial: random.seed(trial.number) if reseed else None,
        )
        loop.run(20, None)
        return [trial.digest for trial in loop.trials]

    assert run("a", reseed=False) == run("b", reseed=True)
