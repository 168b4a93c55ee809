"""Rewards that are not there, that fail, or that return something else than rewards."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import UsageError
from autotune.executors.subprocess import SubprocessExecutor
from autotune.listener import Budget
from autotune.probe.result import Outcome
from autotune.runfolder import RunFolder
from autotune.space.space import SearchSpace
from autotune.trainers import rewards
from autotune.tuner import Tuner
from autotune.worker import demo

pytestmark = pytest.mark.trl

TEXTS = ["a", "b c"]
TRAINERS = ("grpo", "rloo", "online_dpo")


def returning(value: Any) -> Callable[..., Any]:
    def score(completions: list[str], **others: Any) -> Any:
        return value

    return score


def scored(function: Callable[..., Any], *, is_only: bool = True) -> Any:
    checked = rewards.checked(function, is_only=is_only)
    return checked(prompts=TEXTS, completions=TEXTS, completion_ids=[[1], [2, 3]])


@pytest.mark.parametrize(
    "value",
    [[0.5, 1], [True, False], (1.0, 2.0), [None, 1.0], torch.tensor([1.0, 2.0]), [math.nan, 0.0]],
    ids=str,
)
def test_what_trl_takes_is_handed_on(value: Any) -> None:
    assert scored(returning(value)) is value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "returned None;"),
        (1.0, "returned the float 1.0;"),
        ("ab", "returned the str 'ab';"),
        ({"a": 1, "b": 2}, "returned the dict"),
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (["good", "bad"], "returned the str 'good' for a completion"),
        ([[1.0], [2.0]], "returned the list [1.0] for a completion"),
        (torch.zeros(2, 2), "returned the Tensor tensor([0., 0.]) for a completion"),
        ([None, None], "returned None for every completion, and nothing else scores"),
        ([math.nan, None], "returned no number (NaN) for every completion"),
    ],
    ids=str,
)
def test_what_it_returned_and_what_is_expected_is_said(value: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        scored(returning(value))
    message = caught.value.message
    assert told in message
    assert f"the reward function {__name__}.score" in message
    assert "it must return a list of 2 numbers, one for each completion" in message
    assert "random text" in caught.value.hint
    assert caught.value.exit_code == 2


def test_one_of_several_may_score_nothing() -> None:
    assert scored(returning([None, None]), is_only=False) == [None, None]


def test_what_it_raised_is_said() -> None:
    def score(**others: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(UsageError, match="score raised KeyError: 'answer'; it must return"):
        scored(score)


def test_one_that_wants_to_end_the_process_is_told_of() -> None:
    def score(**others: Any) -> list[float]:
        raise SystemExit(0)

    with pytest.raises(UsageError, match="score raised SystemExit: 0"):
        scored(score)


def test_what_can_be_read_once_is_handed_on_as_a_list() -> None:
    assert scored(returning(map(float, [1, 2]))) == [1.0, 2.0]


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_memory_that_it_lacks_is_the_candidates_matter(error: Exception) -> None:
    def score(**others: Any) -> list[float]:
        raise error

    with pytest.raises(type(error)):
        scored(score)


def test_one_that_is_asynchronous_stays_so() -> None:
    async def score(completions: list[str], **others: Any) -> Any:
        return [1.0]

    checked = rewards.checked(score, is_only=True)
    assert asyncio.iscoroutinefunction(checked)
    with pytest.raises(UsageError, match="returned 1 values for 2 completions"):
        asyncio.run(checked(completions=TEXTS))


def test_it_keeps_its_name_and_that_of_trls_is_short() -> None:
    assert rewards.checked(returning(1), is_only=True).__name__ == "score"
    (overlong,) = rewards.load({"reward_funcs": ["get_soft_overlong_punishment"]}, "grpo")
    with pytest.raises(UsageError, match="function soft_overlong_punishment_reward raised"):
        rewards.checked(overlong, is_only=True)(completions=TEXTS)


# -- before any probe ----------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return what writes a module ``mine_rewards`` into the present folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str) -> None:
        (tmp_path / "mine_rewards.py").write_text(text)

    yield write
    sys.modules.pop("mine_rewards", None)


@pytest.mark.parametrize(
    ("text", "reward", "told"),
    [
        ("", "mine_rewards:score", "unknown reward function of the module mine_rewards"),
        ("", "no_such_module:score", "No module named 'no_such_module'"),
        ("1 / 0", "mine_rewards:score", "ZeroDivisionError"),
        ("def f(:", "mine_rewards:score", "SyntaxError"),
        ("score = 3", "mine_rewards:score", "the int 3, not a function"),
        ("", "nosuch", "no reward function 'nosuch'"),
        ("", "./nosuch", "the reward './nosuch' is no reward model"),
    ],
)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_one_that_is_not_there(
    trainer: str, text: str, reward: str, told: str, module: Callable[[str], None]
) -> None:
    module(text)
    config = SearchSpace.load(trainer).with_reward(reward).fixed
    with pytest.raises(UsageError) as caught:
        rewards.check(config, trainer)
    assert told in caught.value.message
    assert caught.value.hint


def test_a_reward_model_is_there(made: dict[str, str]) -> None:
    rewards.check({"reward_model_name_or_path": made["model"]}, "grpo")


# -- in a search ---------------------------------------------------------------------------------

MODULE = """
import time

