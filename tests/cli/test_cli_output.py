"""Where the output goes: terminals, pipes, closed descriptors and full disks."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import AUTOTUNE, SEARCH, Done

# --- terminals ----------------------------------------------------------------------------------


def test_no_color_gives_plain_lines_on_a_terminal(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in cli(*SEARCH, "--trials", 3, "--run-dir", "color").err
    monkeypatch.setenv("NO_COLOR", "1")
    done = cli(*SEARCH, "--trials", 3, "--run-dir", "plain")
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\x1b" not in done.err


def test_without_a_terminal_each_line_says_how_far_the_search_is(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--trials", 4, "--run-dir", "here")
    places = re.findall(r"^\[(\d+) of (\d+), [\d.]+ m?s\] trial ", done.err, re.MULTILINE)
    assert places == [(str(number), "4") for number in (1, 2, 3, 4)]
    again = re.findall(r"^\[again (\d+), [\d.]+ m?s\] trial ", done.err, re.MULTILINE)
    assert again == [str(number + 1) for number in range(len(again))] != []
    # A small space ends before the trials that were asked for.
    pins = ["--pin", "adaptation=full", "--pin", "checkpointing=none", "--pin", "batching=padded"]
    done = cli(*SEARCH, "--trials", 99, "--run-dir", "small", *pins)
    (size,) = set(re.findall(r"^\[\d+ of (\d+), ", done.err, re.MULTILINE))
    assert int(size) < 20
    # Where only the time ends it, the time is all there is to say.
    done = cli("search", "some/model", "some/rows", "--time-budget", "1s", "--run-dir", "time")
    assert re.search(r"^\[1, [\d.]+ m?s\] trial 0", done.err, re.MULTILINE)


# --- pipes and files ----------------------------------------------------------------------------


EVERY_OUTPUT = pytest.mark.parametrize(
    "arguments",
    [
        ("report", "found"),
        ("report", "found", "--json"),
        ("export", "found"),
        ("spaces", "sft"),
        ("spaces", "--json"),
        ("--help",),
        ("report", "--help"),
        ("--version",),
    ],
    ids=" ".join,
)


def in_a_shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )


@EVERY_OUTPUT
@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_goes_away_is_no_error(
    buffering: list[str], arguments: tuple[str, ...], found: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, *buffering, "-m", "autotune", *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    # What a shell reports of `cat` or `grep` in the same place.
    assert (done.returncode, done.stderr) == (141, "")


@EVERY_OUTPUT
@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_full_disk_behind_standard_output(
    buffering: list[str], arguments: tuple[str, ...], found: Path
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *buffering, "-m", "autotune", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    first, second = done.stderr.splitlines()
    assert first == "error: standard output cannot be written: No space left on device."
    assert "hint:" in second


@EVERY_OUTPUT
@pytest.mark.parametrize("closed", [">&-", ">&- 0<&-"])
def test_a_closed_standard_output(closed: str, arguments: tuple[str, ...], found: Path) -> None:
    done = in_a_shell(f"{shlex.join([*AUTOTUNE, *arguments])} {closed}")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == "error: standard output is closed, so that the result would be lost."
    assert "/dev/null" in second


@pytest.mark.parametrize("lost", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("arguments", [("report", "found"), ("export", "nowhere")])
def test_messages_that_cannot_be_written_change_nothing(
    lost: str, arguments: tuple[str, ...], found: Path
) -> None:
    words = shlex.join([*AUTOTUNE, *arguments])
    wanted, done = in_a_shell(words), in_a_shell(f"{words} {lost}")
    assert (done.returncode, done.stdout) == (wanted.returncode, wanted.stdout)
    assert done.stderr == ""
