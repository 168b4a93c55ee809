"""One search on two cards that are not here, with the real trainer and one worker server."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import Budget, compare_cards
from autotune.executors.subprocess import SubprocessExecutor
from autotune.report import cards_text
from autotune.report.model import Report

pytestmark = pytest.mark.trl


def test_two_cards_are_searched_and_set_against_each_other(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    found = compare_cards(
        made["model"],
        made["dataset"],
        ["t4", "rtx-4090"],
        budget=Budget(2),
        prices={"t4": 0.3, "rtx-4090": 0.4},
        run_dir=tmp_path / "run",
        space="quick",
        executor=virtual,
    )
    assert {card.name for card in found.fitting} == {"t4", "rtx-4090"}
    assert found.fastest is not None
    assert found.fastest.name == "rtx-4090"
    assert found.cheapest is not None
    for card in found.cards:
        assert card.report is not None
        assert card.report == Report.load(tmp_path / "run" / card.name / "report.json")
        assert len(card.report.trials) == 2
        assert card.fastest is not None
        assert card.fastest.trial.source == "predicted"
        assert (card.fastest.cost_per_epoch or 0.0) > 0
    # A T4 has no bfloat16, and is searched without it.
    text = " ".join(cards_text.render(found, 100).plain.split())
    assert "t4 was searched without dtype=bfloat16" in text
    assert not (tmp_path / "run" / "work").exists()
