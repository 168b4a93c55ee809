"""A clean process, a fake machine and the command line in it, for all tests of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import GIB, SEARCH, Done, clean_process, replace_executors

from autotune import doctor, screen, tuner
from autotune.cli.main import main
from autotune.testing.fakes import MemoryWall
from autotune.testing.searches import make_answers


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Work in an empty folder, and put the signal handlers back."""
    with clean_process(monkeypatch, tmp_path):
        yield


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the processes that probes run in; the options may be changed by a test."""
    wall = MemoryWall(capacity_bytes=14 * GIB)
    return replace_executors(monkeypatch, tuner, doctor, screen, wall=wall, answers=make_answers())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Return a function that gives arguments to the command line."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture
def found(machine: dict[str, Any], cli: Callable[..., Done]) -> Path:
    """Return the folder of a finished search."""
    assert cli(*SEARCH, "--trials", 8, "--run-dir", "found").code == 0
    return Path("found")
