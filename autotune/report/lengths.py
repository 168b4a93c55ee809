"""What each ``max_length`` would do to a data set: rows cut, tokens lost, padding added.

**Padding.** A shuffled epoch makes each batch a random set of B of the N rows, each set equally
likely. With rows capped at ``max_length`` and n(x) rows no longer than x, the longest row of a
batch has ``P(max <= x) = C(n(x), B) / C(N, B)``, so that over the distinct lengths x_1 < x_2 ...::

    E[max] = sum over k of x_k * (P(max <= x_k) - P(max <= x_(k-1)))
    padding share = 1 - E[length] / E[max]

which is the share of positions that an epoch spends on padding, exact but for the last, smaller
batch and for padding to a multiple of something.
"""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.report.cells import percent
from autotune.report.pictures import new_figure, save_figure
from autotune.space.context import DataProfile
from autotune.units import counted

MICRO_BATCHES = (1, 4, 8, 16)
MOST_BINS = 64
"""Of a report's own histogram: more than a page is wide enough to tell apart."""

QUANTILES = (0.5, 0.9, 0.95, 0.99)
BAR_WIDTH = 40

LOST_STEPS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0)
"""Losses to choose between; for each, the shortest length that keeps to it is shown."""

LEGEND = (
    "rows cut: rows longer than max_length. rows dropped: rows that truncation leaves without any"
    " token with loss, so that nothing is learnt from them. lost: share of the loss tokens that"
    " truncation drops; bfd packing cuts the same way, while bfd_split cuts the same rows into"
    " pieces and wrapped cuts at any place, and both keep every token. padding: share of positions"
    " in random batches of that many rows."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """What one ``max_length`` would do; shares are from 0 to 1.

    Attributes:
        max_length: The limit, in tokens.
        rows_cut_share: Rows longer than the limit.
        rows_dropped_share: Rows that truncation leaves without any token with loss.
        lost_truncation_share: Tokens with loss that truncation drops.
        lost_bfd_share: The same for ``bfd`` packing, which truncates too.
        lost_bfd_split_share: For ``bfd_split`` packing: none.
        rows_split_bfd_split_share: Rows that ``bfd_split`` cuts into pieces, which are then
            trained without what came before.
        lost_wrapped_share: For ``wrapped`` packing: none, but rows are cut at any place.
        padding_shares: Micro-batch size to the share of positions that are padding.
    """

    max_length: int
    rows_cut_share: float
    rows_dropped_share: float
    lost_truncation_share: float
    lost_bfd_share: float
    lost_bfd_split_share: float
    rows_split_bfd_split_share: float
    lost_wrapped_share: float
    padding_shares: Mapping[int, float]


def length_rows(
    profile: DataProfile,
    offered: Sequence[int] = (),
    *,
    micro_batches: tuple[int, ...] = MICRO_BATCHES,
) -> tuple[LengthRow, ...]:
    """Return what each tabled ``max_length`` would do, and each of ``offered``, ascending."""
    rows = []
    # Beyond the longest row nothing is cut any more: there the last of the table says all.
    for max_length in sorted({*profile.max_lengths, *offered}):
        index = max(bisect_right(profile.max_lengths, max_length) - 1, 0)
        # A data set without any loss token has none to lose.
        lost = 1.0 - profile.loss_tokens_kept[index] / max(profile.num_loss_tokens, 1)
        lost = lost if profile.num_loss_tokens else 0.0
        cut = profile.rows_cut[index] / profile.num_rows
        rows.append(
            LengthRow(
                max_length=max_length,
                rows_cut_share=cut,
                rows_dropped_share=profile.rows_dropped[index] / profile.num_rows,
                lost_truncation_share=lost,
                lost_bfd_share=lost,
                lost_bfd_split_share=0.0,
                rows_split_bfd_split_share=cut,
                lost_wrapped_share=0.0,
                padding_shares={
                    size: padding_share(profile.length_counts, size, max_length)
                    for size in micro_batches
                },
            )
        )
    return tuple(rows)


def padding_share(
    length_counts: Mapping[int, int], micro_batch: int, max_length: int | None = None
) -> float:
    """Return the share (0 to 1) of positions that are padding in random batches.

    Args:
        length_counts: Token length to number of rows.
        micro_batch: Rows per batch; more than there are rows means all of them.
        max_length: Limit that rows are truncated at; None for none.

    Raises:
        ValueError: If there is no row or the batch is empty.
    """
    capped: dict[int, int] = {}
    for length, count in length_counts.items():
        key = length if max_length is None else min(length, max_length)
        capped[key] = capped.get(key, 0) + count
    num_rows = sum(capped.values())
    if num_rows < 1 or micro_batch < 1:
        raise ValueError("padding needs at least one row per batch")
    size = min(micro_batch, num_rows)
    mean = sum(length * count for length, count in capped.items()) / num_rows
    expected_max, below, num_seen = 0.0, 0.0, 0
    for length in sorted(capped):
        num_seen += capped[length]
        up_to = _share_of_batches(num_seen, num_rows, size)
        expected_max += length * (up_to - below)
        below = up_to
    # Where nothing is padded, rounding would leave a hair more or less than zero.
    return max(0.0, round(1.0 - mean / expected_max, 12))


def to_json(profile: DataProfile, offered: Sequence[int] = ()) -> dict[str, Any]:
    """Return the profile's figures and the rows of the table as plain JSON values.

    Args:
        profile: The lengths.
        offered: Values of ``max_length`` that a search draws from, in tokens.
    """
    rows = []
    for row in length_rows(profile, offered):
        data = asdict(row)
        data["padding_shares"] = {str(key): value for key, value in row.padding_shares.items()}
        rows.append(data)
    return {
        "num_rows": profile.num_rows,
        "num_empty_rows": profile.num_empty_rows,
        "odd_roles": dict(profile.odd_roles),
        "num_tokens": profile.num_tokens,
        "num_loss_tokens": profile.num_loss_tokens,
        "mean_length": profile.mean_length,
        "longest": profile.longest,
        "quantiles": {str(share): profile.quantile(share) for share in QUANTILES},
        "format": profile.format,
        "fingerprint": profile.fingerprint,
        "max_lengths": rows,
        "offered": list(offered),
    }


def telling_rows(rows: Sequence[LengthRow], offered: Sequence[int] = ()) -> tuple[LengthRow, ...]:
    """Return the rows that a choice is made between: each keeps more than the one before.

    Lengths that lose more than half are left out, unless there is no other, and so are those
    beyond the first that loses nothing. Those that a search draws from are always among them.
    """
    found = {row.max_length: row for row in rows if row.max_length in offered}
    for step in LOST_STEPS:
        for row in rows:
            if row.lost_truncation_share <= step or row is rows[-1]:
                found[row.max_length] = row
                break
    return tuple(found[max_length] for max_length in sorted(found))


def render_text(
    profile: DataProfile,
    offered: Sequence[int] = (),
    least_coverage: float = 0.0,
    *,
    width: int = 100,
    every: bool = False,
) -> str:
    """Return summary, histogram and table as plain text.

    Args:
        profile: The lengths.
        offered: Values of ``max_length`` that a search draws from, in tokens; marked.
        least_coverage: Share (0 to 1) of the loss tokens that layouts which cut must keep.
        width: Columns of running text.
        every: Whether to table every length, not only those that tell something.
    """
    quantiles = ", ".join(f"{share:.0%} {profile.quantile(share):,}" for share in QUANTILES)
    num_empty = profile.num_empty_rows
    empty = (
        f" ({num_empty:,} empty {'one' if num_empty == 1 else 'ones'} left out)"
        if num_empty
        else ""
    )
    summary = (
        f"{counted(profile.num_rows, 'row')}{empty}, {profile.num_tokens:,} tokens,"
        f" {profile.num_loss_tokens:,} of them with loss. Lengths: mean"
        f" {profile.mean_length:,.0f}, {quantiles}, longest {profile.longest:,}."
    )
    rows = length_rows(profile, offered)
    shown = rows if every or len(rows) <= len(LOST_STEPS) else telling_rows(rows, offered)
    legend = LEGEND
    if len(shown) < len(rows):
        legend += (
            f" Shown are the shortest lengths for each loss worth choosing and those that a search"
            f" draws from; --all tables all {len(rows)}."
        )
    notes = [textwrap.fill(f"note: {text}", width) for text in profile.notices()]
    parts = [textwrap.fill(summary, width), *notes, histogram(profile), _table(shown, offered)]
    if offered:
        parts.append(textwrap.fill(_offer(profile, offered, least_coverage), width))
    return "\n\n".join([*parts, textwrap.fill(legend, width)]) + "\n"


def _offer(profile: DataProfile, offered: Sequence[int], least_coverage: float) -> str:
    """Return which lengths a search draws from, and for which of them not every layout is."""
    text = f"* A search draws max_length from: {', '.join(f'{value:,}' for value in offered)}."
    if offered[-1] > profile.longest:
        text += (
            " Those above the longest row cut nothing; packing takes them as the size of a bin."
        )
    tabled = [value for value in offered if value >= profile.max_lengths[0]]
    if profile.num_loss_tokens and any(profile.coverage(n) < least_coverage for n in tabled):
        text += (
            f" Those that lose more than {percent(1 - least_coverage)} (--min-coverage) are drawn"
            " with bfd_split and wrapped alone, if the space has them."
        )
    return text


def bins(profile: DataProfile) -> tuple[tuple[int, int, int], ...]:
    """Return rows per range of lengths, doubling: first and last length, number of rows."""
    shortest = min(profile.length_counts)
    first, last = 1, 1
    found = []
    while first <= profile.longest:
        count = sum(n for length, n in profile.length_counts.items() if first <= length <= last)
        if last >= shortest:
            found.append((first, last, count))
        first, last = last + 1, last * 2
    return tuple(found)


def equal_bins(
    length_counts: Mapping[int, int], most: int = MOST_BINS
) -> tuple[tuple[int, int, int], ...]:
    """Return rows per range of lengths, all as wide: first and last length, number of rows.

    Args:
        length_counts: Token length to number of rows; none gives no range.
        most: The most ranges.
    """
    longest = max(length_counts, default=0)
    width = max(1, -(-longest // most))
    counts = [0] * -(-longest // width)
    for length, count in length_counts.items():
        counts[(length - 1) // width] += count
    return tuple(
        (number * width + 1, (number + 1) * width, count) for number, count in enumerate(counts)
    )


def histogram(profile: DataProfile, *, bar_width: int = BAR_WIDTH) -> str:
    """Return rows per range of lengths as bars, with the share of rows up to each range."""
    ranges = bins(profile)
    most = max(count for _, _, count in ranges)
    size = max(len(f"{last:,}") for _, last, _ in ranges)
    count_size = max(len("rows"), *(len(f"{count:,}") for _, _, count in ranges))
    lines = [f"{'tokens':>{2 * size + 3}}  {'':<{bar_width}}  {'rows':>{count_size}}   up to here"]
    num_seen = 0
    for first, last, count in ranges:
        num_seen += count
        # At least one block for any row at all: a long tail is what matters here.
        bar = "█" * (max(1, round(bar_width * count / most)) if count else 0)
        lines.append(
            f"{first:>{size},} - {last:>{size},}  {bar:<{bar_width}}  {count:>{count_size},}"
            f"  {percent(num_seen / profile.num_rows):>11}"
        )
    return "\n".join(lines)


def plot(profile: DataProfile, path: str | Path) -> Path:
    """Draw the lengths and what is kept at each ``max_length``, and return the path.

    Args:
        profile: The lengths.
        path: Where to write; ``.png`` or ``.svg`` decides the format.

    Raises:
        UsageError: If the suffix is another.
        PrerequisiteError: If matplotlib is missing.
    """
    target = Path(path)
    figure = new_figure(target)
    rows_axes, kept_axes = figure.subplots(1, 2)
    ranges = bins(profile)
    rows_axes.bar(
        [f"{last:,}" for _, last, _ in ranges], [count for _, _, count in ranges], width=0.9
    )
    rows_axes.set(xlabel="row length in tokens, up to", ylabel="rows", title="Row lengths")
    rows_axes.tick_params(axis="x", rotation=60)
    rows = length_rows(profile)
    lengths = [row.max_length for row in rows]
    kept = [100 * (1 - row.lost_truncation_share) for row in rows]
    kept_axes.plot(lengths, kept, marker="o", label="loss tokens kept by truncation, bfd")
    for size in MICRO_BATCHES[1::2]:
        padded = [100 * row.padding_shares[size] for row in rows]
        kept_axes.plot(lengths, padded, linestyle="--", label=f"padding, {size} rows per batch")
    kept_axes.set(xlabel="max_length", ylabel="%", ylim=(0, 102), title="What max_length does")
    kept_axes.legend(loc="best", fontsize="small")
    return save_figure(figure, target)


def _table(rows: Sequence[LengthRow], offered: Sequence[int]) -> str:
    is_marked = any(row.max_length in offered for row in rows)
    marks = {row.max_length: "*" if row.max_length in offered else " " for row in rows}
    titles = ["max_length", "rows cut", "rows dropped", "lost", *(f"x{b}" for b in MICRO_BATCHES)]
    cells = [
        [
            f"{row.max_length:,}{marks[row.max_length] if is_marked else ''}",
            percent(row.rows_cut_share),
            percent(row.rows_dropped_share),
            percent(row.lost_truncation_share),
            *(percent(row.padding_shares[size]) for size in MICRO_BATCHES),
        ]
        for row in rows
    ]
    titles[4] = f"padding {titles[4]}"
    sizes = [max(len(line[i]) for line in [titles, *cells]) for i in range(len(titles))]
    lines = [
        "  ".join(f"{cell:>{size}}" for cell, size in zip(line, sizes, strict=True))
        for line in [titles, *cells]
    ]
    return "\n".join(lines)


def _share_of_batches(num_within: int, num_rows: int, size: int) -> float:
    """Return the share of batches of ``size`` rows that lie wholly within ``num_within`` rows."""
    share = 1.0
    for index in range(size):
        share *= max(0, num_within - index) / (num_rows - index)
    return share
