"""What a script needs to build a trainer that the ``trl`` command does not have."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from trl import ScriptArguments

from autotune.probe.trl_yaml import TRL_COMMANDS

_ASKED = ("reward_funcs", "quantization_config", "peft_config")


def described(name: str, adapter: Any) -> dict[str, Any]:
    """Return the dotted names of a trainer's classes, and which arguments it takes.

    The trainer's class is the adapter's ``trainer_class()`` if it has one; else, as TRL names its
    classes, the one beside ``XConfig`` that is called ``XTrainer``.

    Args:
        name: As users write it.
        adapter: Its own.

    Returns:
        ``trainer``, ``config``, ``arguments`` and ``takes``; nothing where the ``trl`` command has
        the trainer, or its classes cannot be found.
    """
    config = getattr(adapter, "config_class", None)
    if name in TRL_COMMANDS or config is None:
        return {}
    config = config()
    own = getattr(adapter, "trainer_class", None)
    trainer: type | None = own() if own is not None else _beside(config)
    arguments = getattr(adapter, "script_class", lambda: ScriptArguments)()
    paths = {
        "trainer": _path(trainer),
        "config": _path(config),
        "arguments": _path(arguments),
    }
    if trainer is None or None in paths.values():
        return {}
    taken = inspect.signature(trainer).parameters
    return {**paths, "takes": [argument for argument in _ASKED if argument in taken]}


def _beside(config: type) -> type | None:
    """Return the trainer of a configuration's class, by TRL's names; None if there is none."""
    wanted = f"{config.__name__.removesuffix('Config')}Trainer"
    for module in _packages(config):
        found = getattr(sys.modules[module], wanted, None)
        if isinstance(found, type):
            return found
    return None


def _path(kind: type | None) -> str | None:
    """Return the shortest dotted name of a class; None if it has none."""
    if kind is None:
        return None
    name = kind.__name__
    for module in _packages(kind):
        if getattr(sys.modules[module], name, None) is kind:
            return f"{module}.{name}"
    return None


def _packages(kind: type) -> list[str]:
    """Return the module of a class and the packages around it, the outermost first."""
    parts = kind.__module__.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return [name for name in names if name in sys.modules]
