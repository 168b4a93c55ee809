"""What the command line says where no configuration fits a card that is not there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from cli_kit import CARD, GIB, Done, on_a_virtual_card

from autotune.loop import MAX_BEYOND
from autotune.report.model import Report
from autotune.testing.fakes import MemoryWall


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the processes that probes run in; the options may be changed by a test."""
    return on_a_virtual_card(monkeypatch)


def test_a_search_in_which_nothing_fits_says_what_the_closest_would_need(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["wall"] = MemoryWall(capacity_bytes=23 * GIB, weights_bytes=90 * GIB)
    search = ("search", "some/model", "some/rows", "--space", "quick", "--device", CARD)
    done = cli(*search, "--trials", 8, "--run-dir", "none")
    assert done.code == 3
    (executor,) = machine["made"]
    beyond = [spec for spec in executor.submitted if spec.beyond_device]
    assert 0 < len(beyond) <= MAX_BEYOND
    assert "nothing fits; predicting what the closest would need: trial " in done.err
    report = Report.load("none/report.json")
    needs = {t.number: t.needed_bytes for t in report.trials if t.needed_bytes is not None}
    assert len(needs) == len(beyond)
    number = min(needs, key=lambda item: needs[item])
    assert f"Trial {number} came closest: the whole run would need a predicted" in done.err
    assert f"{needs[number] / GIB:.2f} GiB, " in " ".join(done.err.split())
    assert "Use a card with more than" in done.err or "use a card with more than" in done.err
    # Nothing is predicted twice.
    done = cli(*search, "--trials", 8, "--run-dir", "none", "--resume")
    assert done.code == 3
    assert not any(spec.beyond_device for spec in machine["made"][-1].submitted)


def test_a_budget_that_all_run_out_of_is_to_be_raised_to_a_figure(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["wall"] = MemoryWall(capacity_bytes=23 * GIB, weights_bytes=8 * GIB)
    search = ("search", "some/model", "some/rows", "--space", "quick", "--device", CARD)
    done = cli(*search, "--trials", 8, "--run-dir", "six", "--memory-budget", "2GiB")
    assert done.code == 3
    words = " ".join(done.err.split())
    found = re.search(r"[Rr]aise the memory budget to (\d+\.\d+) GiB", words)
    assert found is not None, words
    again = ("--run-dir", "more", "--memory-budget", f"{found[1]}GiB")
    assert cli(*search, "--trials", 8, *again).code == 0
