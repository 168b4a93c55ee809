"""One worker server and one tiny model for all tests with the real TRL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("trl")

from autotune.executors.subprocess import SubprocessExecutor
from autotune.worker import demo


@pytest.fixture(scope="session")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SubprocessExecutor]:
    """Return an executor whose server imports the training stack once."""
    executor = SubprocessExecutor(("cpu",), log_folder=tmp_path_factory.mktemp("logs"))
    yield executor
    executor.shutdown()


@pytest.fixture(scope="session")
def made(executor: SubprocessExecutor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the demo's model and data set."""
    folder = tmp_path_factory.mktemp("demo")
    return executor.run_task("demo", {"folder": str(folder)}, timeout_s=120)


@pytest.fixture(scope="session")
def model(made: dict[str, str]) -> str:
    return made["model"]


@pytest.fixture(scope="session")
def chats() -> list[dict]:
    """Return a few short conversations."""
    rows = demo.conversations(80)
    return sorted(rows, key=lambda row: len(str(row)))[:24]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder
