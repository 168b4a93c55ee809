"""Searches that go on: interrupted, damaged, or asked for as another search."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuner_kit import GIB, make_executor, make_tuner

from autotune.errors import JournalError, StudyMismatchError, UsageError
from autotune.listener import Budget
from autotune.probe.spec import ProbeSpec
from autotune.report.model import Report
from autotune.runfolder import RunFolder
from autotune.testing.contexts import make_context, make_cpu

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def interrupting_at(number: int) -> Callable[[ProbeSpec], None]:
    """Return a fault that is Ctrl-C while the probe of that number is started."""
    count = iter(range(10**9))

    def fault(spec: ProbeSpec) -> None:
        if next(count) == number:
            raise KeyboardInterrupt

    return fault


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
    with pytest.raises(StudyMismatchError) as caught:
        make_tuner(run, executor, resume=True, **change).search(Budget(4))
    assert named in caught.value.message
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
