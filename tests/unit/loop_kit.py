"""What the tests of the loop of a search share."""

from __future__ import annotations

from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial

from autotune.testing.fakes import MemoryWall

GIB = 1 << 30
ROOMY = MemoryWall(capacity_bytes=14 * GIB)


def told(folder: Path) -> list[FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    return optuna.load_study(study_name="search", storage=storage).get_trials()
