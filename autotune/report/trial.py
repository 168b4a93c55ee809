"""The record of one candidate: what was set, how its probes ended, what they measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.objectives import TIE_LIMIT, Objective
from autotune.probe import accelerate_config, trl_script, trl_yaml, typed
from autotune.probe.modelled import engine_of
from autotune.probe.result import (
    Interval,
    Measurement,
    MemoryPeak,
    Outcome,
    ProbeResult,
    covered,
)
from autotune.space.knob import needed_by

NUM_CONFIRMED_PROBES = 2

CPU_LIMIT = 0.15
"""Share of the host's processor time; the search itself and idle services take less."""


def _own_modules(config: Mapping[str, Any]) -> list[str]:
    """Return what a configuration needs that the user wrote, in words."""
    names = {str(name).rpartition(".")[0] for name in config.get("reward_funcs") or ()} - {""}
    return [
        f"the module {name} of its reward: run it where Python finds that, such as its folder"
        for name in sorted(names)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate of a search, with every probe of it.

    Attributes:
        number: Its number; the baseline is 0.
        candidate: One value per active knob.
        changed: The knobs whose value differs from the baseline's.
        changes: What its training differs in from the baseline's: ``tokens``, ``method``; empty
            if it is the same training within rounding.
        config: The configuration, as the ``trl`` command line reads it.
        coverage: Share (0 to 1) of the data's tokens with loss that it trains on.
        outcome: How it ended, over all its probes.
        results: The first probe, its repeats, then its confirmations.
        feasible: Whether it is ``ok`` and within every limit.
        violations: Per constraint, how far it is over the limit; positive is over.
        source: ``measured`` on real hardware, or ``predicted``.
        skipped_because: Why no probe was run, such as ``out of memory is implied by trial 12``;
            None if one was.
        digest: Digest of the candidate.
        needed_bytes: Of one that ran out where nothing fits, the predicted peak of the whole run
            without the card's limit; None if that was not predicted.
        accelerate: The configuration of ``accelerate launch`` that goes with it; empty for one
            process.
        facts: What the report knows beside it, for the header of an export; not part of the
            JSON, and bound by :meth:`autotune.report.model.Report.pick`.
    """

    number: int
    candidate: Mapping[str, Any]
    config: Mapping[str, Any]
    outcome: Outcome
    changed: Mapping[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    coverage: float = 1.0
    results: tuple[ProbeResult, ...] = ()
    feasible: bool = False
    violations: Mapping[str, float] = field(default_factory=dict)
    source: str = "measured"
    skipped_because: str | None = None
    digest: str = ""
    needed_bytes: int | None = None
    accelerate: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Return the measurements of all probes that finished."""
        found = [item.measurement for item in self.results if item.outcome is Outcome.OK]
        return tuple(item for item in found if item is not None)

    @property
    def measurement(self) -> Measurement | None:
        """Return all finished probes as one: steps pooled, peaks the greatest of each phase."""
        return combine(self.measurements) if self.measurements else None

    @property
    def num_probes(self) -> int:
        """Return how many probes were run."""
        return len(self.results)

    @property
    def repeated(self) -> tuple[ProbeResult, ...]:
        """Return the probes that said nothing about the candidate, so that others were run.

        The last one, if it is the trial's own outcome, was not repeated any more.
        """
        found = [item for item in self.results if not item.outcome.is_verdict]
        return tuple(found if self.outcome.is_verdict else found[:-1])

    @property
    def confirmed(self) -> bool:
        """Whether at least two probes finished."""
        return len(self.measurements) >= NUM_CONFIRMED_PROBES

    @property
    def on_the_edge(self) -> bool:
        """Whether the allocator had to free its cache to go on: a little more would not fit."""
        return any(item.num_alloc_retries > 0 for item in self.measurements)

    @property
    def tokens_per_s(self) -> Interval | None:
        """Return trained tokens per second over the steps of all finished probes."""
        pooled = self.measurement
        return pooled.tokens_per_s if pooled and pooled.steps else None

    @property
    def samples_per_s(self) -> Interval | None:
        """Return rows of the original data per second over the steps of all finished probes."""
        pooled = self.measurement
        return pooled.samples_per_s if pooled and pooled.steps else None

    @property
    def peak_interval(self) -> Interval | None:
        """Return least, median and greatest of the probes' peaks, in bytes."""
        peaks = [item.peak_bytes for item in self.measurements if _has_peak(item)]
        if not peaks:
            return None
        return Interval(median=statistics.median(peaks), low=min(peaks), high=max(peaks))

    @property
    def peak_bytes(self) -> int | None:
        """Return the greatest of the probes' peaks, which decides whether it fits, in bytes."""
        interval = self.peak_interval
        return None if interval is None else int(interval.high)

    @property
    def host_bytes(self) -> int | None:
        """Return the most that a predicted run holds on the host for the card; None if measured.

        Measured, the resident size is the whole process's, and says nothing about what was moved.
        """
        if self.source == "measured" or self.measurement is None:
            return None
        return self.measurement.peak_of("resident_bytes")

    def interval(self, objective: Objective) -> Interval:
        """Return an objective's value with its spread, over all finished probes.

        Raises:
            ValueError: If no probe finished, or the objective has no value.
        """
        pooled = self.measurement
        if pooled is None:
            raise ValueError(f"trial {self.number} has no measurement")
        if objective.per == "step":
            return objective.of(pooled)
        values = [objective.of(item).median for item in self.measurements]
        return Interval(median=statistics.median(values), low=min(values), high=max(values))

    @property
    def is_unranked(self) -> bool:
        """Whether its rate varied by more than a tie may take in, so that its place is unsure."""
        rate = self.tokens_per_s
        return rate is not None and not (
            rate.median * (1 - TIE_LIMIT) <= rate.low <= rate.high <= rate.median * (1 + TIE_LIMIT)
        )

    def header(self) -> dict[str, Any]:
        """Return the facts for the comment at the top of an exported configuration."""
        rate = self.tokens_per_s
        pooled = self.measurement
        peak = self.peak_bytes
        own: dict[str, Any] = {
            "trial": self.number,
            "source": self.source,
            "outcome": self.outcome.value,
            "feasible": self.feasible,
            "num_probes": len(self.measurements),
            "on_the_edge": self.on_the_edge,
            "coverage": self.coverage,
            "changed": dict(self.changed),
            "changes": list(self.changes),
            "unranked": self.is_unranked,
            "needs": [*needed_by(self.candidate), *_own_modules(self.config)],
        }
        if pooled is not None and (pooled.cpu_taken_by_others_ratio or 0.0) >= CPU_LIMIT:
            own["disturbed"] = pooled.cpu_taken_by_others_ratio
        if pooled is not None and engine_of(pooled.makeup) is not None:
            own["modelled"] = "vLLM's share of memory and time"
        if self.accelerate:
            own["processes"] = int(self.accelerate["num_processes"])
        if rate is not None:
            own["tokens_per_s"] = {"median": rate.median, "low": rate.low, "high": rate.high}
        if pooled is not None and peak is not None:
            own |= {
                "peak_bytes": peak,
                "peak_of": memory_name(pooled.device_kind),
                "peak_phase": pooled.peak_phase,
                "covers": covered(pooled.phases),
                "host_bytes": self.host_bytes,
            }
        return {**self.facts, **own}

    @property
    def suffix(self) -> str:
        """Return how a file that can be run is called: ``.yaml`` for trl, ``.py`` without."""
        return trl_script.SUFFIX if self.facts.get("script") else ".yaml"

    def rendered(self, file_name: str, *, accelerate_file: str | None = None) -> str:
        """Return the configuration as a file of that name holds it.

        Args:
            file_name: Of the file.
            accelerate_file: What starts its processes, beside it; None if there is no such file.

        Raises:
            UsageError: If it is called like a script and the trainer has none, or the
                configuration holds what cannot be written.
        """
        script = self.facts.get("script")
        header = {**self.header(), "accelerate_file": accelerate_file}
        if not file_name.endswith(trl_script.SUFFIX):
            return trl_yaml.render(self.config, header, file_name=file_name)
        if not script:
            raise UsageError(
                f"{self.facts.get('trainer', 'this trainer')} is not exported as a script.",
                hint="Give the name of a YAML file, which the trl command reads.",
            )
        return trl_script.render(self.config, header, script, file_name=file_name)

    def export(self, path: str | Path) -> Path:
        """Write the configuration as the YAML that ``trl`` reads, and return the path.

        For a trainer that ``trl`` has no command for, a file called ``.py`` is a script that runs.
        The configuration of ``accelerate launch``, if there is one, is written beside it.

        Raises:
            UsageError: As by :meth:`rendered`.
        """
        target = Path(path)
        own = accelerate_config.beside(target) if self.accelerate else None
        if own is not None:
            accelerate_config.write(self.accelerate, own, trainer_file=target.name)
        text = self.rendered(target.name, accelerate_file=None if own is None else own.name)
        trl_yaml.write_text(target, text)
        return target

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        data = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name != "facts"
        }
        data |= {name: dict(data[name]) for name in (*_MAPPINGS, "accelerate")}
        if not self.accelerate:
            del data["accelerate"]
        data["changes"] = list(self.changes)
        if self.needed_bytes is None:
            del data["needed_bytes"]  # as in records from before there was such a field
        data["outcome"] = self.outcome.value
        data["results"] = [item.to_dict() for item in self.results]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """Return the record that :meth:`to_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: If it is not such a record.
        """
        values = dict(data)
        values.pop("figures", None)  # a report's, which follow from the rest
        values["outcome"] = Outcome(values["outcome"])
        values["changes"] = tuple(values["changes"])
        values["results"] = tuple(ProbeResult.from_dict(item) for item in values["results"])
        trial = cls(**values)
        typed.check(trial)
        typed.check_scalars(trial.candidate, "candidate")
        return trial


