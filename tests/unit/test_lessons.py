"""What earlier runs teach, and when they are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tuner_kit import make_executor, make_tuner

from autotune import lessons, objectives
from autotune.errors import JournalError, UsageError
from autotune.lessons import Learnt
from autotune.listener import Budget
from autotune.probe import screened
from autotune.probe.result import Outcome
from autotune.probe.screened import Screened
from autotune.report.model import Report
from autotune.runfolder import RunFolder
from autotune.testing.contexts import make_context, make_cpu, make_gpu
from autotune.testing.searches import make_fake_plan
from autotune.tuner import load_trials

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

OBJECTIVES = (objectives.peak_memory(), objectives.tokens_per_s())


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Return the folder of an earlier run, without predictions."""
    make_tuner(tmp_path / "earlier").search(Budget(4))
    return tmp_path / "earlier"


def predict(folder: Path, *, values: dict[str, float], peak_bytes: int = 1 << 30) -> None:
    """Leave such a prediction of each trial."""
    for trial in load_trials(RunFolder(folder)):
        prediction = Screened(
            digest=trial.digest,
            candidate=trial.candidate,
            outcome=Outcome.OK,
            values=values,
            peak_bytes=peak_bytes,
        )
        screened.append(folder / screened.FILE_NAME, prediction)


def learn(path: Path, tmp_path: Path, *, anyway: bool = False, **asked: Any) -> Learnt:
    plan = make_fake_plan(tmp_path / "new", **asked)
    folders = lessons.check_folders([path], RunFolder(tmp_path / "new"))
    return lessons.learn(folders, plan, OBJECTIVES, anyway=anyway)


def test_a_lesson_is_measured_over_predicted(earlier: Path, tmp_path: Path) -> None:
    predict(earlier, values={"tokens_per_s": 100.0, "peak_memory": 2.0 * (1 << 30)})
    found = learn(earlier, tmp_path)
    trials = [trial for trial in load_trials(RunFolder(earlier)) if trial.outcome is Outcome.OK]
    assert len(found.lessons) == len(trials) > 0
    for lesson, trial in zip(found.lessons, trials, strict=True):
        assert lesson.candidate == trial.candidate
        assert trial.peak_bytes is not None
        assert trial.tokens_per_s is not None
        memory, rate = lesson.ratios
        assert memory == pytest.approx(trial.peak_bytes / (2 << 30))
        assert rate == pytest.approx(trial.tokens_per_s.median / 100.0)
        assert lesson.load_ratio == pytest.approx(trial.peak_bytes / (1 << 30))


def test_an_objective_that_was_not_predicted_teaches_nothing(
    earlier: Path, tmp_path: Path
) -> None:
    predict(earlier, values={"epoch_time": 3.0})
    assert {lesson.ratios for lesson in learn(earlier, tmp_path).lessons} == {(None, None)}


def test_failures_on_either_side_teach_nothing(tmp_path: Path) -> None:
    executor = make_executor(fault=lambda spec: Outcome.TIMEOUT)
    make_tuner(tmp_path / "failed", executor).search(Budget(3))
    predict(tmp_path / "failed", values={"tokens_per_s": 1.0})
    found = learn(tmp_path / "failed", tmp_path)
    assert found.lessons == ()
    assert "nothing to learn" in found.notices[0]


def test_a_run_without_predictions_or_trials_gives_a_notice(earlier: Path, tmp_path: Path) -> None:
    found = learn(earlier, tmp_path)
    assert found.lessons == ()
    assert str(earlier) in found.notices[0]
    assert "--sampler learned" in found.notices[0]
    (earlier / "report.json").unlink()  # killed before the first probe ended
    assert learn(earlier, tmp_path).notices == found.notices


