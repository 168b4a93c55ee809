"""The figures of a trial: what the table shows and what ``--json`` gives, read in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from autotune.objectives import Objective
from autotune.probe import prediction
from autotune.probe.result import Interval
from autotune.report.compare import Gain
from autotune.report.trial import Trial, memory_name
from autotune.units import format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a trainer that generates does in a step, apart from training.

    Attributes:
        time_s: Median time of generating and scoring, in seconds.
        training_time_s: Median time of the rest of the step, in seconds.
        used_peak_bytes: The most that was used while generating; None if unknown.
        training_used_peak_bytes: The most that was used while training; None if unknown.
    """

    time_s: float
    training_time_s: float
    used_peak_bytes: int | None
    training_used_peak_bytes: int | None

    def line(self, source: str) -> str:
        """Return it in words."""
        return (
            f"a step: {self.time_s:.3g} s of generation at {format_gib(self.used_peak_bytes)},"
            f" {self.training_time_s:.3g} s of training at"
            f" {format_gib(self.training_used_peak_bytes)}, {source}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a trial that ran came to; None is not known.

    Attributes:
        source: ``measured`` on a real device, or ``predicted``.
        used_peak_bytes: The greatest peak of all its probes.
        peak_of: What that is a peak of, in words.
        tokens_per_s: Median rate in tokens that are not padding.
        spread: The rate's quartiles; None for a prediction and for a single step.
        samples_per_s: Median rate in rows of the data set.
        epoch_s: Time of one pass over the data at the median rate, in seconds.
        padding_share: Share (0 to 1) of the computed positions that were padding.
        trained_share: Share (0 to 1) of the data's loss tokens that it trains on.
        gain: Rate and memory over the baseline's; None if they cannot be compared.
        training: ``same``, or what differs from the baseline's training.
        generation: What a step generates in; None for trainers that generate nothing.
    """

    source: str
    used_peak_bytes: int | None
    peak_of: str | None
    tokens_per_s: float | None
    spread: Interval | None
    samples_per_s: float | None
    epoch_s: float | None
    padding_share: float | None
    trained_share: float
    gain: Gain | None
    training: str
    generation: Generation | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the same keys for every trial."""
        data = asdict(self)
        del data["spread"], data["gain"]
        gain, spread = self.gain, self.spread
        data["tokens_per_s"] = {
            "median": self.tokens_per_s,
            "low": None if spread is None else spread.low,
            "high": None if spread is None else spread.high,
        }
        return data | {
            "rate_gain": None if gain is None else gain.rate_ratio,
            "rate_gain_is_noise": None if gain is None else gain.rate_is_tied,
            "memory_gain": None if gain is None else gain.memory_ratio,
            "memory_gain_is_noise": None if gain is None else gain.memory_is_tied,
        }


def figures_of(trial: Trial, gain: Gain | None) -> Figures:
    """Return a trial's figures.

    Args:
        trial: Any; one without a finished probe has hardly any.
        gain: It against the baseline; None if they cannot be compared.
    """
    pooled = trial.measurement
    rate, samples = trial.tokens_per_s, trial.samples_per_s
    has_steps = pooled is not None and bool(pooled.steps)
    computed = pooled is not None and any(step.num_positions for step in pooled.steps)
    return Figures(
        source=trial.source,
        used_peak_bytes=trial.peak_bytes,
        peak_of=None if pooled is None else memory_name(pooled.device_kind),
        tokens_per_s=None if rate is None else rate.median,
        spread=known_spread(rate, trial.source),
        samples_per_s=None if samples is None else samples.median,
        epoch_s=pooled.epoch_time_s if pooled is not None and has_steps else None,
        padding_share=pooled.padding_share if pooled is not None and computed else None,
        trained_share=trial.coverage,
        gain=gain,
        training="+".join(trial.changes) or "same",
        generation=generation_of(trial),
    )


def objective_values(
    trial: Trial, objectives: Sequence[Objective]
) -> dict[str, dict[str, Any] | None]:
    """Return a trial's value of each objective: unit, median and spread; None where it has none.

    A prediction has no spread.
    """
    found: dict[str, dict[str, Any] | None] = {}
    for item in objectives:
        try:
            value = trial.interval(item)
        except ValueError:
            found[item.name] = None
            continue
        spread = known_spread(value, trial.source)
        found[item.name] = {
            "unit": item.unit,
            "median": value.median,
            "low": None if spread is None else spread.low,
            "high": None if spread is None else spread.high,
        }
    return found


def generation_of(trial: Trial) -> Generation | None:
    """Return what a trial's steps generate in; None if they generate nothing."""
    pooled = trial.measurement
    peak = None if pooled is None else pooled.phases.get("generation")
    if pooled is None or peak is None or not pooled.steps:
        return None
    time_s = median(step.generation_s(pooled.accumulation_steps) for step in pooled.steps)
    training = [
        pooled.fit_bytes(pooled.phases[name])
        for name in ("first_step", "later_steps")
        if name in pooled.phases
    ]
    known = [value for value in training if value is not None]
    return Generation(
        time_s=time_s,
        training_time_s=pooled.step_time_s.median - time_s,
        used_peak_bytes=pooled.fit_bytes(peak),
        training_used_peak_bytes=max(known, default=None),
    )


def known_spread(rate: Interval | None, source: str) -> Interval | None:
    """Return a rate's quartiles; None for a prediction, which has none, and for a single step."""
    if rate is None or source == prediction.SOURCE or rate.low == rate.high:
        return None
    return rate