_MAPPINGS = ("candidate", "config", "changed", "violations")


def memory_name(device_kind: str) -> str:
    """Return what the peak of a device kind is a peak of, in words."""
    if device_kind == "cpu":
        return "resident size of the process"
    return "device memory used (reserved and context)"


def combine(measurements: Sequence[Measurement]) -> Measurement:
    """Return several measurements of one candidate as one.

    Steps are pooled; of each phase and field the greatest peak is kept, so that the whole never
    claims less memory than any of its parts used.

    Raises:
        ValueError: If there is none.
    """
    if not measurements:
        raise ValueError("no measurement to combine")
    first = measurements[0]
    if len(measurements) == 1:
        return first
    names = dict.fromkeys(name for item in measurements for name in item.phases)
    batches = [item.worst_batch for item in measurements if item.worst_batch is not None]
    return replace(
        first,
        steps=tuple(step for item in measurements for step in item.steps),
        warmup_steps=tuple(step for item in measurements for step in item.warmup_steps),
        phases={
            name: _greatest([item.phases[name] for item in measurements if name in item.phases])
            for name in names
        },
        worst_batch=max(batches, key=lambda batch: batch[0] * batch[1], default=None),
        num_alloc_retries=max(item.num_alloc_retries for item in measurements),
        cpu_taken_by_others_ratio=max(
            (
                item.cpu_taken_by_others_ratio
                for item in measurements
                if item.cpu_taken_by_others_ratio is not None
            ),
            default=None,
        ),
        device_used_by_others_bytes=_known_max(
            [item.device_used_by_others_bytes for item in measurements]
        ),
    )


def _greatest(peaks: Sequence[MemoryPeak]) -> MemoryPeak:
    return MemoryPeak(
        **{
            item.name: _known_max([getattr(peak, item.name) for peak in peaks])
            for item in fields(MemoryPeak)
        }
    )


def _known_max(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _has_peak(measurement: Measurement) -> bool:
    return any(measurement.fit_bytes(peak) is not None for peak in measurement.phases.values())
