"""What the tests of whole searches through the Python API share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.space.context import Context
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_answers
from autotune.tuner import Tuner

GIB = 1 << 30
ROOMY = MemoryWall(capacity_bytes=14 * GIB)


def make_executor(
    context: Context | None = None, *, wall: MemoryWall = ROOMY, **options: Any
) -> FakeExecutor:
    return FakeExecutor(wall=wall, answers=make_answers(context), **options)


def make_tuner(run_dir: Path, executor: FakeExecutor | None = None, **options: Any) -> Tuner:
    values: dict[str, Any] = {
        "model": "some/model",
        "dataset": "some/rows",
        "space": "quick",
        "executor": executor or make_executor(),
        "run_dir": run_dir,
        "min_coverage": 0.0,
        # Predictions take processes of their own; tests of them say so.
        "screen": False,
    }
    return Tuner(**{**values, **options})
