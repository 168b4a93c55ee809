"""What the tests of searches on several cards share: cards of three speeds that do not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.card_search import CardSearch
from autotune.report.cards import CardComparison
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_card_answers

GIB = 1 << 30
DEVICES = ("virtual:rtx-4090", "virtual:a100-80gb", "virtual:h100-sxm-80gb")
WALLS = {
    "virtual:rtx-4090": MemoryWall(capacity_bytes=24 * GIB, token_time_s=2e-4),
    "virtual:a100-80gb": MemoryWall(capacity_bytes=80 * GIB, token_time_s=1e-4),
    "virtual:h100-sxm-80gb": MemoryWall(capacity_bytes=80 * GIB, token_time_s=3e-5),
    "virtual:t4": MemoryWall(capacity_bytes=15 * GIB, token_time_s=8e-4),
}
TOO_LARGE = MemoryWall(capacity_bytes=24 * GIB, weights_bytes=200 * GIB)


def make_executor(**options: Any) -> FakeExecutor:
    return FakeExecutor(**{"walls": WALLS, "answers": make_card_answers(), **options})


def make_search(run_dir: Path, executor: FakeExecutor | None = None, **options: Any) -> CardSearch:
    values: dict[str, Any] = {
        "model": "some/model",
        "dataset": "some/rows",
        "devices": DEVICES,
        "space": "quick",
        "executor": executor or make_executor(),
        "run_dir": run_dir,
        "min_coverage": 0.0,
    }
    return CardSearch(**{**values, **options})


def names(comparison: CardComparison) -> list[str]:
    return [card.name for card in comparison.cards]
