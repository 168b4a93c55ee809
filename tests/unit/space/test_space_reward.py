"""Another reward in the place of a space's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import SpaceError
from autotune.space.space import SearchSpace


@pytest.mark.parametrize(
    ("reward", "keys"),
    [
        ("mine.rewards:short", {"reward_funcs": ["mine.rewards.short"]}),
        ("think_format_reward", {"reward_funcs": ["think_format_reward"]}),
        ("org/model", {"reward_model_name_or_path": "org/model"}),
        ("./folder", {"reward_model_name_or_path": "./folder"}),
    ],
)
def test_it_is_written_as_trl_names_it(reward: str, keys: dict[str, object]) -> None:
    space = SearchSpace.load("grpo")
    found = space.with_reward(reward)
    assert found.fixed == keys
    assert found.digest != space.digest
    assert found.knobs == space.knobs


def test_a_folder_called_like_a_function_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scorer").mkdir()
    found = SearchSpace.load("rloo").with_reward("scorer")
    assert found.fixed == {"reward_model_name_or_path": "scorer"}


def test_only_trainers_that_generate_take_one() -> None:
    with pytest.raises(SpaceError, match="'dpo' does not"):
        SearchSpace.load("dpo").with_reward("think_format_reward")