@pytest.mark.parametrize(
    ("changes", "there", "here"),
    [
        ({"device": make_cpu(label="Other CPU")}, "cpu Test CPU there", "cpu Other CPU here"),
        ({"device": make_gpu(label="Test CPU")}, "cpu Test CPU there", "cuda Test CPU here"),
    ],
)
def test_another_device_is_refused_unless_asked_for(
    earlier: Path, tmp_path: Path, changes: dict[str, Any], there: str, here: str
) -> None:
    predict(earlier, values={"tokens_per_s": 1.0})
    context = make_context(**changes)
    with pytest.raises(UsageError) as caught:
        learn(earlier, tmp_path, context=context)
    assert there in caught.value.message
    assert here in caught.value.message
    assert "--learn-anyway" in caught.value.hint
    assert learn(earlier, tmp_path, context=context, anyway=True).lessons


@pytest.mark.parametrize("package", lessons.DECIDING)
def test_other_versions_are_refused(earlier: Path, tmp_path: Path, package: str) -> None:
    report = Report.load(earlier / "report.json")
    data = report.to_dict()
    data["versions"][package] = "0.0.1"
    Report.from_dict(data).save(earlier / "report.json")
    with pytest.raises(UsageError, match=rf"{package} 0\.0\.1 there, \S+ here"):
        learn(earlier, tmp_path)


def test_another_trainer_is_refused(earlier: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trainer sft there, dpo here"):
        learn(
            earlier,
            tmp_path,
            trainer="dpo",
            space="dpo",
            context=make_context(trainer="dpo"),
        )


def test_a_folder_must_hold_a_search(tmp_path: Path) -> None:
    own = RunFolder(tmp_path / "new")
    with pytest.raises(UsageError, match="there is no run folder") as caught:
        lessons.check_folders([tmp_path / "none"], own)
    assert "--run-dir" in caught.value.hint
    with pytest.raises(UsageError, match="holds no search"):
        lessons.check_folders([tmp_path], own)
    own.path.mkdir()
    with pytest.raises(UsageError, match="cannot learn from itself"):
        lessons.check_folders([tmp_path / "new"], own)


def test_a_damaged_report_is_an_error(earlier: Path, tmp_path: Path) -> None:
    (earlier / "report.json").write_text("{")
    with pytest.raises(JournalError):
        learn(earlier, tmp_path)


def test_a_folder_that_is_named_twice_teaches_once(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "report.json").write_text("{}")
    named = [tmp_path / "one", f"{tmp_path}/one/", tmp_path / "one" / ".." / "one"]
    found = lessons.check_folders(named, RunFolder(tmp_path / "own"))
    assert len(found) == 1


def test_what_was_learnt_is_said(earlier: Path, tmp_path: Path) -> None:
    predict(earlier, values={"tokens_per_s": 100.0})
    (notice,) = learn(earlier, tmp_path).notices
    assert str(earlier) in notice
    assert "how far predictions of" in notice


def test_a_copy_counts_once_and_a_copy_of_the_own_run_is_refused(
    earlier: Path, tmp_path: Path
) -> None:
    predict(earlier, values={"tokens_per_s": 100.0})
    copy = tmp_path / "copy"
    shutil.copytree(earlier, copy)
    plan = make_fake_plan(tmp_path / "new")
    folders = lessons.check_folders([earlier, copy], RunFolder(tmp_path / "new"))
    once = lessons.learn(folders[:1], plan, OBJECTIVES, anyway=False)
    twice = lessons.learn(folders, plan, OBJECTIVES, anyway=False)
    assert len(twice.lessons) == len(once.lessons) > 0
    assert any("counts once" in notice for notice in twice.notices)
    own_id = RunFolder(earlier).read_run()["run_id"]
    with pytest.raises(UsageError, match="a copy of itself"):
        lessons.learn(folders[1:], plan, OBJECTIVES, anyway=False, own_id=own_id)


def test_a_candidate_that_no_knob_can_have_is_damage(earlier: Path, tmp_path: Path) -> None:
    predict(earlier, values={"tokens_per_s": 100.0})
    file = earlier / screened.FILE_NAME
    record = json.loads(file.read_text().splitlines()[-1])
    record["prediction"]["candidate"]["max_length"] = [1, 2]
    with file.open("a") as lines:
        lines.write(json.dumps(record) + "\n")
    with pytest.raises(JournalError, match=r"candidate\.max_length"):
        learn(earlier, tmp_path)
