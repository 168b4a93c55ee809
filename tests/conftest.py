"""What holds for every test: no network, no shared caches, a terminal of known width."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import pytest

_caches: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    # Read when Hugging Face's packages are imported, by the processes that tests start as well.
    _caches.append(tempfile.mkdtemp(prefix="autotune-tests-"))
    os.environ.update(
        {
            "HF_HOME": _caches[0],
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "COLUMNS": "120",
            "TERM": "dumb",
        }
    )
    # Two threads that wait for each other on a busy machine take ten times as long as one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Under nohup hangups are ignored, which every process that a test starts would inherit.
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        os.environ.pop(name, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in _caches:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Importing the training stack takes longer than all other tests together.
    leaves_out = "not trl" in (config.option.markexpr or "")
    return True if leaves_out and collection_path == Path(__file__).parent / "trl" else None


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every connection that leaves this machine."""

    def guarded(method):
        def connect(self, address):
            is_local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1")
            if not is_local:
                raise OSError(f"tests may not connect to {address}")
            return method(self, address)

        return connect

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))
