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
from autotune.units import format_gib, parse_bytes

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


def nothing_fits(
    trials: Sequence[Trial],
    budget_bytes: int | None,
    lean_pins: Sequence[str] = (),
    min_coverage: float = 0.0,
) -> NoFeasibleConfigError:
    """Return the error for a search without a feasible trial: what came closest, what to do.

    Args:
        trials: All of them.
        budget_bytes: Limit on peak memory; None if there was none.
        lean_pins: Pins that take less memory and are legal here, as ``knob=value``.
        min_coverage: Least share of loss tokens that was asked for.
    """
    if not trials:
        return NoFeasibleConfigError(
            "no trial has ended, so there is nothing to recommend.",
            hint="Let the search run longer.",
        )
    closest = closest_to_feasible(trials)
    if closest is None:
        return _none_ran(trials, budget_bytes, lean_pins, min_coverage)
    over = ", ".join(
        f"{name} by {value:.1%}" for name, value in closest.violations.items() if value > 0
    )
    limit = "" if budget_bytes is None else f" of a budget of {format_gib(budget_bytes)}"
    kind = "" if closest.source == "measured" else f"{closest.source} "
    return NoFeasibleConfigError(
        f"none of {len(trials)} trials is within every limit; trial {closest.number} came closest"
        f" with a {kind}peak of {format_gib(closest.peak_bytes)}{limit}"
        f" (over: {over or 'not known'}).",
        hint=_remedies(_untried(lean_pins, [closest]), min_coverage),
    )


def _none_ran(
    trials: Sequence[Trial],
    budget_bytes: int | None,
    lean_pins: Sequence[str],
    min_coverage: float,
) -> NoFeasibleConfigError:
    limit = "" if budget_bytes is None else f" within {format_gib(budget_bytes)}"
    counts = Counter(item.outcome.value for item in trials)
    ended = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    message = f"none of {len(trials)} trials ran{limit}: {ended}"
    probed = [item for item in trials if item.results]
    if all(item.outcome is Outcome.DEVICE_OOM for item in trials) and probed:
        last = {item.results[-1].phase for item in probed}
        if last == {PHASES[0]}:
            return NoFeasibleConfigError(
                f"{message}. All of them ran out while the model was loaded: the weights alone do"
                " not fit.",
                hint=_remedies(_untried(lean_pins, probed), 0.0, to_load=True),
            )
    closest = max(probed, key=_nearness, default=None)
    if closest is None:
        return NoFeasibleConfigError(f"{message}.", hint=_remedies(lean_pins, min_coverage))
    result, shortfall = closest.results[-1], _shortfall(closest)
    phase = f" in {phase_name(result.phase)}" if result.phase else ""
    short = "" if shortfall is None else f", where {format_gib(shortfall)} more were needed"
    detail = "" if short else next(iter(result.detail.splitlines()), "")
    return NoFeasibleConfigError(
        f"{message}. Trial {closest.number} came closest: {closest.outcome.value}{phase}"
        f"{short}{f' ({detail})' if detail else ''}.",
        hint=_remedies(_untried(lean_pins, [closest]), min_coverage),
    )


def _remedies(pins: Sequence[str], min_coverage: float, *, to_load: bool = False) -> str:
    options = ["raise the memory budget"]
    if pins:
        options.insert(0, f"try {' '.join(f'--pin {pin}' for pin in pins)}")
    if min_coverage:
        options.append("lower --min-coverage for shorter rows")
    # With the smallest weights tried, no other value of a knob makes a model load.
    options.append("take a smaller model" if to_load and not pins else "widen the search space")
    text = f"{', '.join(options[:-1])}, or {options[-1]}."
    return f"{text[:1].upper()}{text[1:]}"


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
