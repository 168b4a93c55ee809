"""One trial against another: the gain over the baseline, and what came closest to fitting."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune import objectives
from autotune.errors import NoFeasibleConfigError
from autotune.probe.result import PHASES, Outcome, phase_name
from autotune.report import pareto
from autotune.report.trial import Trial
from autotune.units import format_gib, format_gib_apart, format_gib_up, parse_bytes

ASKED = "--memory-budget"
"""Source of a budget that the user gave."""

_LACKING = re.compile(
    r"Tried to allocate (\d+(?:\.\d+)? [KMG]iB)\b.* of which (\d+(?:\.\d+)? [KMG]iB) is free"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A trial against the baseline.

    Attributes:
        rate_ratio: Its median rate over the baseline's; above 1 is faster.
        memory_ratio: Its median peak memory over the baseline's; below 1 is leaner.
        rate_is_tied: Whether the difference in rate lies within the noise.
        memory_is_tied: Whether the difference in memory lies within the noise.
    """

    rate_ratio: float
    memory_ratio: float
    rate_is_tied: bool
    memory_is_tied: bool


def comparable(a: Trial, b: Trial) -> bool:
    """Whether two trials' numbers may be set against each other.

    They may not if one is predicted and the other measured, or if device, driver, host or
    versions differ between any two of their results that finished.
    """
    if a.source != b.source:
        return False
    finished = [item for item in (*a.results, *b.results) if item.outcome is Outcome.OK]
    return all(item.environment == finished[0].environment for item in finished)


def gain_of(trial: Trial, baseline: Trial | None) -> Gain | None:
    """Return a trial's rate and memory against the baseline's; None if they cannot be compared."""
    if baseline is None or not comparable(trial, baseline):
        return None
    rate, base_rate = trial.tokens_per_s, baseline.tokens_per_s
    peak, base_peak = trial.peak_interval, baseline.peak_interval
    if rate is None or base_rate is None or peak is None or base_peak is None:
        return None
    if not base_rate.median or not base_peak.median:
        return None
    return Gain(
        rate_ratio=rate.median / base_rate.median,
        memory_ratio=peak.median / base_peak.median,
        rate_is_tied=pareto.tied(trial, baseline, (objectives.tokens_per_s(),)),
        memory_is_tied=pareto.tied(trial, baseline, (objectives.peak_memory(),)),
    )


