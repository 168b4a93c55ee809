"""Which rows a probe trains on, and in what order.

The longest batch that the data can form goes into the first step, again into the second, when the
optimizer states exist, and into the last, when typical rows of varying length have fragmented the
memory. Rows are those of the data set as the trainer itself has processed it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.units import counted

FIRST_WORST_STEPS = 2
"""Steps at the start that hold a worst-case batch: one before and one after the optimizer states
exist."""

LAST_WORST_STEPS = 1
"""Steps at the end that hold it again, when rows of varying length have fragmented the memory."""

ROWS_KEPT = 2000
"""Rows of a large data set that a probe at least processes: two of TRL's packing pools."""


_MOST_BATCHES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Rows in the order of training.

    Attributes:
        rows: Indices into the processed data set; steps x micro-batches x rows per micro-batch.
        worst_batch: Rows and length, in tokens, of the largest micro-batch.
        num_steps: Optimizer steps.
    """

    rows: tuple[int, ...]
    worst_batch: tuple[int, int]
    num_steps: int


def probe_accumulation(
    accumulation_steps: int, *, batch_size: int, packed: bool, rows_per_step: int
) -> int:
    """Return the micro-batches per step that a probe runs in place of ``accumulation_steps``.

    Two do for memory: the second runs while the first one's gradients exist, which is all that
    accumulation changes. For the rate a step must hold enough rows that steps resemble each
    other, whatever the micro-batch: at least ``rows_per_step`` where rows differ in length; packed
    rows are as good as equal. The rate of a full step is composed from the micro-batches'
    and the optimizer's own times.
    """
    enough = 2 if packed else -(-rows_per_step // batch_size)
    return min(accumulation_steps, max(2, enough))


def plan(
    lengths: Sequence[int],
    *,
    batch_size: int,
    accumulation: int,
    num_typical_steps: int,
    num_first_worst: int = FIRST_WORST_STEPS,
    seed: int,
    shuffle: bool,
    padded: bool = False,
    representative: bool = False,
    processes: int = 1,
) -> Schedule:
    """Lay out the rows of a probe.

    Args:
        lengths: Tokens per row of the processed data set. Shape (N,).
        batch_size: Rows per micro-batch.
        accumulation: Micro-batches per step, in the probe.
        num_typical_steps: Steps between those that end with the worst micro-batch.
        num_first_worst: Steps at the start that end with the worst micro-batch.
        seed: Seed of the order of typical rows.
        shuffle: Whether the trainer would shuffle; else typical rows keep the data's own order.
        padded: Whether rows are padded to the longest of their micro-batch. The worst one is then
            one with padding, and one without where the longest rows have one length, in turn.
        representative: Choose typical micro-batches that stand for all, not the first ones, and
            begin with the worst one.
        processes: Processes that share a step. accelerate deals micro-batches out to them in turn
            (``BatchSamplerShard``), so that a step holds one of each process after another; the
            worst one is laid out for every process.

    Raises:
        ValueError: If the data set has fewer rows than one micro-batch.
    """
    if len(lengths) < batch_size:
        raise ValueError(
            f"the processed data set has {counted(len(lengths), 'row')}, too few for a"
            f" micro-batch of {batch_size}"
        )
    longest = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    full = longest[:batch_size]
    masked = _with_padding(longest, lengths, batch_size) if padded else full
    order = list(range(len(lengths)))
    if shuffle:
        # A generator of its own: trainers reseed the global one.
        random.Random(seed).shuffle(order)
    num_worst = num_first_worst + LAST_WORST_STEPS
    filling = batch_size * processes * (accumulation - 1)
    if representative:
        count = (accumulation - 1) * num_worst + accumulation * num_typical_steps
        chosen = representatives(_batches(order, batch_size), lengths, count=count)
        order = list(itertools.chain.from_iterable(chosen))
    fillings = _cycle(order, filling * num_worst)
    # The last one is padded, so that the one before it is not.
    kinds = [(full, masked)[(num_worst - step) % 2] for step in range(num_worst)]
    worst_steps = [
        [*fillings[step * filling : (step + 1) * filling], *(kinds[step] * processes)]
        for step in range(num_worst)
    ]
    if representative:
        # All of a prediction counts for what it reserves: first what needs the largest blocks.
        worst_steps = [
            [*rows[filling:], *rows[:filling]] if step < num_first_worst else rows
            for step, rows in enumerate(worst_steps)
        ]
        order = [*order[filling * num_worst :], *order[: filling * num_worst]]
    typical = _cycle(order, batch_size * processes * accumulation * num_typical_steps)
    rows = [
        *itertools.chain.from_iterable(worst_steps[:num_first_worst]),
        *typical,
        *itertools.chain.from_iterable(worst_steps[num_first_worst:]),
    ]
    return Schedule(
        rows=tuple(rows),
        worst_batch=(batch_size, lengths[longest[0]]),
        num_steps=num_steps(num_typical_steps, num_first_worst),
    )


def _with_padding(longest: Sequence[int], lengths: Sequence[int], batch_size: int) -> list[int]:
    """Return the largest micro-batch that is padded, from the rows sorted by length.

    Rows of one length need no padding, and attention runs without a mask (transformers,
    masking_utils.py). With the longest of the shorter rows in the place of one of them they are
    padded to the same size, and the mask takes memory as well.
    """
    most = lengths[longest[0]]
    rows = list(longest[:batch_size])
    if batch_size > 1 and lengths[rows[-1]] == most:
        rows[-1] = next((row for row in longest if lengths[row] < most), rows[-1])
    return rows


def representatives(
    batches: Sequence[Sequence[int]], lengths: Sequence[int], *, count: int
) -> list[Sequence[int]]:
    """Return so few micro-batches that their mean size is close to that of all.

    Stratified sampling: of the micro-batches, sorted by size, each ``1 / count`` gives the one
    that is nearest to its mean in padded positions and in tokens. They keep their order.

    Args:
        batches: Rows per micro-batch, at least one.
        lengths: Tokens per row. Shape (N,).
        count: How many to choose; fewer are returned if there are fewer.
    """
    sizes = [_sizes(batch, lengths) for batch in batches]
    by_size = sorted(range(len(batches)), key=lambda number: (*sizes[number], number))
    chosen = []
    count = min(count, len(batches))
    for part in range(count):
        stratum = by_size[part * len(by_size) // count : (part + 1) * len(by_size) // count]
        means = [sum(sizes[number][axis] for number in stratum) / len(stratum) for axis in (0, 1)]
        chosen.append(
            min(
                stratum,
                key=lambda number: sum(
                    abs(size - mean) / max(mean, 1.0)
                    for size, mean in zip(sizes[number], means, strict=True)
                ),
            )
        )
    return [batches[number] for number in sorted(chosen)]


def _sizes(batch: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return a micro-batch's padded positions and tokens."""
    return len(batch) * max(lengths[row] for row in batch), sum(lengths[row] for row in batch)


