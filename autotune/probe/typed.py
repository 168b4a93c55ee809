"""Whether a record that was read back holds what its fields say.

Dataclasses take whatever they are given. A record that a disk, an editor or another program has
spoilt should be refused where it is read, with the field's name, and not break an addition later.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def loads(text: str | bytes) -> Any:
    """Return what JSON text says.

    Raises:
        ValueError: If it is no JSON. Python also reads ``NaN``, makes ``1e999`` infinite, and
            fails in another way where lists nest too deep.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("its lists and mappings nest too deep") from error


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def check(record: Any, where: str = "") -> None:
    """Check the fields of a dataclass, and those of the records in it, against their annotations.

    Args:
        record: An instance of a dataclass.
        where: What to call it in the message.

    Raises:
        TypeError: Naming the first field of another type.
    """
    kind: Any = type(record)
    hints = _hints(kind)
    for item in fields(record):
        name = f"{where}.{item.name}" if where else item.name
        _check(getattr(record, item.name), hints[item.name], name)


def check_scalars(values: Mapping[str, Any], name: str) -> None:
    """Check that values are what a knob can have: text, a number, true, false or nothing.

    Raises:
        TypeError: Naming the first that is not.
    """
    for key, value in values.items():
        if value is not None and not isinstance(value, str | int | float | bool):
            raise TypeError(f"{name}.{key} is {_short(value)}")


def has_type(value: Any, wanted: Any) -> bool:
    """Whether ``value`` is what the annotation ``wanted`` says."""
    try:
        _check(value, wanted, "")
    except TypeError:
        return False
    return True


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _check(value: Any, wanted: Any, name: str) -> None:
    if wanted is Any:
        return
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        if not any(has_type(value, item) for item in inner):
            raise TypeError(f"{name} is {_short(value)}")
    elif origin is tuple:
        _check_tuple(value, inner, name)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} is {_short(value)}, not a mapping")
        for key, item in value.items():
            _check(key, inner[0], f"a key of {name}")
            _check(item, inner[1], f"{name}.{key}")
    elif not _is_plain(value, wanted):
        kind = getattr(wanted, "__name__", str(wanted))
        raise TypeError(f"{name} is {_short(value)}, not of the type {kind}")
    elif is_dataclass(value):
        check(value, name)


def _check_tuple(value: Any, inner: tuple[Any, ...], name: str) -> None:
    if not isinstance(value, tuple):
        raise TypeError(f"{name} is {_short(value)}, not a list")
    if len(inner) == 2 and inner[1] is Ellipsis:
        inner = (inner[0],) * len(value)
    if len(inner) != len(value):
        raise TypeError(f"{name} has {len(value)} items instead of {len(inner)}")
    for index, (item, kind) in enumerate(zip(value, inner, strict=True)):
        _check(item, kind, f"{name}[{index}]")


def _is_plain(value: Any, wanted: Any) -> bool:
    if isinstance(value, bool) and wanted is not bool:
        return False  # on and off are no numbers here
    # JSON does not tell 1 from 1.0.
    return isinstance(value, (int, float) if wanted is float else wanted)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
