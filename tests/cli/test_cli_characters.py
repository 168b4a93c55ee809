"""Characters that a terminal obeys, or cannot show, in what other people have named."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_kit import AUTOTUNE, SEARCH, Done

from autotune.cli import streams
from autotune.report.model import Report
from autotune.testing.contexts import make_context
from autotune.testing.searches import make_answers

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[8m\x9b31m\u202ehidden\u2066\u2028\r\x00"
NEVER = "\x1b\x07\x9b\u202e\u2066\u2028\r\x00"


def is_clean(text: str) -> bool:
    return not set(text) & set(NEVER)


@pytest.fixture
def spoilt(found: Path) -> Path:
    """Return a run folder of somebody's whose report holds what a terminal obeys."""
    record = json.loads((found / "report.json").read_text())
    for name in ("model", "dataset", "budget_source", "command", "sampler"):
        record[name] = f"evil {EVIL}"
    record["warnings"] = record["notices"] = [EVIL]
    record["device"]["label"] = EVIL
    record["removed_values"] = [[EVIL, EVIL]]
    (found / "report.json").write_text(json.dumps(record))
    return found


@pytest.mark.parametrize("color", [False, True])
def test_a_shared_report_cannot_command_the_terminal(
    color: bool, spoilt: Path, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    if color:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    done = cli("report", spoilt, "--verbose")
    assert done.code == 0
    assert "hidden" in done.out
    assert done.out.count("\n") > 10
    if not color:
        assert is_clean(done.out)
        return
    # Our own styles survive, and nothing but those.
    assert "\x1b[1m" in done.out
    assert "\x1b[2J" not in done.out
    assert "\x1b[8m" not in done.out
    assert "\x1b]" not in done.out
    assert is_clean(done.out.replace("\x1b[", ""))


def test_what_a_program_reads_keeps_every_character(
    spoilt: Path, cli: Callable[..., Done]
) -> None:
    assert cli("report", spoilt, "--json").json["model"] == f"evil {EVIL}"
    done = cli("export", spoilt, "--pick", "0")
    assert done.code == 0
    assert is_clean(done.out)
    assert yaml.safe_load(done.out) == Report.load(spoilt / "report.json").pick(0).config


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", f"nowhere{EVIL[:-1]}"),
        ("gpus", f"{EVIL[:-1]}.toml"),
        ("estimate", f"{EVIL[:-1]}.yaml", "--device", "t4"),
        ("search", "a/b", "c/d", "--trainer", EVIL[:-1]),
        ("spaces", f"--{EVIL[:-1]}"),
        (EVIL[:-1],),
    ],
    ids=lambda item: item[0][:8],
)
def test_names_in_errors_are_harmless(
    arguments: tuple[str, ...], cli: Callable[..., Done]
) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert "hidden" in done.err
    assert is_clean(done.err)


@pytest.mark.parametrize("color", [False, True])
def test_progress_is_harmless(
    color: bool,
    machine: dict[str, Any],
    cli: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if color:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    context = make_context()
    answers = make_answers(context)
    answers["prepare"]["model"]["architecture"] = EVIL
    machine["answers"] = answers
    done = cli(*SEARCH, "--trials", 2, "--run-dir", "here")
    assert done.code == 0, done.err
    assert "hidden" in done.err
    for evil in ("\x1b]", "\x1b[2J", "\x1b[8m", "\x9b", "\u202e", "\x07"):
        assert evil not in done.err + done.out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("café 東京 👩\u200d💻", "café 東京 👩\u200d💻"),
        ("\x1b[1m", "\N{SYMBOL FOR ESCAPE}[1m"),
        ("\x7f\x9b", "\N{SYMBOL FOR DELETE}\ufffd"),
        ("\u202e\u2066\u200f\udc80", "\ufffd" * 4),
    ],
)
def test_what_is_replaced(text: str, shown: str) -> None:
    assert streams.harmless(text) == shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_that_cannot_show_a_character(encoding: str, found: Path) -> None:
    record = json.loads((found / "report.json").read_text())
    record["device"] |= {"name": "virtual:t4", "label": "東京"}
    (found / "report.json").write_text(json.dumps(record))
    for arguments in (("report", "found"), ("lengths", "東京", "京都"), ("report", "東京")):
        done = subprocess.run(
            [*AUTOTUNE, *arguments],
            capture_output=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )
        assert b"Traceback" not in done.stderr
        assert done.returncode == (0 if arguments[1] == "found" else 2)
    done = subprocess.run(
        [*AUTOTUNE, "report", "found"],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    text = done.stdout.decode(encoding)
    assert ("+-25%" if encoding == "ascii" else "±25%") in " ".join(text.split())
    assert "??" in text


def test_a_configuration_is_not_written_with_other_characters(found: Path) -> None:
    record = json.loads((found / "report.json").read_text())
    for trial in record["trials"]:
        trial["config"]["dataset_name"] = "東京"
    (found / "report.json").write_text(json.dumps(record))

    def export(*more: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*AUTOTUNE, "export", "found", *more],
            capture_output=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )

    done = export()
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"hint:" in done.stderr
    assert export("-o", "out.yaml").returncode == 0
    assert yaml.safe_load(Path("out.yaml").read_text())["dataset_name"] == "東京"
