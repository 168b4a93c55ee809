"""A search space: an ordered set of knobs for one trainer, usually read from a YAML file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.errors import SpaceError, UnknownNameError
from autotune.space import loader
from autotune.space.context import Context
from autotune.space.fixed import refuse_fixed
from autotune.space.knob import Knob, not_for, registry
from autotune.space.pins import parse_pins, resolve
from autotune.space.plan import in_order
from autotune.space.resolve import ResolvedSpace
from autotune.space.trainers import has_keys

__all__ = ["ResolvedSpace", "SearchSpace"]

_REWARD_KEYS = ("reward_funcs", "reward_model_name_or_path")
"""TRL's names for what scores completions (trl/scripts/grpo.py)."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """An ordered set of knobs for one trainer.

    Attributes:
        knobs: The knobs, in the order in which they are drawn.
        trainer: The trainer that they are for.
        name: What reports call the space.
        description: For people.
        fixed: TRL keys that every candidate has.
        places: Where each of those was read, such as ``my.yaml, line 7``.
    """

    knobs: tuple[Knob, ...]
    trainer: str = field(default="sft", kw_only=True)
    name: str = field(default="custom", kw_only=True)
    description: str = field(default="", kw_only=True)
    fixed: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    places: Mapping[str, str] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "knobs", tuple(knob.of(self.trainer) for knob in self.knobs))
        object.__setattr__(self, "fixed", dict(self.fixed))
        seen: set[str] = set()
        for knob in self.knobs:
            if knob.name in seen:
                raise SpaceError(f"the knob {knob.name!r} is listed twice.")
            seen.add(knob.name)
            if not knob.is_for(self.trainer):
                raise SpaceError(f"{not_for(knob, self.trainer)}.")
        in_order(self.knobs)
        others = [knob for _, knob in registry if knob.is_for(self.trainer)]
        for key, value in self.fixed.items():
            reason = refuse_fixed(key, value, (*self.knobs, *others))
            if reason is not None:
                raise SpaceError(f"fixed: {reason}.")

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> SearchSpace:
        """Return the space called ``name_or_path``, or the one in that YAML file.

        Raises:
            UnknownNameError: If there is no space of that name, or the file names an unknown knob.
            SpaceError: If the file is missing or wrong; the message names file and line.
        """
        text = os.fspath(name_or_path)
        path = Path(text)
        known = _packaged()
        if text in known:
            path = known[text]
        elif path.suffix.lower() not in (".yaml", ".yml") and not path.exists():
            raise UnknownNameError("search space", text, known)
        parts = loader.read(path)
        return cls(
            parts.knobs,
            trainer=parts.trainer,
            name=path.stem,
            description=parts.description,
            fixed=parts.fixed,
            places=parts.places,
        )

    @staticmethod
    def available() -> tuple[str, ...]:
        """Return the names of the spaces that come with the package."""
        return tuple(_packaged())

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all that decides what is drawn: knobs, values, fixed keys."""
        data = {
            "trainer": self.trainer,
            "knobs": [
                [knob.name, None if knob.domain is None else knob.domain.to_json()]
                for knob in self.knobs
            ],
            "fixed": self.fixed,
        }
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_reward(self, reward: str) -> SearchSpace:
        """Return the space with another reward, in place of those that it fixes.

        Args:
            reward: A function as ``module:function``, the name of one of TRL's own, or a reward
                model: a hub id or a folder.

        Raises:
            SpaceError: If the trainer takes no reward.
        """
        if not has_keys(self.trainer, tuple(_REWARD_KEYS)):
            raise SpaceError(
                f"--reward is for trainers that generate, and {self.trainer!r} does not.",
                hint="Leave it out.",
            )
        module, _, function = reward.partition(":")
        if function:
            own: dict[str, Any] = {"reward_funcs": [f"{module}.{function}"]}
        elif reward.isidentifier() and not Path(reward).exists():
            own = {"reward_funcs": [reward]}
        else:
            own = {"reward_model_name_or_path": reward}
        kept = {key: value for key, value in self.fixed.items() if key not in _REWARD_KEYS}
        return replace(self, fixed={**kept, **own})

    def check_pins(self, pins: Mapping[str, object]) -> None:
        """Check what can be said of pins before device, model and data are known.

        Raises:
            UnknownNameError: If a pin names no knob.
            SpaceError: If the knob can never take the value.
        """
        parse_pins(self.knobs, self.trainer, pins)

    def resolve(self, context: Context, pins: Mapping[str, object] | None = None) -> ResolvedSpace:
        """Return what can be drawn in ``context``.

        Args:
            context: The device, the model, the data and the packages.
            pins: Knobs to fix, with their values; text is read as the knob's type. A pin may name
                any value that the knob can take, and any built-in knob, in the space or not.

        Raises:
            UnknownNameError: If a pin names no knob.
            SpaceError: If the context is for another trainer, a pin's value is impossible, pins
                contradict each other, or nothing is left to draw.
        """
        if context.trainer != self.trainer:
            raise SpaceError(
                f"the search space {self.name!r} is for the trainer {self.trainer!r},"
                f" not for {context.trainer!r}."
            )
        return resolve(self.knobs, context, pins=pins or {}, fixed=self.fixed)


def _packaged() -> dict[str, Path]:
    """Return the YAML files of the wheel; of the checkout if there are none."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "search_spaces", package.parent / "search_spaces"):
        files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        if files:
            return files
    return {}
