"""How many rows TRL's preparation leaves of the data: cut, dropped or packed."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from functools import lru_cache

from autotune.space.context import DataProfile
from autotune.units import counted

POOL_ROWS = 1000
"""Rows that TRL packs at a time: the batch of ``datasets``' ``map``."""


def too_few_rows(
    data: DataProfile, micro_batch: int, *, layout: str, max_length: int
) -> str | None:
    """Return why the data cannot fill one micro-batch of that size; None if it can.

    Args:
        data: Lengths of the rows.
        micro_batch: Rows per forward pass.
        layout: Value of the knob ``batching``.
        max_length: Tokens at which rows are cut, or of a packed row.
    """
    if micro_batch > data.num_rows:
        return f"the data has only {counted(data.num_rows, 'row')}"
    if layout == "padding_free":
        return None  # nothing is cut, so that nothing is dropped
    if layout == "padded":
        try:
            left = data.rows_left(max_length)
        except ValueError as error:
            return str(error)
        if micro_batch <= left:
            return None
        rows = counted(left, "row")
        return f"max_length={max_length} leaves only {rows} with a token that carries loss"
    num_rows = packed_rows(data, layout, max_length, enough=micro_batch)
    if micro_batch <= num_rows:
        return None
    rows = counted(num_rows, "row")
    return f"batching={layout} with max_length={max_length} packs the data into {rows}"


def packed_rows(data: DataProfile, strategy: str, max_length: int, *, enough: int) -> int:
    """Return how many rows packing makes, or ``enough`` or more if it certainly makes that many.

    Beyond one pool the order of the rows decides, so that what is certain is returned: the tokens
    fill at least so many rows, and every pool makes at least one.

    Args:
        data: Lengths of the rows before packing.
        strategy: TRL's ``packing_strategy``: ``bfd``, ``bfd_split`` or ``wrapped``.
        max_length: Tokens of a packed row.
        enough: Rows that the caller needs; counting exactly takes longer and stops to matter.
    """
    counts = tuple(sorted(data.length_counts.items()))
    cut = strategy == "bfd"
    num_tokens = sum((min(length, max_length) if cut else length) * n for length, n in counts)
    certain = max(-(-num_tokens // max_length), -(-data.num_rows // POOL_ROWS))
    if certain >= enough or strategy == "wrapped" or data.num_rows > POOL_ROWS:
        return certain
    return _best_fit(counts, max_length, cut)


@lru_cache(maxsize=256)
def _best_fit(counts: tuple[tuple[int, int], ...], max_length: int, cut: bool) -> int:
    """Return the bins of TRL's best-fit decreasing: each row goes where it leaves least space."""
    pieces = sorted(_pieces(counts, max_length, cut), reverse=True)
    spaces: list[int] = []
    num_bins = 0
    for piece in pieces:
        index = bisect.bisect_left(spaces, piece)
        if index == len(spaces):
            num_bins += 1
            left = max_length - piece
        else:
            left = spaces.pop(index) - piece
        if left:
            bisect.insort(spaces, left)
    return num_bins


def _pieces(counts: tuple[tuple[int, int], ...], max_length: int, cut: bool) -> Iterator[int]:
    for length, n in counts:
        full, rest = divmod(length, max_length)
        pieces = [max_length] * (min(full, 1) if cut else full)
        if rest and not (cut and full):
            pieces.append(rest)
        for _ in range(n):
            yield from pieces