def fails(completions, **others):
    raise RuntimeError("no grader at localhost")

def short(completions, **others):
    return [1.0]

def sleeps(completions, **others):
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(MODULE)
    rows = sorted(demo.prompts(), key=lambda row: len(json.dumps(row)))[:40]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[SubprocessExecutor]:
    """Return an executor whose worker was started in the folder of the rewards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        executor = SubprocessExecutor(("cpu",), log_folder=folder)
        executor.run_task("demo", {"folder": str(folder), "data": "prompts"}, timeout_s=120)
        yield executor
        executor.shutdown()


def tuner_for(trainer: str, reward: str, folder: Path, run: Path, **settings: Any) -> Tuner:
    pins = {"max_new_tokens": 8} if trainer == "online_dpo" else {"max_completion_length": 8}
    return Tuner(
        str(folder / "tiny-llama"),
        str(folder / "rows.jsonl"),
        trainer=trainer,
        space=SearchSpace.load(trainer).with_reward(f"own_rewards:{reward}"),
        pins={**pins, "per_device_train_batch_size": 4},
        global_batch=8,
        device="cpu",
        run_dir=run,
        **settings,
    )


@pytest.mark.parametrize(
    ("trainer", "reward", "told"),
    [
        ("grpo", "fails", "own_rewards.fails raised RuntimeError: no grader at localhost"),
        ("online_dpo", "short", "own_rewards.short returned 1 values for 8 completions"),
    ],
)
def test_a_search_with_a_broken_reward_ends_with_what_is_wrong(
    trainer: str, reward: str, told: str, folder: Path, here: SubprocessExecutor, tmp_path: Path
) -> None:
    tuner = tuner_for(trainer, reward, folder, tmp_path / "run", executor=here)
    with pytest.raises(UsageError) as caught:
        tuner.search(Budget(trials=3))
    assert told in caught.value.message
    assert tuner.report is not None
    assert not tuner.report.finished
    assert RunFolder(tmp_path / "run").read_run()["run_id"]


@pytest.mark.parametrize("trainer", ["rloo", "online_dpo"])
def test_a_generation_that_never_ends_is_a_timeout(
    trainer: str, folder: Path, here: SubprocessExecutor, tmp_path: Path
) -> None:
    tuner = tuner_for(
        trainer, "sleeps", folder, tmp_path / "run", executor=here, probe_timeout_s=8.0
    )
    report = tuner.search(Budget(trials=1))
    assert [trial.outcome for trial in report.trials] == [Outcome.TIMEOUT]
    assert report.trials[0].results[0].phase in ("generation", "first_step")
