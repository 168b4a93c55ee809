"""Which optional packages the machine has, by distribution name."""

from __future__ import annotations

import re

from autotune.space.context import Context


def version(context: Context, name: str) -> tuple[int, ...] | None:
    """Return the installed version's leading numbers; None if the package is missing.

    Args:
        context: What is known of the machine.
        name: Distribution name; ``-``, ``_`` and case do not matter.
    """
    wanted = _normal(name)
    for installed, text in context.packages.items():
        if _normal(installed) == wanted:
            return _numbers(text)
    return None


def missing(context: Context, name: str, least: str = "", below: str = "") -> str | None:
    """Return why ``name`` (from ``least``, before ``below``) cannot be used; None if it can."""
    wanted = name + (f">={least}" if least else "") + (f",<{below}" if below else "")
    found = version(context, name)
    if found is None:
        return f"the package {wanted} is not installed"
    if (least and found < _numbers(least)) or (below and found >= _numbers(below)):
        text = ".".join(str(number) for number in found)
        return f"it needs {wanted}, but {text} is installed"
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)
