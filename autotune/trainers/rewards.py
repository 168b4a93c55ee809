"""Reward functions and reward models, named as TRL's scripts name them.

A function that fails, or returns what cannot be rewards, would do so for every candidate. So it
ends the search, with its name and with what it returned; no candidate is at fault.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from trl import rewards as trl_rewards

from autotune.errors import AutotuneError, UnknownNameError, UsageError
from autotune.probe.spec import ProbeSpec
from autotune.trainers import models
from autotune.trainers.loading import open_model
from autotune.virtual.errors import REFUSALS

_BUILTIN = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
_OVERLONG = "get_soft_overlong_punishment"
_OVERLONG_ARGUMENTS = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""Those of TRL's scripts (trl/scripts/grpo.py)."""

_WAYS = (
    "Name it as module:function (--reward) or module.function (reward_funcs), or by one of TRL's"
    f" own names: {', '.join((*_BUILTIN, _OVERLONG))}."
)
_NOT_REWARDS = (*REFUSALS, AutotuneError, MemoryError, torch.OutOfMemoryError)
"""What a function may raise that says nothing of the function."""


def check(config: Mapping[str, Any], trainer: str, *, trust_remote_code: bool = False) -> None:
    """Check that every reward that is named is there, and can be called or loaded.

    Args:
        config: TRL keys.
        trainer: For the message.
        trust_remote_code: Whether a reward model's own code may run.

    Raises:
        UsageError: If there is none, or one is not.
    """
    for reward in load(config, trainer):
        if not isinstance(reward, str):
            continue
        try:
            open_model(reward, revision=None, trust_remote_code=trust_remote_code)
        except AutotuneError as error:
            raise UsageError(
                f"the reward {reward!r} is no reward model: {error.message}",
                hint=f"A reward model is a hub id or a folder. If it is a function: {_WAYS}",
            ) from error


def scorers(spec: ProbeSpec, trainer: str) -> list[Any]:
    """Return a probe's rewards: functions that check what they return, and models.

    Models are loaded as the exported configuration would load them: with random weights, unless
    those of the probe's own model are real.
    """
    found = load(spec.config, trainer)
    kwargs = {
        "dtype": spec.config.get("dtype", "float32"),
        "trust_remote_code": spec.trust_remote_code,
    }
    is_random = spec.weights == "random"
    return [
        models.with_random_weights(reward, kwargs, None, scores=True)
        if isinstance(reward, str) and is_random
        else reward
        if isinstance(reward, str)
        else checked(reward, is_only=len(found) == 1)
        for reward in found
    ]


def checked(function: Callable[..., Any], *, is_only: bool) -> Callable[..., Any]:
    """Return a reward function that also looks at what it returns.

    Args:
        function: May be asynchronous, where the trainer takes such.
        is_only: Whether nothing else scores, so that it must score something.
    """
    name = getattr(function, "__name__", type(function).__name__)
    module = getattr(function, "__module__", None)
    whole = name if module is None or module.startswith("trl.") else f"{module}.{name}"

    def failed(error: BaseException) -> UsageError:
        said = " ".join(str(error).split())[:300]
        return _refused(f"raised {type(error).__name__}{f': {said}' if said else ''}", whole)

    async def run_later(*args: Any, **kwargs: Any) -> Any:
        try:
            found = await function(*args, **kwargs)
        except _NOT_REWARDS:
            raise
        except (Exception, SystemExit) as error:
            raise failed(error) from error
        return _checked(found, len(kwargs["completions"]), whole, is_only=is_only)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            found = function(*args, **kwargs)
        except _NOT_REWARDS:
            raise
        except (Exception, SystemExit) as error:
            raise failed(error) from error
        return _checked(found, len(kwargs["completions"]), whole, is_only=is_only)

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  it may be an object that can be called
    )
    wrapped = run_later if is_async else run
    functools.update_wrapper(wrapped, function)
    wrapped.__name__ = name  # by which the trainer logs it
    return wrapped


def _checked(found: Any, count: int, name: str, *, is_only: bool) -> Any:
    """Return what a reward function returned, if it is a reward for each completion.

    Raises:
        UsageError: If it is anything else.
    """
    try:
        values = list(found)
    except TypeError:
        raise _refused(f"returned {_shown(found)}", name, count) from None
    if isinstance(found, str | bytes | Mapping):
        raise _refused(f"returned {_shown(found)}", name, count)
    if len(values) != count:
        raise _refused(f"returned {len(values)} values for {count} completions", name, count)
    for value in values:
        if not _is_reward(value):
            raise _refused(f"returned {_shown(value)} for a completion", name, count)
    if is_only and all(value is None or math.isnan(float(value)) for value in values):
        what = "None" if all(value is None for value in values) else "no number (NaN)"
        raise _refused(
            f"returned {what} for every completion, and nothing else scores", name, count
        )
    return values if isinstance(found, Iterator) else found


def _is_reward(value: Any) -> bool:
    """Whether TRL takes a value as a reward: a number, or None for a row that is not scored."""
    if value is None:
        return True
    if isinstance(value, str | bytes | Sequence | Mapping):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):  # torch's, of a tensor of several numbers
        return False
    return True


def _refused(what: str, name: str, count: int | None = None) -> UsageError:
    number = "one number" if count is None else f"{count} numbers, one"
    return UsageError(
        f"the reward function {name} {what}; it must return a list of {number} for each completion"
        " (or None for one that it does not score).",
        hint="Try it on a few completions by itself: in a probe they are random text, or without"
        " content where a card is predicted. After mending it, --resume goes on.",
    )


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    text = " ".join(repr(value).split())
    return f"the {type(value).__name__} {text if len(text) <= 60 else f'{text[:57]}...'}"


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
            " module:function.",
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as TRL's scripts do
    try:
        holder = import_module(module)
        if not hasattr(holder, attribute):
            own = [name for name, item in vars(holder).items() if inspect.isfunction(item)]
            raise UnknownNameError(f"reward function of the module {module}", attribute, own)
        found = getattr(holder, attribute)
    except (MemoryError, UnknownNameError):
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a module of the user's does when it is imported
        is_missing = isinstance(error, ImportError | AttributeError)
        said = str(error) if is_missing else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"the reward function {name!r} cannot be loaded: {said}.",
            hint="Start from the folder in which the module lies, or install it.",
        ) from error
    if not callable(found):
        raise UsageError(f"the reward {name!r} is {_shown(found)}, not a function.", hint=_WAYS)
    return found  # type: ignore[no-any-return]
