from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what a crash of the machine would need, which takes most of a fake search."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder that is not there yet."""
    return tmp_path / "run"
