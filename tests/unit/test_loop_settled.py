"""A search ends before its budget once no candidate is expected to be worth a probe."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_kit import ROOMY

from autotune.errors import UsageError
from autotune.listener import Budget
from autotune.loop import PATIENCE
from autotune.testing.fakes import FakeExecutor
from autotune.testing.searches import make_fake_plan, make_loop

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def searched(folder: Path, *, min_gain: float, sampler: str = "learned", trials: int = 25):
    executor = FakeExecutor(wall=ROOMY)
    plan = make_fake_plan(folder)
    loop = make_loop(folder, executor, plan=plan, sampler=sampler, min_gain=min_gain)
    loop.run(trials, None)
    return loop


def test_it_ends_after_some_probes_that_gained_next_to_nothing(tmp_path: Path) -> None:
    whole = searched(tmp_path / "whole", min_gain=0.0)
    early = searched(tmp_path / "early", min_gain=0.2)
    assert not whole.settled
    assert len(whole.trials) == 25
    assert early.settled
    assert PATIENCE < len(early.trials) < 25
    assert any(trial.feasible for trial in early.trials)


def test_nothing_is_expected_of_what_was_asked_for(tmp_path: Path) -> None:
    """The baseline is no proposal of the sampler's, so that it can't end a search."""
    loop = searched(tmp_path, min_gain=0.99, trials=1)
    assert not loop.settled


def test_other_samplers_expect_nothing_and_use_the_budget_up(tmp_path: Path) -> None:
    loop = searched(tmp_path, min_gain=0.9, sampler="random", trials=12)
    assert not loop.settled
    assert len(loop.trials) == 12


@pytest.mark.parametrize("wrong", [-0.1, 1.0])
def test_a_least_gain_is_a_share(wrong: float) -> None:
    with pytest.raises(UsageError, match="gain"):
        Budget(min_gain=wrong)
