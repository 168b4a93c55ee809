"""Whole searches through the Python API, on a machine that does not exist."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import (
    BaselineError,
    ExecutorError,
    JournalError,
    NoFeasibleConfigError,
    SpaceError,
    StudyMismatchError,
    UnknownNameError,
    UsageError,
)
from autotune.objectives import memory_headroom
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.model import Report
from autotune.runfolder import RunFolder
from autotune.space.context import Context
from autotune.testing.contexts import make_context, make_cpu
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_answers
from autotune.tuner import Budget, Silent, Tuner, budget_grace, default_run_dir

GIB = 1 << 30
ROOMY = MemoryWall(capacity_bytes=14 * GIB)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make_executor(
    context: Context | None = None, *, wall: MemoryWall = ROOMY, **options: Any
) -> FakeExecutor:
    return FakeExecutor(wall=wall, answers=make_answers(context), **options)


def make_tuner(run_dir: Path, executor: FakeExecutor | None = None, **options: Any) -> Tuner:
    values: dict[str, Any] = {
        "model": "some/model",
        "dataset": "some/rows",
        "space": "quick",
        "executor": executor or make_executor(),
        "run_dir": run_dir,
    }
    return Tuner(**{**values, **options})


def interrupting_at(number: int) -> Callable[[ProbeSpec], None]:
    """Return a fault that is Ctrl-C while the probe of that number is started."""
    count = iter(range(10**9))

    def fault(spec: ProbeSpec) -> None:
        if next(count) == number:
            raise KeyboardInterrupt

    return fault


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


# --- a search from beginning to end -------------------------------------------------------------


def test_a_search_leaves_everything_in_the_run_folder(run: Path) -> None:
    executor = make_executor()
    report = make_tuner(run, executor, command="autotune search a b").search(Budget(12))
    names = {path.relative_to(run).parts[0] for path in run.rglob("*") if path.is_file()}
    assert names == {
        ".lock",
        "run.json",
        "study.journal",
        "probes.jsonl",
        "report.json",
        "configs",
    }
    assert not RunFolder(run).work.exists()
    assert len(list((run / "probes").iterdir())) == len(executor.submitted)
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]
    members = {f"trial-{number:04d}.yaml" for number in report.pareto_numbers}
    assert {path.name for path in (run / "configs").iterdir()} == {"best.yaml", *members}
    details = json.loads((run / "run.json").read_text())
    assert details["command"] == "autotune search a b"
    assert details["identity"]["model"] == "some/model"
    assert details["budget_bytes"] == report.budget_bytes


def test_the_report_round_trips(run: Path) -> None:
    tuner = make_tuner(run)
    report = tuner.search(Budget(12))
    assert Report.load(run / "report.json") == report == tuner.report
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_the_report_says_what_was_searched(run: Path) -> None:
    report = make_tuner(run, min_coverage=0.5, global_batch=16, seed=5).search(Budget(10))
    assert report.finished
    assert not report.interrupted
    assert (report.model, report.dataset, report.trainer) == ("some/model", "some/rows", "sft")
    assert report.global_batch == 16
    assert report.min_coverage == 0.5
    assert report.seed == 5
    assert report.sampler == "tpe"
    assert report.space == "quick"
    assert report.objectives == ("peak_memory", "tokens_per_s")
    assert report.budget_bytes == round(0.9 * 60 * GIB)
    assert "Test CPU" in report.budget_source
    assert report.device["label"] == "Test CPU"
    assert report.data["num_rows"] == 20
    assert report.versions["torch"] == "2.13.0"
    assert report.wall_time_s > 0
    assert report.probe_work_s > 0
    assert report.baseline is not None
    assert report.baseline.changed == {}


def test_each_exported_file_holds_the_probed_config(run: Path) -> None:
    executor = make_executor()
    report = make_tuner(run, executor).search(Budget(10))
    specs = {spec.probe_id: spec for spec in executor.submitted}
    for number in report.pareto_numbers:
        text = (run / "configs" / f"trial-{number:04d}.yaml").read_text()
        assert yaml.safe_load(text) == specs[f"{number:04d}"].config
    best = report.pick("balanced")
    assert yaml.safe_load((run / "configs" / "best.yaml").read_text()) == best.config


def test_finalists_are_confirmed(run: Path) -> None:
    heard: list[list[int]] = []

    class Listening(Silent):
        def on_confirm(self, numbers: Sequence[int]) -> None:
            heard.append(list(numbers))

    report = make_tuner(run, listener=Listening()).search(Budget(10))
    assert len(heard) == 1
    assert all(trial.confirmed for trial in report.pareto)
    assert all(report._find(number).confirmed for number in heard[0])


def test_the_run_folder_is_current_after_each_probe(run: Path) -> None:
    class Watching(Silent):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_trial(self, trial: Any, report: Report) -> None:
            on_disk = Report.load(run / "report.json")
            assert on_disk == report
            assert not report.finished
            self.seen.append(len(on_disk.trials))
            if report.pareto_numbers:
                assert (run / "configs" / "best.yaml").exists()

    watching = Watching()
    report = make_tuner(run, listener=watching).search(Budget(8))
    assert watching.seen[:8] == list(range(1, 9))
    assert report.finished


def test_nothing_is_probed_to_make_a_plan_or_a_profile(run: Path) -> None:
    executor = make_executor()
    plan = make_tuner(run, executor).plan()
    assert plan.space.size() > 10
    assert executor.submitted == []
    assert not run.exists()
    executor = make_executor()
    assert make_tuner(run, executor).profile().num_rows == 20
    assert [name for name, _ in executor.tasks] == ["prepare"]
    assert not run.exists()


def test_a_space_that_fits_the_budget_is_walked(run: Path) -> None:
    pins = {"adaptation": "full", "max_length": "1024", "batching": "padded"}
    tuner = make_tuner(run, pins=pins, global_batch=8)
    size = tuner.plan().space.size()
    executor = make_executor(wall=MemoryWall(capacity_bytes=10**14))
    report = make_tuner(run, executor, pins=pins, global_batch=8).search(Budget(40))
    assert report.sampler == "grid"
    assert report.finished
    assert len(report.trials) == size < 40


def test_a_sampler_can_be_chosen(run: Path) -> None:
    report = make_tuner(run, sampler="random").search(Budget(4))
    assert report.sampler == "random"


def test_further_constraints_count(run: Path) -> None:
    report = make_tuner(run, constraints=[memory_headroom(at_least=0.95)]).search(Budget(10))
    limit = 64 * GIB * 0.05
    for trial in report.trials:
        if trial.outcome is Outcome.OK:
            assert trial.feasible == (trial.peak_bytes <= limit)
            assert set(trial.violations) == {"memory_budget", "memory_headroom"}


def test_a_minimum_coverage_is_kept(run: Path) -> None:
    context = make_context(lengths=(100, 3000))
    report = make_tuner(run, make_executor(context), min_coverage=0.9).search(Budget(20))
    feasible = [trial for trial in report.trials if trial.feasible]
    assert feasible
    assert all(trial.coverage >= 0.9 for trial in feasible)


@pytest.mark.parametrize("broken", [False, True])
def test_only_an_executor_of_its_own_is_shut_down(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = (lambda spec: Outcome.CRASHED) if broken else None
    own, lent = make_executor(fault=fault), make_executor(fault=fault)
    monkeypatch.setattr("autotune.tuner.SubprocessExecutor", lambda **options: own)
    for name, given in (("own", None), ("lent", lent)):
        tuner = Tuner(
            "some/model", "some/rows", space="quick", executor=given, run_dir=tmp_path / name
        )
        try:
            tuner.search(Budget(2))
        except BaselineError:
            assert broken
    assert own.is_shut_down
    assert not lent.is_shut_down


def test_the_same_seed_searches_the_same(tmp_path: Path) -> None:
    def digests(name: str, seed: int) -> list[str]:
        # The fake's noise depends on the folder's name.
        executor = make_executor(wall=MemoryWall(capacity_bytes=14 * GIB, noise_ratio=0.0))
        report = make_tuner(tmp_path / name, executor, seed=seed).search(Budget(14))
        return [trial.digest for trial in report.trials]

    assert digests("a", 1) == digests("b", 1)
    assert digests("c", 2) != digests("d", 1)


# --- resuming -----------------------------------------------------------------------------------


def test_resuming_goes_on_numbering_and_probes_nothing_again(run: Path) -> None:
    first = make_tuner(run).search(Budget(8))
    executor = make_executor()
    report = make_tuner(run, executor, resume=True).search(Budget(12))
    new = [trial for trial in report.trials if trial.number >= len(first.trials)]
    assert sum(trial.num_probes > 0 for trial in report.trials) == 12
    ids = [spec.probe_id for spec in executor.submitted if "again" not in spec.probe_id]
    assert ids == [f"{trial.number:04d}" for trial in new if trial.num_probes]
    digests = [trial.digest for trial in report.trials]
    assert len(set(digests)) == len(digests)
    assert [trial.number for trial in report.trials] == list(range(len(report.trials)))
    assert report.baseline is not None
    assert Report.load(run / "report.json") == report


def test_resuming_a_finished_search_with_the_same_budget_probes_nothing(run: Path) -> None:
    first = make_tuner(run).search(Budget(6))
    executor = make_executor()
    report = make_tuner(run, executor, resume=True).search(Budget(6))
    assert executor.submitted == []
    assert report.trials == first.trials
    assert report.pareto_numbers == first.pareto_numbers


def test_a_resumed_search_keeps_its_memory_budget(run: Path) -> None:
    first = make_tuner(run).search(Budget(3))
    # Less memory is free now; results must stay comparable.
    context = make_context(device=make_cpu(free_bytes=30 * GIB))
    report = make_tuner(run, make_executor(context), resume=True).search(Budget(5))
    assert report.budget_bytes == first.budget_bytes


def test_wall_time_adds_up(run: Path) -> None:
    first = make_tuner(run).search(Budget(3))
    saved = replace(first, wall_time_s=1000.0)
    saved.save(run / "report.json")
    report = make_tuner(run, resume=True).search(Budget(4))
    assert report.wall_time_s > 1000.0
    assert report.probe_work_s > first.probe_work_s


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "another/model"}, "model"),
        ({"dataset": "other/rows"}, "the data set: some/rows before, other/rows now"),
        ({"split": "test"}, "split"),
        ({"space": "sft"}, "space"),
        ({"pins": {"lora_r": "16"}}, "--pin lora_r: not given before, 16 now"),
        ({"global_batch": 32}, "--global-batch: 8 before, 32 now"),
        ({"min_coverage": 0.7}, "--min-coverage"),
        ({"memory_budget_bytes": 10 * GIB}, "--memory-budget: not given before, 10.00 GiB"),
        ({"weights": "real"}, "weights"),
        ({"phases": ("eval",)}, "phases"),
    ],
)
def test_another_search_is_not_resumed(change: dict[str, Any], named: str, run: Path) -> None:
    make_tuner(run).search(Budget(2))
    before = (run / "probes.jsonl").read_bytes()
    executor = make_executor()
    with pytest.raises(StudyMismatchError, match=named) as caught:
        make_tuner(run, executor, resume=True, **change).search(Budget(4))
    assert caught.value.hint
    assert executor.submitted == []
    assert (run / "probes.jsonl").read_bytes() == before


def test_other_data_under_the_same_name_is_not_resumed(run: Path) -> None:
    make_tuner(run).search(Budget(2))
    context = make_context(lengths=(10, 20, 30))
    with pytest.raises(StudyMismatchError, match="the content of the data is another"):
        # Tokenised rows are deleted when a search is finished, so they are looked at again.
        make_tuner(run, make_executor(context), resume=True).search(Budget(4))


def test_a_run_folder_is_never_overwritten(run: Path) -> None:
    make_tuner(run).search(Budget(2))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="holds a search already") as caught:
        make_tuner(run).search(Budget(2))
    assert "--resume" in caught.value.hint
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before


def test_there_must_be_something_to_resume(run: Path) -> None:
    with pytest.raises(UsageError, match="no search to resume"):
        make_tuner(run, resume=True).search(Budget(2))


@pytest.mark.parametrize("number", [0, 1, 5])
def test_an_interrupted_search_reports_and_can_go_on(number: int, run: Path) -> None:
    executor = make_executor(fault=interrupting_at(number))
    report = make_tuner(run, executor).search(Budget(9))
    assert report.interrupted
    assert not report.finished
    assert len(report.trials) == number
    assert executor.is_shut_down
    assert Report.load(run / "report.json") == report
    resumed = make_tuner(run, resume=True).search(Budget(9))
    assert resumed.finished
    assert not resumed.interrupted
    assert sum(trial.num_probes > 0 for trial in resumed.trials) == 9
    assert [trial.number for trial in resumed.trials] == list(range(len(resumed.trials)))


def test_an_interrupt_while_confirming_keeps_the_search(run: Path) -> None:
    executor = make_executor(fault=interrupting_at(7))
    report = make_tuner(run, executor).search(Budget(6))
    assert report.interrupted
    assert sum(trial.num_probes > 0 for trial in report.trials) == 6
    resumed = make_tuner(run, resume=True).search(Budget(6))
    assert all(trial.confirmed for trial in resumed.pareto)


def test_a_damaged_journal_is_not_resumed_silently(run: Path) -> None:
    make_tuner(run).search(Budget(4))
    journal = run / "probes.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([lines[0], lines[1][: len(lines[1]) // 2] + "\n", *lines[2:]]))
    with pytest.raises(JournalError, match="line 2"):
        make_tuner(run, resume=True).search(Budget(6))


def test_a_record_that_is_no_trial_is_an_error(run: Path) -> None:
    make_tuner(run).search(Budget(2))
    line = 1 + len((run / "probes.jsonl").read_text().splitlines())
    RunFolder(run).append("trial", {"trial": {"number": 9}})
    with pytest.raises(
        JournalError, match=f"line {line} is damaged: 'outcome' is missing"
    ) as told:
        make_tuner(run, resume=True).search(Budget(6))
    assert "Delete that line" in told.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [("number", "three"), ("coverage", "all"), ("results", 3), ("violations", {"a": "much"})],
)
def test_a_value_of_a_wrong_type_in_a_record_names_its_line(
    field: str, value: Any, run: Path
) -> None:
    make_tuner(run).search(Budget(2))
    journal = run / "probes.jsonl"
    first, *rest = journal.read_text().splitlines()
    record = json.loads(first)
    record["trial"][field] = value
    journal.write_text("\n".join([json.dumps(record), *rest]) + "\n")
    with pytest.raises(JournalError, match="line 1 is damaged") as told:
        make_tuner(run, resume=True).search(Budget(6))
    assert "Delete that line" in told.value.hint


def test_a_budget_of_a_wrong_type_is_no_traceback(run: Path) -> None:
    make_tuner(run).search(Budget(2))
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "budget_bytes": "lots"}))
    with pytest.raises(JournalError, match="budget_bytes is 'lots'"):
        make_tuner(run, resume=True).search(Budget(6))


def test_a_journal_cut_off_by_a_crash_is_resumed(run: Path) -> None:
    make_tuner(run).search(Budget(4))
    lost = len((run / "probes.jsonl").read_text().splitlines())
    with (run / "probes.jsonl").open("rb+") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 40)
    report = make_tuner(run, resume=True).search(Budget(6))
    assert report.finished
    assert len((run / "probes.jsonl").read_text().splitlines()) > lost - 1


def test_a_baseline_that_the_journal_lost_is_probed_again(run: Path) -> None:
    make_tuner(run).search(Budget(4))
    journal = run / "probes.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("trial", {}).get("number") != 0]
    assert len(kept) < len(lines)
    journal.write_text("".join(kept))
    executor = make_executor()
    report = make_tuner(run, executor, resume=True).search(Budget(5))
    assert executor.submitted[0].probe_id.startswith("0000")
    assert report.baseline is not None
    assert [trial.number for trial in report.trials] == list(range(len(report.trials)))


def test_a_study_cut_off_by_a_crash_is_resumed(run: Path) -> None:
    make_tuner(run).search(Budget(3))
    with (run / "study.journal").open("a") as file:
        file.write('{"op_code": 4, "worker_i')
    assert make_tuner(run, resume=True).search(Budget(5)).finished
    assert make_tuner(run, resume=True).search(Budget(6)).finished


@pytest.mark.parametrize("damage", ["nonsense", '"text"', "{}", '{"op_code": 99}', "[1]", "\0"])
def test_a_damaged_study_says_so(damage: str, run: Path) -> None:
    make_tuner(run).search(Budget(3))
    study = run / "study.journal"
    study.write_text(damage + "\n" + study.read_text())
    with pytest.raises(JournalError, match=r"study\.journal is damaged") as told:
        make_tuner(run, resume=True).search(Budget(5))
    assert "Delete it and continue with --resume" in told.value.hint
    # What the hint says is true.
    study.unlink()
    report = make_tuner(run, resume=True).search(Budget(5))
    assert report.finished
    assert [trial.number for trial in report.trials][:3] == [0, 1, 2]


@pytest.mark.parametrize("damage", [None, "", "{", '{"schema": 1, "wall_time_s": "long"}'])
def test_a_missing_or_damaged_report_is_written_again(damage: str | None, run: Path) -> None:
    make_tuner(run).search(Budget(3))
    (run / "report.json").unlink()
    if damage is not None:
        (run / "report.json").write_text(damage)
    report = make_tuner(run, resume=True).search(Budget(3))
    assert Report.load(run / "report.json") == report


# --- what goes wrong ----------------------------------------------------------------------------


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
    executor = make_executor(wall=MemoryWall(capacity_bytes=1 * GIB))
    report = make_tuner(run, executor).search(Budget(6))
    assert report.finished
    assert report.pareto == ()
    assert report.picks() == {}
    assert not list((run / "configs").glob("*")) if (run / "configs").exists() else True
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


def test_time_limits_a_search(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Slow(Silent):
        def on_trial(self, trial: Any, report: Report) -> None:
            now[0] += 10.0

    report = make_tuner(run, listener=Slow()).search(Budget(None, 35.0))
    assert sum(trial.num_probes > 0 for trial in report.trials) == 4
    # Confirming may take a quarter more: until 43.75 s, so one starts at 40 s.
    assert sum(trial.confirmed for trial in report.trials) == 1
    assert report.finished
    assert report.wall_time_s == pytest.approx(50.0)


def test_budget_grace() -> None:
    assert budget_grace(Budget(3)) == 0.0
    assert budget_grace(Budget(None, 100.0)) == 25.0


def test_the_default_run_folder_is_named_after_the_model() -> None:
    path = default_run_dir("Qwen/Qwen3-0.6B")
    assert path.parent == Path("runs")
    assert path.name.startswith("Qwen3-0.6B-")
