"""Bytes, seconds and counts: parsing what people write, writing what people read.

Inside the package everything is bytes and seconds; GiB (1024 cubed) and minutes exist only at
the edges, and only here.
"""

from __future__ import annotations

import math
import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_MOST_DECIMALS = 12
"""Of GiB, enough to tell two numbers of bytes apart."""

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
}
_SECOND_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*$")


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` names, such as ``22GiB``, ``800 MB`` or ``1024``.

    Raises:
        ValueError: If it is not a positive size with a known unit.
    """
    return round(_parse(text, _BYTE_UNITS, "size", "22GiB"))


def parse_duration_s(text: str) -> float:
    """Return the seconds that ``text`` names, such as ``30m``, ``1.5h``, ``90s`` or ``90``.

    Raises:
        ValueError: If it is not a positive duration with a known unit.
    """
    return _parse(text, _SECOND_UNITS, "duration", "30m")


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _QUANTITY.match(text)
    if match is None or match.group(2).lower() not in units:
        raise ValueError(f"{text!r} is not a {what}; write it like {example}")
    value = float(match.group(1)) * units[match.group(2).lower()]
    if not math.isfinite(value):
        raise ValueError(
            f"the {what} {text[:20]!r}... is beyond all measure; write it like {example}"
        )
    if value <= 0 or (what == "size" and round(value) == 0):
        raise ValueError(f"a {what} must be greater than zero, not {text!r}")
    return value


def format_gib(num_bytes: int | float | None) -> str:
    """Return bytes as GiB with two decimals (three below 1 GiB); ``-`` if unknown."""
    if num_bytes is None:
        return "-"
    gib = num_bytes / GIB
    return f"{gib:.3f} GiB" if abs(gib) < 1 else f"{gib:.2f} GiB"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 row`` or ``1,200 rows``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def format_gib_apart(*sizes: int | float) -> tuple[str, ...]:
    """Return sizes as GiB with so many decimals that those that differ look different.

    Two figures that a message sets against each other say nothing if they are printed alike.
    """
    shown = tuple(format_gib(size) for size in sizes)
    if len(set(shown)) == len(set(sizes)):
        return shown
    for decimals in range(3, _MOST_DECIMALS):
        shown = tuple(f"{size / GIB:.{decimals}f} GiB" for size in sizes)
        if len(set(shown)) == len(set(sizes)):
            break
    return shown


def format_gib_up(num_bytes: int) -> str:
    """Return bytes as GiB, rounded up: a budget of what is printed holds them."""
    return format_gib(math.ceil(num_bytes / GIB * 100) / 100 * GIB)


def format_duration(seconds: float | None) -> str:
    """Return seconds as ``850 ms``, ``12.3 s``, ``4 min 05 s`` and so on; ``-`` if unknown."""
    if seconds is None:
        return "-"
    # Compared as they are shown, so that none is shown as 60 of a unit.
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    hours, rest_s = divmod(round(seconds), 3600)
    return f"{hours} h {rest_s // 60:02d} min"


def format_rate(value: float | None) -> str:
    """Return a rate with about three significant digits and thin grouping; ``-`` if unknown."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
