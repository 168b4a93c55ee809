from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import JournalError, StudyMismatchError, UsageError
from autotune.runfolder import RunFolder

IDENTITY = {"model": "a", "phases": ["eval"], "pins": {}, "global_batch": 8}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.start(resume=False)
    return folder


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.start(resume=False)
    assert folder.path.is_dir()
    assert folder.work.is_dir()
    assert folder.path.is_absolute()


def test_a_search_is_not_overwritten(folder: RunFolder) -> None:
    folder.write_run(IDENTITY, {})
    folder.release()
    with pytest.raises(UsageError, match="holds a search already") as caught:
        RunFolder(folder.path).start(resume=False)
    assert "--resume" in caught.value.hint
    RunFolder(folder.path).start(resume=True)


def test_a_search_must_be_there_to_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no search to resume"):
        RunFolder(tmp_path / "gone").start(resume=True)
    assert not (tmp_path / "gone").exists()


def test_a_strangers_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        RunFolder(tmp_path).start(resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/deep"):
        with pytest.raises(UsageError, match="cannot be a run folder"):
            RunFolder(tmp_path / name).start(resume=False)


def test_a_search_that_recorded_nothing_may_be_started_again(folder: RunFolder) -> None:
    (folder.work / "rows").touch()
    folder.release()
    RunFolder(folder.path).start(resume=False)


def test_one_search_writes_at_a_time(folder: RunFolder) -> None:
    folder.write_run(IDENTITY, {})
    script = (
        "import sys\n"
        "from autotune.errors import UsageError\n"
        "from autotune.runfolder import RunFolder\n"
        "try:\n"
        "    RunFolder(sys.argv[1]).start(resume=True)\n"
        "except UsageError as error:\n"
        "    print(error.message)\n"
        "else:\n"
        "    print('free')\n"
    )

    def other() -> str:
        command = [sys.executable, "-c", script, str(folder.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "another search is writing" in other()
    folder.release()
    folder.release()
    assert other() == "free\n"


def test_a_lock_left_by_a_killed_search_does_not_hold(folder: RunFolder) -> None:
    folder.write_run(IDENTITY, {})
    folder.release()
    assert (folder.path / ".lock").exists()
    RunFolder(folder.path).start(resume=True)


def test_the_identity_is_compared_as_json(folder: RunFolder) -> None:
    folder.write_run(IDENTITY, {"run_id": "x"})
    assert folder.read_run()["run_id"] == "x"
    folder.check_identity({**IDENTITY, "phases": ("eval",)})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "b"}, "the model: a before, b now"),
        ({"phases": []}, "--phases: eval before, not given now"),
        ({"pins": {"a": "1"}}, "--pin a: not given before, 1 now"),
        ({"new": 1}, "new: not given before, 1 now"),
    ],
)
def test_what_differs_is_named(change: dict, named: str, folder: RunFolder) -> None:
    folder.write_run(IDENTITY, {})
    with pytest.raises(StudyMismatchError) as caught:
        folder.check_identity({**IDENTITY, **change})
    assert f"belongs to another search ({named})" in caught.value.message


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"schema": "x"}', '{"schema": 2}', "null"]
)
def test_a_run_file_that_cannot_be_read(content: str, folder: RunFolder) -> None:
    folder.run_file.write_text(content)
    with pytest.raises(JournalError) as caught:
        folder.read_run()
    assert "run.json" in caught.value.message


@pytest.mark.parametrize(
    "values",
    [
        {"budget_bytes": "lots"},
        {"budget_bytes": 1.5},
        {"budget_bytes": True},
        {"budget_bytes": -1},
        {"budget_bytes": [1]},
        {"run_id": 7},
        {"identity": []},
        {"identity": "x"},
        {"schema": True},
        {"schema": 1.5},
    ],
    ids=str,
)
def test_a_value_of_a_wrong_type_in_a_run_file_is_named(values: dict, folder: RunFolder) -> None:
    record = {"schema": 1, "identity": IDENTITY, "run_id": "x", "budget_bytes": 1, **values}
    folder.run_file.write_text(json.dumps(record))
    with pytest.raises(JournalError, match=next(iter(values))) as caught:
        folder.read_run()
    assert "--run-dir" in caught.value.hint


def test_a_run_file_without_identity_is_an_error_of_ours(folder: RunFolder) -> None:
    folder.run_file.write_text('{"schema": 1}')
    with pytest.raises(JournalError):
        folder.check_identity(IDENTITY)


def test_json_is_written_as_a_whole(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder.path / "x.json"
    folder.write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JournalError, match="No space left"):
        folder.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert not list(folder.path.glob(".x.json*"))


def test_what_to_do_about_a_full_disk_depends_on_what_was_recorded(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(JournalError) as caught:
            folder.write_json(folder.work / "prepared.json", {})
    assert "same command again" in caught.value.hint
    assert "--resume" not in caught.value.hint
    folder.write_run(IDENTITY, {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JournalError) as caught:
        folder.write_json(folder.work / "prepared.json", {})
    assert "--resume" in caught.value.hint


def test_looking_at_a_folder_leaves_no_trace(tmp_path: Path) -> None:
    RunFolder(tmp_path / "deep" / "run").check(resume=False)
    assert list(tmp_path.iterdir()) == []
    busy = RunFolder(tmp_path / "busy")
    busy.start(resume=False)
    busy.write_run(IDENTITY, {})
    with pytest.raises(UsageError, match="another search is writing"):
        RunFolder(busy.path).check(resume=True)
    busy.release()
    RunFolder(busy.path).check(resume=True)


def test_records(folder: RunFolder) -> None:
    folder.append("trial", {"number": 1})
    assert folder.records() == [(1, {"schema": 1, "kind": "trial", "number": 1})]


def test_scratch_is_deleted_and_results_are_kept(folder: RunFolder) -> None:
    (folder.work / "rows").touch()
    folder.probe_folder("0001").mkdir(parents=True)
    folder.clear_work()
    folder.clear_work()
    assert not folder.work.exists()
    assert folder.probe_folder("0001").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError):
        RunFolder(tmp_path / "x").start(resume=False)


def test_a_refused_search_leaves_no_folder_behind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(resume=False)
    (folder.work / "scratch").write_text("x")
    folder.release()
    assert not (tmp_path / "run").exists()


def test_a_recorded_search_is_kept_when_the_lock_is_given_up(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(resume=False)
    folder.write_run({"model": "m"}, {})
    folder.release()
    assert folder.run_file.exists()


def test_a_folder_that_lost_its_record_is_told_from_a_new_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UsageError) as caught:
        folder.check(resume=True)
    assert "Leave --resume away" in caught.value.hint
    folder.path.mkdir()
    folder.journal_file.write_text("{}\n")
    for look in (folder.check, folder.start):
        with pytest.raises(UsageError) as caught:
            look(resume=True)
        assert "run.json" in caught.value.message
        assert "Leave --resume away" not in caught.value.hint
        assert "--run-dir" in caught.value.hint
