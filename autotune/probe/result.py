"""What became of one probe: an outcome, and for a finished one a measurement.

Raw values are stored; every statistic is derived from them here, so that a figure in a report
can always be traced to the steps it came from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = 1


class Outcome(StrEnum):
    """How a probe ended; a value, never an exception."""

    OK = "ok"
    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    TIMEOUT = "timeout"
    DIVERGED = "diverged"
    UNSUPPORTED = "unsupported"
    CRASHED = "crashed"
    LOST = "lost"

    @property
    def is_verdict(self) -> bool:
        """Whether the outcome says something about the candidate, not about the set-up."""
        return self not in (Outcome.CRASHED, Outcome.LOST)

    @property
    def num_retries(self) -> int:
        """How often a probe that ended so is repeated inside its trial."""
        return {Outcome.CRASHED: 1, Outcome.LOST: 2}.get(self, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A median with its spread, in the unit of whatever it measures.

    Attributes:
        median: The headline value.
        low: First quartile.
        high: Third quartile.
    """

    median: float
    low: float
    high: float

    @property
    def spread_ratio(self) -> float:
        """Return the interquartile range over the median."""
        return (self.high - self.low) / self.median if self.median else math.inf

    def scaled(self, factor: float) -> Interval:
        """Return the interval in another unit, of which one is ``factor`` of this one's."""
        return Interval(
            median=factor * self.median, low=factor * self.low, high=factor * self.high
        )

    def overlaps(self, other: Interval) -> bool:
        """Whether the two intervals share a value: then their order is not known."""
        return self.low <= other.high and other.low <= self.high

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return median and quartiles (inclusive method) of one or more values.

        Raises:
            ValueError: If there is no value.
        """
        if not values:
            raise ValueError("no value was measured")
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Raw values of one optimizer step.

    Attributes:
        micro_times_s: Wall time per micro-batch (data, forward, backward; the last one includes
            gradient clipping). Shape (A,), A micro-batches in the probe.
        optimizer_time_s: Wall time from the last backward to the end of the step.
        num_tokens: Non-padding tokens of the step.
        num_positions: Tokens including padding.
        num_loss_tokens: Tokens that carried loss.
        num_rows: Rows of the processed data set (packed rows count once).
        generation_time_s: Wall time in which what it trains on was generated; 0 where nothing is.
        num_generations: How many generations that was: one, at the step's begin, or one for each
            micro-batch.
    """

    micro_times_s: tuple[float, ...]
    optimizer_time_s: float
    num_tokens: int
    num_positions: int
    num_loss_tokens: int
    num_rows: int
    generation_time_s: float = 0.0
    num_generations: int = 1

    def time_s(self, accumulation_steps: int, *, last_waits: bool = False) -> float:
        """Return the wall time of this step with ``accumulation_steps`` such micro-batches.

        Args:
            accumulation_steps: Micro-batches of a full step.
            last_waits: Whether the last one waits for other processes to exchange gradients, as
                it does once per step however many there are; the others alone are repeated then.
        """
        *others, last = self.micro_times_s
        if last_waits and others:
            micro_s = sum(others) / len(others) * (accumulation_steps - 1) + last
        else:
            micro_s = self._scale(accumulation_steps) * sum(self.micro_times_s)
        return self.generation_s(accumulation_steps) + micro_s + self.optimizer_time_s

    def generation_s(self, accumulation_steps: int) -> float:
        """Return the wall time of generating with ``accumulation_steps`` such micro-batches."""
        by_micro_batch = self.num_generations == len(self.micro_times_s)
        return self.generation_time_s * (self._scale(accumulation_steps) if by_micro_batch else 1)

    def tokens_per_s(self, accumulation_steps: int, *, last_waits: bool = False) -> float:
        """Return non-padding tokens per second with ``accumulation_steps`` such micro-batches."""
        time_s = self.time_s(accumulation_steps, last_waits=last_waits)
        return self._scale(accumulation_steps) * self.num_tokens / time_s

    def rows_per_s(self, accumulation_steps: int, *, last_waits: bool = False) -> float:
        """Return processed rows per second with ``accumulation_steps`` such micro-batches."""
        time_s = self.time_s(accumulation_steps, last_waits=last_waits)
        return self._scale(accumulation_steps) * self.num_rows / time_s

    def _scale(self, accumulation_steps: int) -> float:
        return accumulation_steps / len(self.micro_times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """Peaks of one phase, in bytes; None where the backend cannot tell.

    Attributes:
        allocated_bytes: Live tensors.
        reserved_bytes: Held by the caching allocator.
        used_bytes: Taken from the device as a whole by this probe: reserved plus context.
        resident_bytes: Resident size of the process on the host.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    used_bytes: int | None = None
    resident_bytes: int | None = None


def fit_bytes(peak: MemoryPeak, device_kind: str) -> int | None:
    """Return the bytes of ``peak`` that decide whether a run fits on that kind of device."""
    return peak.resident_bytes if device_kind == "cpu" else peak.used_bytes


PHASES = ("load", "generation", "first_step", "later_steps", "eval", "save")
"""A probe's phases, in their order; the README says what each is."""


def phase_name(phase: str) -> str:
    """Return a phase as texts call it: ``the later steps`` for ``later_steps``."""
    words = phase.replace("_", " ")
    return f"the {words}" if words in ("first step", "later steps") else words


def covered(phases: Collection[str]) -> str:
    """Return in words which phases probes ran, and which they did not."""
    ran = _listed([phase_name(name) for name in PHASES if name in phases], "and")
    # Most trainers have no generation, so that it is not left out.
    others = [name for name in PHASES if name not in phases and name != "generation"]
    left = _listed([phase_name(name) for name in others], "or")
    return f"{ran}, not {left}" if left else ran


def _listed(words: Sequence[str], last: str) -> str:
    head = ", ".join(words[:-1])
    return f"{head} {last} {words[-1]}" if head else "".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a finished probe measured; raw values first, statistics derived.

    Attributes:
        source: ``measured`` on real hardware, or ``predicted``.
        device_kind: Backend, which decides what counts for the fit: ``used_bytes`` on an
            accelerator, ``resident_bytes`` on ``cpu``.
        accumulation_steps: Micro-batches per optimizer step that rates are stated for.
        steps: The measured steps.
        warmup_steps: Steps before them: worst batches first, then warm-up.
        phases: Peak memory per phase: ``load``, ``first_step``, ``later_steps``, ``eval``,
            ``save``.
        worst_batch: Rows and padded length of the largest batch that was run.
        num_alloc_retries: How often the allocator had to free its cache to go on.
        rows_per_epoch: Rows of the processed data set.
        rows_per_sample: Processed rows per row of the original data (below 1 when packed).
        tokens_per_epoch: Non-padding tokens of one pass over the data as this candidate trains on
            it, so cut as it says; None if a trainer or an earlier version did not tell.
        device_used_by_others_bytes: Memory other processes held on the device; None if unknown.
        num_trainable_parameters: Parameters that the optimizer updates.
        cpu_taken_by_others_ratio: Share (0 to 1) of the host's processor time that others used
            during the measured steps, time stolen by a hypervisor included; None if unknown.
        makeup: What the peak is made of, see :mod:`autotune.virtual.summary`; None if measured.
        ranks: Of a probe in several processes, what each of them measured; the fields above are
            then the worst one's memory and the whole job's steps. Empty for one process.
    """

    source: str
    device_kind: str
    accumulation_steps: int
    steps: tuple[StepRecord, ...]
    warmup_steps: tuple[StepRecord, ...] = ()
    phases: Mapping[str, MemoryPeak] = field(default_factory=dict)
    worst_batch: tuple[int, int] | None = None
    num_alloc_retries: int = 0
    rows_per_epoch: float = 0.0
    rows_per_sample: float = 1.0
    tokens_per_epoch: float | None = None
    device_used_by_others_bytes: int | None = None
    num_trainable_parameters: int | None = None
    cpu_taken_by_others_ratio: float | None = None
    makeup: Mapping[str, Any] | None = None
    ranks: tuple[Measurement, ...] = ()

    def fit_bytes(self, peak: MemoryPeak) -> int | None:
        """Return the bytes of ``peak`` that decide whether a run fits."""
        return fit_bytes(peak, self.device_kind)

    @property
    def peak_bytes(self) -> int:
        """Return the whole run's peak of the memory that decides the fit, in bytes.

        Raises:
            ValueError: If no phase was measured.
        """
        values = [self.fit_bytes(peak) for peak in self.phases.values()]
        known = [value for value in values if value is not None]
        if not known:
            raise ValueError("no peak was measured")
        return max(known)

    @property
    def peak_phase(self) -> str:
        """Return the phase in which the peak was reached."""
        return max(self.phases, key=lambda name: self.fit_bytes(self.phases[name]) or 0)

    def peak_of(self, name: str) -> int | None:
        """Return the whole run's peak of one field of :class:`MemoryPeak`, in bytes."""
        values = [getattr(peak, name) for peak in self.phases.values()]
        known = [value for value in values if value is not None]
        return max(known) if known else None

    @property
    def tokens_per_s(self) -> Interval:
        """Return trained (non-padding) tokens per second over the measured steps."""
        return Interval.of(self._each(StepRecord.tokens_per_s))

    @property
    def samples_per_s(self) -> Interval:
        """Return rows of the original data set per second at the rate of the measured steps.

        The measured rows are a sample, whose mean length is not the data's. So the rate in tokens
        is divided by the tokens of a mean row of all data, where that is known.
        """
        num_samples = self.samples_per_epoch
        if num_samples and self.tokens_per_epoch:
            return self.tokens_per_s.scaled(num_samples / self.tokens_per_epoch)
        rates = self._each(StepRecord.rows_per_s)
        return Interval.of([rate / self.rows_per_sample for rate in rates])

    @property
    def step_time_s(self) -> Interval:
        """Return wall time per full optimizer step, in seconds."""
        return Interval.of(self._each(StepRecord.time_s))

    @property
    def padding_share(self) -> float:
        """Return padding over all positions of the measured steps (0 to 1)."""
        positions = sum(step.num_positions for step in self.steps)
        return 1.0 - sum(step.num_tokens for step in self.steps) / positions

    @property
    def epoch_time_s(self) -> float | None:
        """Return the time one epoch would take at the median rate, in seconds.

        It is the tokens of an epoch over the median of ``tokens_per_s``, where they are known.
        """
        num_samples = self.samples_per_epoch
        return None if num_samples is None else num_samples / self.samples_per_s.median

    @property
    def samples_per_epoch(self) -> float | None:
        """Return the rows of the original data set; None if their number is not known."""
        return self.rows_per_epoch / self.rows_per_sample if self.rows_per_epoch else None

    @property
    def num_processes(self) -> int:
        """Return how many processes trained together."""
        return max(len(self.ranks), 1)

    def _each(self, read: Callable[..., float]) -> list[float]:
        """Return a quantity of each full step."""
        waits = bool(self.ranks)
        return [read(step, self.accumulation_steps, last_waits=waits) for step in self.steps]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        data = asdict(self)
        if self.ranks:
            data["ranks"] = [rank.to_dict() for rank in self.ranks]
        else:
            del data["ranks"]  # as in records from before there were several processes
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Return the record that :meth:`to_dict` wrote."""
        values = dict(data)
        values["ranks"] = tuple(cls.from_dict(rank) for rank in values.get("ranks", ()))
        for name in ("steps", "warmup_steps"):
            values[name] = tuple(
                StepRecord(**{**step, "micro_times_s": tuple(step["micro_times_s"])})
                for step in values[name]
            )
        values["phases"] = {name: MemoryPeak(**peak) for name, peak in values["phases"].items()}
        if values.get("worst_batch") is not None:
            values["worst_batch"] = tuple(values["worst_batch"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where a probe's wall time went, in seconds; None where it did not get that far.

    Attributes:
        start_s: From being asked for to the model load.
        load_s: Model, data processing and trainer.
        steps_s: Training steps and extra phases.
        total_s: From being asked for to the result being known.
    """

    start_s: float | None = None
    load_s: float | None = None
    steps_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """How one probe ended.

    Attributes:
        probe_id: The spec's.
        outcome: How it ended.
        measurement: Present if and only if the outcome is ``ok``.
        detail: One line for people: the error's message, or the evidence for the outcome.
        error_type: Qualified name of the exception; None if there was none.
        traceback: Of an exception; None if there was none.
        phase: The phase it was in when it ended.
        evidence: What the outcome was decided on (exit signal, cgroup counter, resident size).
        timeline: Where the time went.
        environment: Versions, device, driver, host: what a result must share to be comparable.
        num_neighbours: Probes that ran on the machine at the same time.
    """

    probe_id: str
    outcome: Outcome
    measurement: Measurement | None = None
    detail: str = ""
    error_type: str | None = None
    traceback: str | None = None
    phase: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    environment: Mapping[str, Any] = field(default_factory=dict)
    num_neighbours: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the schema number."""
        data = {"schema": SCHEMA, **asdict(self), "outcome": self.outcome.value}
        if self.measurement is not None:
            data["measurement"] = self.measurement.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeResult:
        """Return the record that :meth:`to_dict` wrote."""
        values = {key: value for key, value in data.items() if key != "schema"}
        values["outcome"] = Outcome(values["outcome"])
        if values.get("measurement") is not None:
            values["measurement"] = Measurement.from_dict(values["measurement"])
        values["timeline"] = Timeline(**values.get("timeline") or {})
        return cls(**values)