def _batches(order: Sequence[int], size: int) -> list[Sequence[int]]:
    """Return whole micro-batches, so many that their mean is known well."""
    count = min(len(order) // size, _MOST_BATCHES)
    return [order[number * size : (number + 1) * size] for number in range(count)]


def num_steps(num_typical_steps: int, num_first_worst: int = FIRST_WORST_STEPS) -> int:
    """Return the optimizer steps of a probe, those with a worst-case batch included."""
    return num_first_worst + num_typical_steps + LAST_WORST_STEPS


def _cycle(order: Sequence[int], count: int) -> list[int]:
    repeats = -(-count // len(order))
    return (list(order) * repeats)[:count]


def subset(
    lengths: Sequence[int],
    *,
    num_needed: int,
    num_longest: int,
    seed: int,
    at_least: int = ROWS_KEPT,
) -> list[int]:
    """Return the raw rows a probe processes: enough typical ones and the longest.

    Args:
        lengths: Tokens per row of the tokenised data set. Shape (N,).
        num_needed: Rows that the steps will use up.
        num_longest: Longest rows that must be among them.
        seed: Seed of the draw; the same for every probe of a search.
        at_least: Typical rows to return, also where the steps use up fewer.
    """
    enough = max(num_needed, at_least)
    if len(lengths) <= enough:
        return list(range(len(lengths)))
    pool = -(-enough // 1000) * 1000 if at_least >= 1000 else enough
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    chosen = set(order[:pool])
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    return sorted(chosen | set(by_length[:num_longest]))
