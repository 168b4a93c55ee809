from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.worker import preload


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def fake_torch(*, initialized: bool) -> types.ModuleType:
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_initialized=lambda: initialized, is_available=lambda: False
    )
    return torch


def test_a_broken_module_is_noted_and_the_rest_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_one.py").write_text("raise RuntimeError('needs CUDA 13')")
    (tmp_path / "lazy_one.py").write_text(
        "__version__ = '2.1'\ndef __getattr__(name):\n    raise AttributeError(name)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    loaded = preload.preload(("broken_one", "lazy_one", "lazy_one:Trainer", "not_there_at_all"))
    assert loaded.versions == {"lazy_one": "2.1"}
    assert loaded.errors["broken_one"] == "RuntimeError: needs CUDA 13"
    assert loaded.errors["lazy_one"].startswith("AttributeError")
    assert "not_there_at_all" in loaded.errors


def test_what_ends_in_brackets_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ready_one.py").write_text(
        "calls = []\ndef install():\n    calls.append(1)\n"
        "def refuse():\n    raise RuntimeError('too old')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    loaded = preload.preload(("ready_one", "ready_one:install()", "ready_one:refuse()"))
    assert sys.modules["ready_one"].calls == [1]
    assert loaded.errors == {"ready_one": "RuntimeError: too old"}


def test_an_initialised_cuda_is_not_safe_to_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialized=True))
    assert "initialised CUDA after the import of json" in preload.preload(("json",)).unsafe


def test_an_open_context_is_noticed_whoever_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests run before this one in the same process may have left threads behind.
    monkeypatch.setattr(preload.threading, "active_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialized=False))
    assert preload.preload(("json",)).unsafe == ""
    opened = ["/dev/null", "/dev/nvidiactl"]
    monkeypatch.setattr(preload, "_open_files", lambda: iter(opened))
    assert preload.preload(("json",)).unsafe == ""  # NVML opens this one
    opened.append("/dev/nvidia-uvm")
    assert "json" in preload.preload(("json",)).unsafe


def test_missing_is_told_without_importing() -> None:
    reasons = preload.missing(("json", "not_there_at_all:Thing", "not_there_at_all.part"))
    assert list(reasons) == ["not_there_at_all"]
