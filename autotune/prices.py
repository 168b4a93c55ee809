"""What cards cost per hour: the user's figures, since they differ by vendor and change weekly."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import UsageError
from autotune.files import check_regular
from autotune.virtual import cards

FORMAT = "Write CARD = NUMBER lines in TOML, or CARD: NUMBER lines in YAML, such as rtx-4090: 0.5."
MOST_PER_HOUR = 1e9
PREFIX = "virtual:"


def parse(pairs: Iterable[str]) -> dict[str, float]:
    """Return prices per hour from ``CARD=PER_HOUR`` pairs, by what the user calls the card.

    Raises:
        UsageError: If a pair is none, or its price no positive number.
    """
    found: dict[str, float] = {}
    for pair in pairs:
        name, equals, price = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"--price takes CARD=PER_HOUR, not {pair!r}.",
                hint="Write the card as in --device and a number, such as --price rtx-4090=0.5.",
            )
        try:
            value: Any = float(price)
        except ValueError:
            value = price.strip()
        found[name.strip()] = _checked(value, f"--price {name.strip()}")
    return found


def read(path: Path) -> dict[str, float]:
    """Return prices per hour from a TOML or YAML file, by what it calls the cards.

    The mapping may stand at the top or under ``prices``.

    Raises:
        UsageError: If it cannot be read, is no such mapping, or a price is no positive number.
    """
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(
            f"the prices {path} cannot be read: {error.strerror or error}.",
            hint="Give --prices the name of a TOML or YAML file.",
        ) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"the prices {path} cannot be read: {error}.", hint=FORMAT) from error
    if isinstance(content, Mapping) and isinstance(content.get("prices"), Mapping):
        content = content["prices"]
    if not isinstance(content, Mapping):
        raise UsageError(f"the prices {path} are no mapping of cards to numbers.", hint=FORMAT)
    return {str(name): _checked(value, f"{path}: {name}") for name, value in content.items()}


def _checked(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared first: an integer can be too long to be made a float.
    if is_number and 0 < value <= MOST_PER_HOUR and math.isfinite(value):
        return float(value)
    # Only what is short is shown: YAML's aliases make a small file endless when written out.
    is_short = isinstance(value, str | float | bool | None) or (is_number and abs(value) < 1e15)
    shown = repr(value)[:40] if is_short else "it"
    raise UsageError(
        f"{where}: {shown} is no price per hour.",
        hint="Give a positive number, without a currency.",
    )


def by_card(
    given: Mapping[str, float], compared: Mapping[str, str], *, from_file: bool = False
) -> dict[str, float]:
    """Return prices by the names that cards have in a comparison.

    Args:
        given: By any name of a card, with or without ``virtual:`` before it.
        compared: The comparison's name of each card, by device.
        from_file: Whether they are a list of prices, which may hold those of other cards.

    Raises:
        UsageError: If there is a price for a card that is not compared, a list has none of those
            that are, or a price is no positive number.
    """
    found = {
        name_in(compared, text): _checked(price, f"the price of {text}")
        for text, price in given.items()
    }
    others = [name for name in found if name not in compared.values()]
    if others and (not from_file or len(others) == len(found)):
        raise UsageError(
            f"there is a price for {', '.join(others[:3])}, which is not compared.",
            hint=f"Give prices of {', '.join(compared.values())}.",
        )
    return {name: price for name, price in found.items() if name not in others}


def name_in(compared: Mapping[str, str], text: str) -> str:
    """Return what a comparison calls the card that ``text`` names; itself if it is not in there.

    Args:
        compared: The comparison's name of each card, by device.
        text: Any name of a card, with or without ``virtual:`` before it.
    """
    bare = text.strip().removeprefix(PREFIX)
    if bare in compared.values():
        return bare
    device = PREFIX + (cards.find(bare).id if cards.is_known(bare) else bare)
    return compared.get(cards.full_name(device), bare)
