"""The trainers that there are, without importing any: each loads TRL, and that loads torch."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from autotune.space.trl_keys import known_keys

GROUP = "autotune.trainers"
"""Entry-point group that outside packages register adapters under."""

BUILTIN = {
    "sft": "autotune.trainers.sft",
    "dpo": "autotune.trainers.dpo",
    "reward": "autotune.trainers.reward",
    "kto": "autotune.trainers.kto",
    "grpo": "autotune.trainers.grpo",
    "rloo": "autotune.trainers.rloo",
    "online_dpo": "autotune.trainers.online_dpo",
    "distillation": "autotune.trainers.distillation",
}
"""Trainer to the module that registers its adapter when it is imported."""


def known() -> tuple[str, ...]:
    """Return the names of all trainers: built in, and declared by outside packages."""
    points = (point.name for point in entry_points(group=GROUP))
    return tuple(dict.fromkeys((*BUILTIN, *points)))


def is_known(name: str) -> bool:
    """Whether there is a trainer ``name``, or it names one as ``module:class``."""
    return name in known() or all(name.partition(":"))


@cache
def has_keys(trainer: str, keys: tuple[str, ...]) -> bool:
    """Whether TRL's configuration of ``trainer`` has all of ``keys``.

    True where that can't be told without importing it, as for trainers of other packages; TRL then
    has the last word.
    """
    found = known_keys(trainer) if trainer in BUILTIN else frozenset()
    return not found or found.issuperset(keys)
