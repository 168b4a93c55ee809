"""What the tests of the command line share."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autotune import doctor, estimate, tuner, verify
from autotune.testing.contexts import make_context
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_answers
from autotune.virtual import cards

GIB = 1 << 30
CARD = "virtual:rtx-4090"
CONFIG = "model_name_or_path: some/model\ndataset_name: some/rows\n"
SEARCH = ("search", "some/model", "some/rows", "--space", "quick")
AUTOTUNE = (sys.executable, "-m", "autotune")


@dataclass
class Done:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@contextmanager
def clean_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Work in an empty folder, and put the signal handlers back."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(sys, "argv", ["autotune"])
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def replace_executors(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, **options: Any
) -> dict[str, Any]:
    """Have modules make fake executors, and return their options, which may be changed.

    Those that were made are kept under ``made``.
    """
    options["made"] = []

    def make(*_: Any, **__: Any) -> FakeExecutor:
        executor = FakeExecutor(**{k: v for k, v in options.items() if k != "made"})
        options["made"].append(executor)
        return executor

    for module in modules:
        monkeypatch.setattr(module, "SubprocessExecutor", make)
    return options


def on_a_virtual_card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the processes that predict for :data:`CARD`; return their options."""
    card = cards.device_info(cards.find("rtx-4090"), CARD)
    return replace_executors(
        monkeypatch,
        *(tuner, doctor, estimate, verify),
        wall=MemoryWall(capacity_bytes=23 * GIB),
        answers=make_answers(make_context(device=card)),
    )
