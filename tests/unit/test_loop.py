"""The loop of a search on a machine that does not exist."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from autotune import loop as loop_module
from autotune.errors import AutotuneError, BaselineError, ExecutorError
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.testing.contexts import make_context
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_fake_plan, make_loop
from autotune.tuner import load_trials

GIB = 1 << 30
ROOMY = MemoryWall(capacity_bytes=14 * GIB)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def told(folder: Path) -> list[FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    return optuna.load_study(study_name="search", storage=storage).get_trials()


def probed_configs(executor: FakeExecutor) -> list[str]:
    return [repr(sorted(spec.config.items(), key=str)) for spec in executor.submitted]


def fault_at(endings: dict[int, Any]) -> Callable[[ProbeSpec], Any]:
    """Return a fault for the probes whose number in the order of submission is a key."""
    count = iter(range(10**9))
    return lambda spec: endings.get(next(count))


def fault_of(outcomes: dict[str, Any]) -> Callable[[ProbeSpec], Any]:
    """Return a fault by the probe's name."""
    return lambda spec: outcomes.get(spec.probe_id)


def small_plan(folder: Path, **asked: Any) -> Any:
    """Return a plan with eight candidates."""
    pins = {"adaptation": "full", "max_length": "1024", "batching": "padded"}
    return make_fake_plan(folder, pins=pins, global_batch=8, **asked)


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
    executor = FakeExecutor(fault=lambda spec: Outcome.DEVICE_OOM)
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


# --- failures -----------------------------------------------------------------------------------


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


# --- confirming ---------------------------------------------------------------------------------


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


def test_a_deadline_in_the_past_leaves_the_baseline(tmp_path: Path) -> None:
    """A budget that preparing used up must not look as if nothing fitted."""
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor)
    loop.run(5, time.monotonic() - 1)
    assert [trial.number for trial in loop.trials] == [0]
    assert not loop.exhausted


# --- resuming -----------------------------------------------------------------------------------


def test_a_resumed_loop_goes_on_numbering_and_repeats_nothing(tmp_path: Path) -> None:
    first = make_loop(tmp_path, FakeExecutor(wall=ROOMY), sampler="random")
    first.run(10, None)
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor, sampler="random", trials=load_trials(RunFolder(tmp_path)))
    loop.run(16, None)
    assert len(executor.submitted) == 6
    numbers = [trial.number for trial in loop.trials]
    assert numbers == list(range(len(numbers)))
    digests = [trial.digest for trial in loop.trials]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_missing_baseline_is_probed_again_first_and_alone(slots: int, tmp_path: Path) -> None:
    make_loop(tmp_path, FakeExecutor(wall=ROOMY), sampler="random").run(6, None)
    left = [trial for trial in load_trials(RunFolder(tmp_path)) if trial.number != 0]
    executor = FakeExecutor(wall=ROOMY, slots=slots)
    loop = make_loop(tmp_path, executor, sampler="random", trials=left)
    loop.run(9, None)
    baselines = [spec for spec in executor.submitted if spec.probe_id.startswith("0000")]
    assert executor.submitted[:1] == baselines
    assert sorted(trial.number for trial in loop.trials) == list(range(len(loop.trials)))
    assert loop.num_probed == 9


def test_a_missing_baseline_is_probed_whatever_was_used_up(tmp_path: Path) -> None:
    make_loop(tmp_path, FakeExecutor(wall=ROOMY), sampler="random").run(6, None)
    left = [trial for trial in load_trials(RunFolder(tmp_path)) if trial.number != 0]
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor, sampler="random", trials=left)
    loop.run(len(left), time.monotonic() - 1.0)
    assert [spec.probe_id.partition(".")[0] for spec in executor.submitted] == ["0000"]


def test_folders_of_a_killed_run_are_kept(tmp_path: Path) -> None:
    left = RunFolder(tmp_path).probe_folder("0000")
    left.mkdir(parents=True)
    (left / "stderr.log").write_text("last words")
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor)
    loop.run(1, None)
    assert executor.submitted[0].probe_id == "0000.1"
    assert Path(executor.submitted[0].folder).name == "0000.1"
    assert (left / "stderr.log").read_text() == "last words"


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
