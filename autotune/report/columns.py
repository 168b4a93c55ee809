"""Tables of texts: columns as wide as what is in them, and those left out that have no room."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence

GAP = 2


def fitted(
    rows: Sequence[Mapping[str, str]], width: int | None = None, dispensable: Sequence[str] = ()
) -> dict[str, int]:
    """Return how wide each column is, by its title.

    Args:
        rows: At least one, all with the same titles.
        width: Columns of the terminal to keep to; None for as many as it takes.
        dispensable: Titles that are left out where there is no room, in this order.
    """
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    return sizes if width is None else fitting(sizes, width, dispensable)


def fitting(sizes: Mapping[str, int], width: int, dispensable: Sequence[str]) -> dict[str, int]:
    """Return the columns that fit: of those that can be spared, as few as need be are left out."""
    kept = dict(sizes)
    for name in dispensable:
        if sum(kept.values()) + GAP * (len(kept) - 1) > width:
            kept.pop(name, None)
    return kept


def aligned(row: Mapping[str, str], sizes: Mapping[str, int], left: Collection[str] = ()) -> str:
    """Return a row as a line, numbers to the right and the columns ``left`` to the left."""
    cells = [
        f"{row[name]:<{size}}" if name in left else f"{row[name]:>{size}}"
        for name, size in sizes.items()
    ]
    return (" " * GAP).join(cells).rstrip()


def wrapped(text: str, width: int, *, indent: int = 0, hang: int = 0) -> str:
    """Return a text in lines of at most ``width`` columns, as far as its words allow."""
    return textwrap.fill(
        text,
        max(width, 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )
