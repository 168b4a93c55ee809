"""Domains as plain JSON and YAML write them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.errors import SpaceError
from autotune.space.domains import (
    Choice,
    Domain,
    FloatRange,
    IntRange,
    PowerOfTwo,
    Quantiles,
)


def _numbers(data: object, form: str, least: int, most: int) -> Sequence[Any]:
    if not isinstance(data, list | tuple) or not least <= len(data) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise SpaceError(f"{form} needs a list of {wanted} numbers, not {data!r}.")
    return data


def _shares(data: object) -> Quantiles:
    return Quantiles(tuple(_numbers(data, "quantiles", 1, 1000)))


_FORMS: dict[str, Callable[..., Domain]] = {
    "choice": lambda data, **options: Choice(data, **options),
    "range": lambda data: IntRange(*_numbers(data, "range", 2, 3)),
    "powers_of_two": lambda data: PowerOfTwo(*_numbers(data, "powers_of_two", 2, 2)),
    "float_range": lambda data, **options: FloatRange(
        *_numbers(data, "float_range", 2, 3), **options
    ),
    "quantiles": _shares,
}
_OPTIONS = {"choice": ("ordered",), "float_range": ("log",)}
FORMS = tuple(_FORMS)


def domain_from_json(data: Mapping[str, Any]) -> Domain:
    """Return the domain that a mapping such as ``{"powers_of_two": [1, 64]}`` describes.

    Raises:
        SpaceError: If the form is unknown or its numbers are wrong.
    """
    forms = [name for name in data if name in _FORMS]
    extra = [name for name in data if name not in _FORMS]
    if len(forms) != 1 or any(name not in _OPTIONS.get(forms[0], ()) for name in extra):
        unknown = next((str(name) for name in extra), "")
        close = difflib.get_close_matches(unknown, FORMS, n=1, cutoff=0.5)
        raise SpaceError(
            f"{', '.join(str(name) for name in data) or 'an empty mapping'} describes no values.",
            hint=f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(FORMS)}.",
        )
    return _FORMS[forms[0]](data[forms[0]], **{name: data[name] for name in extra})
