"""What the tests of resolved spaces share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice
from autotune.space.knob import Knob, registry
from autotune.space.resolve import ResolvedSpace
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context

FULL = SearchSpace.load("sft")
QUICK = SearchSpace.load("quick")


def resolve(
    context: Context | None = None, space: SearchSpace = FULL, **pins: Any
) -> ResolvedSpace:
    return space.resolve(context or make_context(), pins)


def space_of(*names: str, **domains: Sequence[Any]) -> SearchSpace:
    knobs = [registry.get(name) for name in names]
    knobs += [replace(registry.get(n), domain=Choice(tuple(v))) for n, v in domains.items()]
    return SearchSpace(tuple(knobs))


def knob(name: str, *values: Any, **changes: Any) -> Knob:
    return Knob(
        **{
            "name": name,
            "domain": Choice(values),
            "baseline": values[0],
            "changes": "nothing",
            "help": "x",
            **changes,
        }
    )


def differing(space: ResolvedSpace, **values: Any) -> dict[str, Any]:
    """Return the baseline with other values, without the knobs that those make inactive."""
    wanted: Mapping[str, Any] = {**space.baseline, **values}

    def suggest(name: str, offered: Sequence[Any], ordered: bool) -> Any:
        base = name.partition("@")[0]
        return wanted.get(base, registry.get(base).baseline)

    candidate = space.draw(suggest)
    for name, value in values.items():
        assert candidate[name] == value
    return candidate
