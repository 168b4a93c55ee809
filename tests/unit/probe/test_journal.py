from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from autotune.errors import JournalError
from autotune.probe import journal


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "probes.jsonl"
    for number in range(3):
        journal.append(path, "trial", {"number": number, "text": "ünïcode\nline"})
    return path


def test_records_come_back_in_order(file: Path) -> None:
    records = journal.read(file)
    assert [record["number"] for record in records] == [0, 1, 2]
    assert records[0] == {"schema": 1, "kind": "trial", "number": 0, "text": "ünïcode\nline"}
    assert len(file.read_text().splitlines()) == 3


def test_no_file_is_no_record(tmp_path: Path) -> None:
    assert journal.read(tmp_path / "nowhere.jsonl") == []
    (tmp_path / "empty.jsonl").touch()
    assert journal.read(tmp_path / "empty.jsonl") == []


@pytest.mark.parametrize("length", [1, 5, 20, 40])
def test_a_last_line_that_was_cut_off_is_dropped(file: Path, length: int) -> None:
    whole = file.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    file.write_bytes(whole[: len(whole) - len(line) + length])
    assert [record["number"] for record in journal.read(file)] == [0, 1]
    journal.append(file, "trial", {"number": 9})
    assert [record["number"] for record in journal.read(file)] == [0, 1, 9]


def test_a_last_line_without_its_newline_is_cut_off(file: Path) -> None:
    # The record may be whole, but it was not synced as a whole; reading keeps what it can.
    file.write_bytes(file.read_bytes()[:-1])
    assert [record["number"] for record in journal.read(file)] == [0, 1, 2]


def test_a_whole_record_without_newline_survives_the_next_one(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    before = [record["number"] for record in journal.read(file)]
    journal.append(file, "trial", {"number": 9})
    assert [record["number"] for record in journal.read(file)] == [*before, 9]


def test_only_a_torn_first_line_is_an_empty_journal(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    path.write_text('{"schema": 1, "ki')
    assert journal.read(path) == []
    journal.append(path, "trial", {"number": 0})
    assert [record["number"] for record in journal.read(path)] == [0]


@pytest.mark.parametrize("damage", ['{"schema": 1, "ki', "nonsense", "[1]", '{"kind": "trial"}'])
@pytest.mark.parametrize("line", [1, 2, 3])
def test_damage_anywhere_else_names_the_line(file: Path, line: int, damage: str) -> None:
    lines = file.read_text().splitlines()
    lines[line - 1] = damage
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(JournalError, match=f"line {line} is damaged") as caught:
        journal.read(file)
    assert caught.value.hint


def test_bytes_that_are_no_text_are_damage(file: Path) -> None:
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(whole[0] + b"\xff\xfe\n" + whole[2])
    with pytest.raises(JournalError, match="line 2"):
        journal.read(file)


def test_blank_lines_are_passed_over(file: Path) -> None:
    file.write_text(file.read_text().replace("\n", "\n\n") + "\n\n")
    assert len(journal.read(file)) == 3


@pytest.mark.parametrize("schema", ["2", '"two"', "null"])
def test_another_schema_is_refused(file: Path, schema: str) -> None:
    with file.open("a") as stream:
        stream.write(f'{{"schema": {schema}, "kind": "trial"}}\n')
    with pytest.raises(JournalError):
        journal.read(file)


def test_a_newer_schema_says_to_update(file: Path) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps({"schema": journal.SCHEMA + 1, "kind": "trial"}) + "\n")
    with pytest.raises(JournalError, match="newer version") as caught:
        journal.read(file)
    assert "Update" in caught.value.hint


def test_a_full_disk_is_an_error_of_ours(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JournalError, match="No space left") as caught:
        journal.append(file, "trial", {"number": 3})
    assert "--resume" in caught.value.hint
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_device_that_is_really_full(tmp_path: Path) -> None:
    (tmp_path / "probes.jsonl").symlink_to("/dev/full")
    with pytest.raises(JournalError, match="No space left"):
        journal.append(tmp_path / "probes.jsonl", "trial", {"number": 3})


def test_a_folder_that_is_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(JournalError):
        journal.append(tmp_path / "gone" / "probes.jsonl", "trial", {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(JournalError):
        journal.read(tmp_path / "folder")
