"""Reward functions and reward models, named as TRL's scripts name them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from trl import rewards as trl_rewards

from autotune.errors import UsageError

_BUILTIN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_OVERLONG = "get_soft_overlong_punishment"
_OVERLONG_ARGUMENTS = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""Those of TRL's scripts (trl/scripts/grpo.py)."""


def load(config: Mapping[str, Any], trainer: str) -> list[Callable[..., Any] | str]:
    """Return what the keys ``reward_model_name_or_path`` and ``reward_funcs`` name.

    Args:
        config: TRL keys.
        trainer: For the message.

    Raises:
        UsageError: If there is none, or one cannot be loaded.
    """
    found: list[Callable[..., Any] | str] = []
    if config.get("reward_model_name_or_path"):
        found.append(str(config["reward_model_name_or_path"]))
    for name in config.get("reward_funcs") or ():
        found.append(_function(str(name)))
    if not found:
        raise UsageError(
            f"{trainer} needs a reward, and none is named.",
            hint="Give reward_funcs, such as [get_soft_overlong_punishment], or"
            " reward_model_name_or_path.",
        )
    return found


def _function(name: str) -> Callable[..., Any]:
    if name in _BUILTIN:
        return getattr(trl_rewards, name)  # type: ignore[no-any-return]
    if name == _OVERLONG:
        return trl_rewards.get_soft_overlong_punishment(**_OVERLONG_ARGUMENTS)  # type: ignore[no-any-return]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise UsageError(
            f"there is no reward function {name!r}.",
            hint=f"TRL has {', '.join((*_BUILTIN, _OVERLONG))}; name one of your own as"
            " module.function.",
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as TRL's scripts do
    try:
        return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"the reward function {name!r} cannot be loaded: {error}.",
            hint="Start from the folder in which the module lies, or install it.",
        ) from error
