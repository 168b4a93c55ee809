"""Measurements of the processes of one probe, as one: the worst memory, the whole job's rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from autotune.probe.result import Measurement, MemoryPeak, StepRecord


def together(ranks: Sequence[Measurement]) -> Measurement:
    """Return what a job of several processes measured, with what each of them did.

    Peaks are those of the worst process, field by field and phase by phase: each process has a
    device of its own, and all must fit. Tokens and rows of a step are summed; its time is that of
    the slowest process, which the others wait for.

    Raises:
        ValueError: If there is none, or they did not run the same steps.
    """
    if not ranks:
        raise ValueError("no process has measured anything")
    first = ranks[0]
    names = dict.fromkeys(name for rank in ranks for name in rank.phases)
    batches = [rank.worst_batch for rank in ranks if rank.worst_batch is not None]
    accumulation = first.accumulation_steps
    return replace(
        first,
        steps=_steps([rank.steps for rank in ranks], accumulation),
        warmup_steps=_steps([rank.warmup_steps for rank in ranks], accumulation),
        phases={
            name: worst([rank.phases[name] for rank in ranks if name in rank.phases])
            for name in names
        },
        worst_batch=max(batches, key=lambda batch: batch[0] * batch[1], default=None),
        num_alloc_retries=max(rank.num_alloc_retries for rank in ranks),
        device_used_by_others_bytes=_most([rank.device_used_by_others_bytes for rank in ranks]),
        # Each counts its neighbours among the others, so that no figure tells of strangers.
        cpu_taken_by_others_ratio=None,
        ranks=tuple(ranks),
    )


def worst(peaks: Sequence[MemoryPeak]) -> MemoryPeak:
    """Return the greatest of several peaks, field by field."""
    return MemoryPeak(
        **{
            item.name: _most([getattr(peak, item.name) for peak in peaks])
            for item in fields(MemoryPeak)
        }
    )


def _steps(
    ranks: Sequence[Sequence[StepRecord]], accumulation_steps: int
) -> tuple[StepRecord, ...]:
    return tuple(_step(records, accumulation_steps) for records in zip(*ranks, strict=True))


def _step(records: Sequence[StepRecord], accumulation_steps: int) -> StepRecord:
    slowest = max(records, key=lambda record: record.time_s(accumulation_steps, last_waits=True))
    return replace(
        slowest,
        num_tokens=sum(record.num_tokens for record in records),
        num_positions=sum(record.num_positions for record in records),
        num_loss_tokens=sum(record.num_loss_tokens for record in records),
        num_rows=sum(record.num_rows for record in records),
    )


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
