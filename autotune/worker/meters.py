"""Clocks and memory of one probe: raw values, noted at the edges of steps and phases."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.devices import host
from autotune.devices.base import DeviceBackend
from autotune.probe.result import Measurement, MemoryPeak, StepRecord
from autotune.trainers.base import DivergedError
from autotune.units import counted

PHASES_FILE = "events.jsonl"


class StepRecorder:
    """Turns a training run's events into a :class:`Measurement`.

    Args:
        device: Read at every edge, synchronised first.
        folder: Takes ``events.jsonl``, a line per phase, so that a probe that is killed still
            tells how far it got.
        num_before: Steps before the measured ones (worst batches, warm-up), kept apart.
        num_after: Steps after the measured ones (the worst batch again), kept apart as well.
        accumulation_steps: Micro-batches per step that rates are stated for.
    """

    def __init__(
        self,
        device: DeviceBackend,
        folder: Path,
        *,
        num_before: int,
        num_after: int = 0,
        accumulation_steps: int,
    ) -> None:
        self.phase: str | None = None
        self.phase_entered_s: dict[str, float] = {}
        self._device = device
        self._events = folder / PHASES_FILE
        self._num_before = num_before
        self._num_after = num_after
        self._accumulation_steps = accumulation_steps
        self._peaks: dict[str, MemoryPeak] = {}
        self._steps: list[StepRecord] = []
        self._micro_counts: list[list[dict[str, int]]] = []
        self._counts: deque[dict[str, int]] = deque()
        self._micro_times_s: list[float] = []
        self._cpu_uses: list[tuple[float, float] | None] = []
        self._generations: list[list[float]] = []
        self._generation_times_s: list[float] = []
        self._edge_s = 0.0
        self._facts: dict[str, Any] = {}

    def enter_phase(self, name: str) -> None:
        """Close the running phase's peaks and start phase ``name``; the same name goes on."""
        self._close_phase()
        self.phase = name
        self.phase_entered_s.setdefault(name, time.time())
        self._device.reset_peaks(name)
        with self._events.open("a") as file:
            file.write(json.dumps({"phase": name, "at": time.time()}) + "\n")

    def begin_step(self) -> None:
        """Start the clock of the next step."""
        self._device.synchronize()
        self._micro_times_s, self._generation_times_s = [], []
        self._edge_s = self._device.clock()

    def end_generation(self) -> None:
        """Note the wall time since the last edge as a generation's.

        There is one at the step's begin, or one at the begin of each of its micro-batches.
        """
        self._generation_times_s.append(self._lap())

    def end_micro_batch(self) -> None:
        """Note the wall time since the last edge as a micro-batch's."""
        self._micro_times_s.append(self._lap())

    def end_step(self) -> None:
        """Note the rest of the step as the optimizer's and keep the step."""
        optimizer_time_s = self._lap()
        # What else the host does can't delay a predicted step.
        is_real = self._device.source == "measured"
        self._cpu_uses.append(host.cpu_use() if is_real else None)
        counts = [self._counts.popleft() for _ in self._micro_times_s]
        self._micro_counts.append(counts)
        self._generations.append(self._generation_times_s)
        self._steps.append(
            _step(self._micro_times_s, counts, optimizer_time_s, self._generation_times_s)
        )

    def count(
        self, *, num_tokens: int, num_positions: int, num_loss_tokens: int, num_rows: int
    ) -> None:
        """Queue a micro-batch's counts.

        Data loaders collate ahead of the step that uses a batch, but in the same order.
        """
        self._counts.append(
            {
                "num_tokens": num_tokens,
                "num_positions": num_positions,
                "num_loss_tokens": num_loss_tokens,
                "num_rows": num_rows,
            }
        )

    def report_loss(self, loss: float) -> None:
        """Take a step's loss.

        Raises:
            DivergedError: If it is not finite.
        """
        if not math.isfinite(loss):
            raise DivergedError(f"the loss became {loss} in step {len(self._steps)}")

    def describe_run(self, **facts: Any) -> None:
        """Keep facts that the measurement carries along."""
        self._facts.update(facts)

    def measurement(self) -> Measurement:
        """Return what was measured.

        Raises:
            ValueError: If no step beyond the unmeasured ones was run.
        """
        self._close_phase()
        last = len(self._steps) - self._num_after
        measured = tuple(self._steps[self._num_before : last]) or self._between()
        if not measured:
            steps = counted(len(self._steps), "step")
            raise ValueError(f"the trainer ended after {steps}, before a measured one")
        return Measurement(
            source=self._device.source,
            device_kind=self._device.kind,
            accumulation_steps=self._accumulation_steps,
            steps=measured,
            warmup_steps=tuple(self._steps[: self._num_before]),
            phases=self._peaks,
            num_alloc_retries=self._device.num_alloc_retries(),
            device_used_by_others_bytes=self._device.used_by_others_bytes(),
            cpu_taken_by_others_ratio=self._taken_by_others(last - 1),
            **self._facts,
        )

    def _between(self) -> tuple[StepRecord, ...]:
        """Return the step that lies in the first and the last, but for the largest micro-batches.

        A prediction has no steps beside these two where they hold typical micro-batches as well.
        """
        is_whole = len(self._steps) == self._num_before + self._num_after >= 2
        if self._device.source != "predicted" or not is_whole:
            return ()  # a real run that ended early
        first, last = self._steps[0], self._steps[-1]
        times = (*first.micro_times_s[1:], *last.micro_times_s[:-1])
        counts = [*self._micro_counts[0][1:], *self._micro_counts[-1][:-1]]
        if not times:
            return ()
        begun, ended = self._generations[0], self._generations[-1]
        if last.num_generations > 1:  # one per micro-batch, as their times are
            ended = [*begun[1:], *ended[:-1]]
        return (_step(times, counts, last.optimizer_time_s, ended),)

    def _taken_by_others(self, last: int) -> float | None:
        """Return others' share of the processor time between the measured steps' edges."""
        if not 0 < self._num_before <= last:
            return None
        before, after = self._cpu_uses[self._num_before - 1], self._cpu_uses[last]
        if before is None or after is None or after[1] <= before[1]:
            return None
        return min(max((after[0] - before[0]) / (after[1] - before[1]), 0.0), 1.0)

    def _lap(self) -> float:
        self._device.synchronize()
        now = self._device.clock()
        elapsed, self._edge_s = now - self._edge_s, now
        return elapsed

    def _close_phase(self) -> None:
        if self.phase is None:
            return
        peak = self._device.read_peaks()
        known = self._peaks.get(self.phase)
        self._peaks[self.phase] = peak if known is None else merge_peaks(known, peak)


def _step(
    micro_times_s: Sequence[float],
    counts: Sequence[Mapping[str, int]],
    optimizer_time_s: float,
    generation_times_s: Sequence[float],
) -> StepRecord:
    """Return the record of a step with these micro-batches."""
    return StepRecord(
        micro_times_s=tuple(micro_times_s),
        optimizer_time_s=optimizer_time_s,
        generation_time_s=sum(generation_times_s),
        num_generations=max(1, len(generation_times_s)),
        **{name: sum(count[name] for count in counts) for name in _COUNTED},
    )


_COUNTED = ("num_tokens", "num_positions", "num_loss_tokens", "num_rows")


def merge_peaks(a: MemoryPeak, b: MemoryPeak) -> MemoryPeak:
    """Return the larger of both peaks, field by field."""

    def larger(x: int | None, y: int | None) -> int | None:
        return max(x, y) if x is not None and y is not None else (x if y is None else y)

    return MemoryPeak(
        allocated_bytes=larger(a.allocated_bytes, b.allocated_bytes),
        reserved_bytes=larger(a.reserved_bytes, b.reserved_bytes),
        used_bytes=larger(a.used_bytes, b.used_bytes),
        resident_bytes=larger(a.resident_bytes, b.resident_bytes),
    )
