"""Predicting before probing, and learning from earlier runs, on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cli_kit import SEARCH, Done

from autotune import screen
from autotune.search.study import Study
from autotune.testing.fakes import FakeExecutor, MemoryWall

SLOW = MemoryWall(capacity_bytes=60 << 30, token_time_s=2e-3)
"""A machine on which a few probes take long enough to predict before them."""

PINNED = ("--pin", "batching=padded", "--trials", 4)


@pytest.fixture
def learning(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every search predict first, on a slow machine."""
    machine["wall"] = SLOW
    monkeypatch.setattr(Study, "wants_guesses", True)
    monkeypatch.setattr(Study, "inform", lambda *args: None)
    fast = replace(SLOW, token_time_s=1e-4)
    monkeypatch.setattr(screen, "open_virtual", lambda *args: FakeExecutor(wall=fast))


def test_without_a_terminal_predicting_takes_a_line_at_its_start_and_end(
    learning: None, cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, *PINNED, "--run-dir", "here")
    assert done.code == 0, done.err
    lines = done.err.splitlines()
    start = lines.index("predicting candidates for this device before they are probed ...")
    assert lines[start + 1].endswith(" candidates predicted")
    assert sum("candidates" in line and "predict" in line for line in lines) == 2
    assert "[1 of 4, " in lines[start - 2] + lines[start - 1]
    assert "[2 of 4, " in lines[start + 2]
    assert "to choose what to probe:" in " ".join(done.out.split())


def test_the_report_of_json_has_what_was_predicted(
    learning: None, cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, *PINNED, "--run-dir", "here", "--json")
    assert done.json["screening"]["num_predicted"] > 10


def test_learning_from_nothing_is_a_wrong_request(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--run-dir", "here", "--learn-from", "nowhere")
    assert done.code == 2
    assert "there is no run folder" in done.err
    assert "--run-dir" in done.err


def test_runs_with_other_versions_are_refused_naming_both(
    learning: None, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    assert cli(*SEARCH, *PINNED, "--run-dir", "one").code == 0
    learns = (*SEARCH, *PINNED, "--learn-from", "one")
    assert cli(*learns, "--run-dir", "two").code == 0
    machine["answers"]["describe"]["environment"]["packages"] = {"torch": "9.9.9"}
    for more in ((), ("--dry-run",)):
        done = cli(*learns, "--run-dir", "three", *more)
        assert done.code == 2
        assert "torch 2.13.0 there, 9.9.9 here" in " ".join(done.err.split())
        assert "--learn-anyway" in done.err
    assert cli(*learns, "--run-dir", "three", "--learn-anyway").code == 0
