"""Whole searches whose sampler learns from predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuner_kit import GIB, ROOMY, make_executor
from tuner_kit import make_tuner as make_quick_tuner

from autotune import screen
from autotune.errors import UsageError
from autotune.listener import Budget, Silent
from autotune.probe.spec import ProbeSpec
from autotune.report.model import Report
from autotune.report.terminal import render_text
from autotune.search.guess import Guess, Lesson
from autotune.search.study import Study
from autotune.testing.contexts import make_context, make_gpu
from autotune.testing.fakes import FakeExecutor
from autotune.tuner import Tuner

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

PINS = {"batching": "padded"}
SLOW = replace(ROOMY, token_time_s=2e-3)
"""A machine on which a few probes take long enough to predict before them."""
CARD = make_context(device=make_gpu(label="NVIDIA H200", total_bytes=80 * GIB))


def make_tuner(*arguments: Any, **options: Any) -> Tuner:
    """Return a search that predicts before it probes."""
    return make_quick_tuner(*arguments, screen=True, **options)


class Sampler:
    """What a sampler that wants guesses is told, and what runs meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[Sequence[Guess], Sequence[Lesson]]] = []
        self.virtual = FakeExecutor(wall=ROOMY)
        self.fault: Any = None
        monkeypatch.setattr(Study, "wants_guesses", True)
        monkeypatch.setattr(Study, "inform", self.inform)
        monkeypatch.setattr(screen, "open_virtual", self.open)

    def inform(self, guesses: Sequence[Guess], lessons: Sequence[Lesson] = ()) -> None:
        self.told.append((guesses, lessons))

    def open(self, *args: Any) -> FakeExecutor:
        self.virtual = FakeExecutor(wall=ROOMY, fault=self.fault)
        return self.virtual


class Watch(Silent):
    """Keeps the order in which things happen."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_probe(self, number: int, candidate: Any) -> None:
        self.heard.append(f"probe {number}")

    def on_screen(self, num_done: int, num_all: int) -> None:
        self.heard.append("screen")


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    return Sampler(monkeypatch)


def test_the_sampler_hears_of_predictions_after_the_baseline(run: Path, sampler: Sampler) -> None:
    watch = Watch()
    report = make_tuner(run, make_executor(wall=SLOW), pins=PINS, listener=watch).search(Budget(5))
    ((guesses, lessons),) = sampler.told
    assert len(guesses) == len(sampler.virtual.submitted) > 10
    assert lessons == ()
    assert guesses[0].candidate == report.trials[0].candidate
    assert watch.heard[:2] == ["probe 0", "screen"]
    first, last = watch.heard.index("screen"), len(watch.heard) - watch.heard[::-1].index("screen")
    assert set(watch.heard[first:last]) == {"screen"}
    assert sampler.virtual.is_shut_down
    # They are guesses, no trials.
    assert len(report.trials) <= 5
    assert {trial.source for trial in report.trials} == {"measured"}


def test_the_report_says_what_was_predicted(run: Path, sampler: Sampler) -> None:
    report = make_tuner(run, make_executor(wall=SLOW), pins=PINS).search(Budget(5))
    assert Report.load(run / "report.json") == report
    facts = report.screening
    assert facts["num_predicted"] == len(sampler.virtual.submitted)
    assert facts["num_failed"] == 0
    assert 0 <= facts["time_s"] <= report.wall_time_s
    text = " ".join(render_text(report).split())
    assert f"to choose what to probe: {facts['num_predicted']} of" in text
    assert (run / "predictions.jsonl").exists()
    assert not (run / "work").exists()


def test_without_such_a_sampler_nothing_is_predicted(run: Path) -> None:
    report = make_tuner(run).search(Budget(4))
    assert report.screening == {}
    assert "screening" not in json.loads((run / "report.json").read_text())
    assert not (run / "predictions.jsonl").exists()
    assert "to choose what to probe" not in render_text(report)


def test_a_virtual_card_is_not_predicted_for(run: Path, sampler: Sampler) -> None:
    device = make_gpu(name="virtual:rtx-4090", label="NVIDIA GeForce RTX 4090 (virtual)")
    executor = make_executor(make_context(device=device))
    report = make_tuner(run, executor, device="virtual:rtx-4090").search(Budget(3))
    assert report.screening == {}
    assert sampler.told == []


def test_a_short_search_says_why_nothing_was_predicted(run: Path, sampler: Sampler) -> None:
    report = make_tuner(run, pins=PINS).search(Budget(2))
    assert report.screening == {}
    assert any(
        f"before they were probed: {screen.SHARE:.0%} of" in notice for notice in report.notices
    )


def test_ctrl_c_while_predicting_ends_in_order_and_resuming_goes_on(
    run: Path, sampler: Sampler
) -> None:
    def interrupted(spec: ProbeSpec) -> None:
        if spec.probe_id == "0006":
            raise KeyboardInterrupt

    sampler.fault = interrupted
    report = make_tuner(run, make_executor(wall=SLOW), pins=PINS).search(Budget(5))
    assert report.interrupted
    assert len(report.trials) == 1
    assert report.screening["num_predicted"] == 5
    assert sampler.virtual.is_shut_down
    sampler.fault = None
    report = make_tuner(run, make_executor(wall=SLOW), pins=PINS, resume=True).search(Budget(5))
    ((guesses, _),) = sampler.told
    assert report.finished
    assert len(sampler.virtual.submitted) == len(guesses) - 5


def test_lessons_of_earlier_runs_reach_the_sampler(tmp_path: Path, sampler: Sampler) -> None:
    make_tuner(tmp_path / "one", make_executor(wall=SLOW), pins=PINS).search(Budget(5))
    sampler.told.clear()
    options: dict[str, Any] = {"pins": PINS, "learn_from": [tmp_path / "one"], "seed": 3}
    tuner = make_tuner(tmp_path / "two", make_executor(wall=SLOW), **options)
    report = tuner.search(Budget(5))
    ((_, lessons),) = sampler.told
    assert lessons
    assert all(None not in lesson.ratios for lesson in lessons)
    (notice,) = (notice for notice in report.notices if "learn" in notice)
    assert f"The sampler learnt from {tmp_path / 'one'} how far predictions of" in notice


def test_a_run_on_another_device_is_refused_before_anything_is_written(
    tmp_path: Path, sampler: Sampler
) -> None:
    make_tuner(tmp_path / "one", pins=PINS).search(Budget(2))
    options: dict[str, Any] = {"pins": PINS, "learn_from": [tmp_path / "one"]}
    tuner = make_tuner(tmp_path / "two", make_executor(CARD), **options)
    with pytest.raises(UsageError, match="may not hold here"):
        tuner.plan(check=True)
    with pytest.raises(UsageError, match="may not hold here"):
        tuner.search(Budget(2))
    assert not (tmp_path / "two").exists()
    options["learn_anyway"] = True
    make_tuner(tmp_path / "two", make_executor(CARD), **options).search(Budget(2))


def test_a_sampler_that_does_not_learn_says_so(tmp_path: Path) -> None:
    make_tuner(tmp_path / "one", pins=PINS).search(Budget(2))
    tuner = make_tuner(tmp_path / "two", pins=PINS, learn_from=[tmp_path / "one"])
    report = tuner.search(Budget(2))
    assert any("--sampler learned" in notice for notice in report.notices)
