"""No password leaves the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tuner_kit import make_tuner

from autotune import Budget
from autotune.errors import PrerequisiteError
from autotune.masking import masked, masked_command
from autotune.search.storage import check_storage, open_storage

SECRET = "hunter2"
URLS = [
    f"postgresql://me:{SECRET}@db.example:5432/studies",
    f"mysql+pymysql://me:{SECRET}@db.example/studies?charset=utf8",
    f"postgresql://:{SECRET}@db.example/studies",
    f"postgresql://me:{SECRET}/@{SECRET}@db.example/studies",
    f"postgresql://db.example/studies?user=me&password={SECRET}&connect_timeout=3",
    f"redis://:{SECRET}@db.example:6379",
    f"nonsense://me:{SECRET}@db.example",
    f"nonsense://me:{SECRET} {SECRET}@db.example",
]


@pytest.mark.parametrize("url", URLS)
def test_a_password_is_masked(url: str) -> None:
    line = shlex.join(["autotune", "search", "a/b", "c/d", f"--study={url}", "--seed", "1"])
    assert SECRET not in masked_command(line)
    assert "***" in masked_command(line)
    if " " not in url:  # what is no command line has no words to tell a blank's side by
        assert SECRET not in masked_command(f"{line} 'open")
    assert "db.example" in masked_command(line)
    assert "--seed 1" in masked_command(line)


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////mnt/shared/study.db",
        "postgresql://me@db.example/studies",
        "postgresql://db.example:5432/studies",
        "autotune search a/b 'c d' --run-dir runs/me@home --pin lora_r=8",
        "see https://example.org/a:b and me@example.org",
        "",
    ],
)
def test_what_holds_none_stays_as_it_is(text: str) -> None:
    assert masked(text) == masked_command(text) == text


@pytest.mark.parametrize("url", URLS)
def test_no_error_of_the_storage_tells_it(url: str) -> None:
    for look in (check_storage, open_storage):
        with pytest.raises(PrerequisiteError) as caught:
            look(url)
        assert SECRET not in str(caught.value)
        assert "cannot be opened" in caught.value.message


def test_no_record_holds_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = f"autotune search a/b c/d --study {URLS[0]}"
    search = make_tuner(folder, command=command)
    report = search.search(Budget(2))
    for text in (report.command, search.resume_command, *report.warnings):
        assert SECRET not in text
    for file in folder.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file
    assert "me:***@db.example" in json.loads((folder / "run.json").read_text())["command"]