def closest_to_feasible(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial that ran but is the least over its limits; None if none ran."""
    ran = [item for item in trials if item.outcome is Outcome.OK and item.measurement is not None]
    return min(ran, key=lambda item: (_excess(item), item.number), default=None)


def closest_first(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that were probed, those first that got furthest and lacked least."""
    return sorted((item for item in trials if item.results), key=_nearness, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What kept trials from fitting, and what may be changed of it; see :func:`nothing_fits`."""

    budget_bytes: int | None
    lean_pins: Sequence[str]
    min_coverage: float
    device_bytes: int | None
    is_enforced: bool
    place: str

    def remedies(
        self,
        pins: Sequence[str],
        *,
        needed: int | None = None,
        of_memory: bool = True,
        to_load: bool = False,
    ) -> str:
        """Return what to do, in a sentence, a larger budget only if the device has it."""
        options = [f"try {' '.join(f'--pin {pin}' for pin in pins)}"] if pins else []
        options += [self._more_memory(needed)] if of_memory else []
        if self.min_coverage and not to_load:
            options.append("lower --min-coverage for shorter rows")
        # With the smallest weights tried, no other value of a knob makes a model load.
        options.append(
            "take a smaller model" if to_load and not pins else "widen the search space"
        )
        text = f"{', '.join(options[:-1])}, or {options[-1]}." if options[1:] else f"{options[0]}."
        return f"{text[:1].upper()}{text[1:]}"

    def _more_memory(self, needed: int | None) -> str:
        budget, device = self.budget_bytes, self.device_bytes
        if needed is not None:
            figure = format_gib_up(needed)
            if device is None or needed <= device:
                return f"raise the memory budget to {figure}"
            return f"use a {self.place} with more than {figure}"
        if self.is_enforced and (budget is None or device is None or budget < device):
            most = "" if device is None else f" (the {self.place} has {format_gib(device)})"
            return f"raise the memory budget{most}"
        return f"use a {self.place} with more memory"


def nothing_fits(
    trials: Sequence[Trial],
    budget_bytes: int | None,
    lean_pins: Sequence[str] = (),
    min_coverage: float = 0.0,
    *,
    device_bytes: int | None = None,
    is_enforced: bool = True,
    place: str = "card",
) -> NoFeasibleConfigError:
    """Return the error for a search without a feasible trial: what came closest, what to do.

    Args:
        trials: All of them.
        budget_bytes: Limit on peak memory; None if there was none.
        lean_pins: Pins that take less memory and are legal here, as ``knob=value``.
        min_coverage: Least share of loss tokens that was asked for.
        device_bytes: Memory of the device, above which no budget can be; None if not known.
        is_enforced: Whether the budget, and not the device alone, limited the probes.
        place: What a larger one is needed of, if the device is too small.
    """
    if not trials:
        return NoFeasibleConfigError(
            "no trial has ended, so there is nothing to recommend.",
            hint="Let the search run longer.",
        )
    limits = _Limits(
        budget_bytes=budget_bytes,
        lean_pins=lean_pins,
        min_coverage=min_coverage,
        device_bytes=device_bytes,
        is_enforced=is_enforced,
        place=place,
    )
    closest = closest_to_feasible(trials)
    if closest is None:
        return _none_ran(trials, limits)
    over = ", ".join(
        f"{name} by {value:.1%}" for name, value in closest.violations.items() if value > 0
    )
    peak, is_over = closest.peak_bytes, True
    shown = [format_gib(peak)]
    if peak is not None and budget_bytes is not None:
        shown = list(format_gib_apart(peak, budget_bytes))
        is_over = peak > budget_bytes
    limit = "" if budget_bytes is None else f" of a budget of {shown[-1]}"
    kind = "" if closest.source == "measured" else f"{closest.source} "
    return NoFeasibleConfigError(
        f"none of {len(trials)} trials is within every limit; trial {closest.number} came closest"
        f" with a {kind}peak of {shown[0]}{limit} (over: {over or 'not known'}).",
        hint=limits.remedies(
            # Pins for smaller weights are no help against a limit on something else.
            _untried(lean_pins, [closest]) if is_over else (),
            needed=peak,
            of_memory=is_over,
        ),
    )


def _none_ran(trials: Sequence[Trial], limits: _Limits) -> NoFeasibleConfigError:
    budget, pins = limits.budget_bytes, limits.lean_pins
    within = "" if budget is None else f" within {format_gib(budget)}"
    counts = Counter(item.outcome.value for item in trials)
    ended = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    message = f"none of {len(trials)} trials ran{within}: {ended}."
    probed = closest_first(trials)
    last = {item.results[-1].phase for item in probed}
    is_memory = all(item.outcome is Outcome.DEVICE_OOM for item in trials)
    to_load = is_memory and last == {PHASES[0]}
    if to_load:
        message += " All of them ran out while the model was loaded: the weights alone do not fit."
    predicted = [(item.needed_bytes, item) for item in trials if item.needed_bytes is not None]
    if predicted:
        needed, closest = min(predicted, key=lambda pair: (pair[0], pair[1].number))
        return NoFeasibleConfigError(
            f"{message} Trial {closest.number} came closest: {_need(needed, budget)}.",
            hint=limits.remedies(
                _untried(pins, probed if to_load else [closest]),
                needed=needed,
                to_load=to_load,
            ),
        )
    if to_load:
        hint = limits.remedies(_untried(pins, probed), to_load=True)
        return NoFeasibleConfigError(message, hint=hint)
    if not probed:
        return NoFeasibleConfigError(message, hint=limits.remedies(pins))
    return NoFeasibleConfigError(
        f"{message} Trial {probed[0].number} came closest: {_ending(probed[0])}.",
        hint=limits.remedies(_untried(pins, [probed[0]])),
    )


def _need(needed: int, budget: int | None) -> str:
    """Return what a trial would need in all, as predicted without the card's limit."""
    more = "" if budget is None or needed <= budget else f", {format_gib(needed - budget)} more"
    return f"the whole run would need a predicted {format_gib(needed)}{more}"


def _ending(trial: Trial) -> str:
    """Return how a trial ended that no prediction says the whole need of."""
    result, shortfall = trial.results[-1], _shortfall(trial)
    phase = f" in {phase_name(result.phase)}" if result.phase else ""
    if shortfall is not None:
        return (
            f"{trial.outcome.value}{phase}, where one allocation lacked {format_gib(shortfall)};"
            " how much more the rest of the run takes is not known"
        )
    detail = next(iter(result.detail.splitlines()), "")
    return f"{trial.outcome.value}{phase}{f' ({detail})' if detail else ''}"


def _untried(pins: Sequence[str], trials: Sequence[Trial]) -> list[str]:
    """Return the pins that no trial had."""
    tried = {f"{name}={value}" for item in trials for name, value in item.candidate.items()}
    return [pin for pin in pins if pin not in tried]


def _nearness(trial: Trial) -> tuple[int, float, int]:
    """Return how far a trial got, then by how little it failed there, then how early it was."""
    phase, shortfall = trial.results[-1].phase, _shortfall(trial)
    progress = PHASES.index(phase) if phase in PHASES else -1
    return progress, -math.inf if shortfall is None else -shortfall, -trial.number


def _shortfall(trial: Trial) -> int | None:
    """Return the bytes that its last allocation lacked, in PyTorch's words; None if not known."""
    match = _LACKING.search(trial.results[-1].detail)
    if match is None:
        return None
    try:
        lacking = parse_bytes(match[1]) - parse_bytes(match[2])
    except ValueError:
        return None
    # Free memory may be out of reach, in pieces or beyond the process's own limit.
    return lacking if lacking > 0 else None


def _excess(trial: Trial) -> float:
    return sum(value for value in trial.violations.values() if value > 0)
