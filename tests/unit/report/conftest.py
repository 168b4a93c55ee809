from __future__ import annotations

import sys

import pytest


@pytest.fixture
def matplotlib() -> None:
    """Skip where nothing can be drawn."""
    pytest.importorskip("matplotlib")


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have matplotlib be missing, whether it is installed or not."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
