"""Asking one built-in knob for its rules."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.knob import registry
from autotune.testing.contexts import PACKAGES, make_context, make_gpu

CPU = make_context()
GPU = make_context(device=make_gpu())


def packages(**versions: str) -> dict[str, str]:
    return {**PACKAGES, **{name.replace("_", "-"): text for name, text in versions.items()}}


def refusal(name: str, value: Any, context: Context = CPU, **candidate: Any) -> str | None:
    knob = registry.get(name)
    return knob.refuse(value, candidate, context) if knob.refuse else None


def inactive(name: str, context: Context = CPU, **candidate: Any) -> str | None:
    knob = registry.get(name)
    return knob.active_if(candidate, context) if knob.active_if else None


def written(name: str, value: Any, context: Context = CPU, **candidate: Any) -> dict[str, Any]:
    return registry.get(name).written(value, {**candidate, name: value}, context)
