"""One worker server on the first card for all tests that need one; without a card they skip."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trl"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "report"))

from autotune.executors.subprocess import SubprocessExecutor

DEVICE = "cuda:0"


@pytest.fixture(scope="session")
def device() -> str:
    """Return the name of the card; only tests that run import PyTorch."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")
    return DEVICE


@pytest.fixture(scope="session")
def executor(
    device: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SubprocessExecutor]:
    pytest.importorskip("trl")
    executor = SubprocessExecutor((device,), log_folder=tmp_path_factory.mktemp("logs"))
    yield executor
    executor.shutdown()


@pytest.fixture(scope="session")
def made(executor: SubprocessExecutor, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the demo's model and data set."""
    folder = tmp_path_factory.mktemp("demo")
    return executor.run_task("demo", {"folder": str(folder)}, timeout_s=120)
