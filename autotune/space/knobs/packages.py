"""Which optional packages the machine has, by distribution name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autotune.space.context import Context

_REQUIREMENT = re.compile(r"([\w.-]+?)(?:>=([\d.]+))?(?:,<([\d.]+))?")


def version(context: Context, name: str) -> tuple[int, ...] | None:
    """Return the installed version's leading numbers; None if the package is missing.

    Args:
        context: What is known of the machine.
        name: Distribution name; ``-``, ``_`` and case do not matter.
    """
    return _version(context.packages, name)


def missing(context: Context, needs: Iterable[str]) -> str | None:
    """Return why the first unmet requirement is not met; None if all are.

    Args:
        context: What is known of the machine.
        needs: Requirements such as ``peft``, ``flash-attn>=2.3.3`` or ``kernels>=0.18.2,<0.19``.

    Raises:
        ValueError: If one is written in another way.
    """
    return unmet(context.packages, needs)


def unmet(packages: Mapping[str, str], needs: Iterable[str]) -> str | None:
    """The same for packages by name, where nothing else is known of the machine."""
    return next((reason for need in needs if (reason := _unmet(packages, need))), None)


def _version(packages: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    wanted = _normal(name)
    for installed, text in packages.items():
        if _normal(installed) == wanted:
            return _numbers(text)
    return None


def _unmet(packages: Mapping[str, str], need: str) -> str | None:
    match = _REQUIREMENT.fullmatch(need)
    if match is None:
        raise ValueError(f"{need!r} is not a requirement such as flash-attn>=2.3.3")
    name, least, below = match.groups()
    found = _version(packages, name)
    if found is None:
        return f"the package {need} is not installed"
    if (least and found < _numbers(least)) or (below and found >= _numbers(below)):
        text = ".".join(str(number) for number in found)
        return f"it needs {need}, but {text} is installed"
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)
