"""Whole searches through the Python API, on a machine that does not exist."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tuner_kit import GIB, make_executor, make_tuner

from autotune.errors import BaselineError
from autotune.listener import Budget, Silent
from autotune.objectives import memory_headroom
from autotune.probe.result import Outcome
from autotune.report.model import Report
from autotune.runfolder import RunFolder
from autotune.testing.contexts import make_context
from autotune.testing.fakes import MemoryWall
from autotune.tuner import Tuner, budget_grace, default_run_dir

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


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
    assert report.sampler == "learned"
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


def test_a_search_that_is_done_says_so_and_how_to_go_on(run: Path) -> None:
    report = make_tuner(run).search(Budget(trials=30, min_gain=0.3))
    (notice,) = [text for text in report.notices if "ended after" in text]
    assert f"ended after {len(report.trials)} of 30 trials" in notice
    assert "30.0%" in notice
    assert "--min-gain 0 with --resume" in notice
    assert report.finished
    resumed = make_tuner(run, resume=True).search(Budget(trials=30, min_gain=0.0))
    assert sum(trial.num_probes > 0 for trial in resumed.trials) == 30
    assert not any("ended after" in text for text in resumed.notices)
