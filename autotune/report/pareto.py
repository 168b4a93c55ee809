"""Which trials to show: dominance that knows about noise, and the pick between the extremes.

**Dominance.** A dominates B if A is significantly better in at least one objective and
significantly worse in none. *Significantly* means that their intervals do not overlap, each
widened to the objective's resolution and cut to ``TIE_LIMIT`` to each side of its median: a rate
that varied by more is no rate, and must not be as good as every other for that.

Overlap is not transitive, so over several objectives this relation can, rarely, run in a circle.
A trial is therefore left out if another one dominates it, directly or through a chain, and it
does not dominate that one back by a chain. Without a circle these are exactly the trials that no
other dominates; with one, those of the circle that are dominated on their medians are left out
too. What remains is never empty as long as there is a feasible trial.

**Ties.** What is left may still hold trials that differ significantly in nothing. Of those only
one is shown: the one with the lowest memory, then with the fewest changed knobs, then the
fastest, then the earliest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune import objectives as builtin
from autotune.objectives import TIE_LIMIT, Objective
from autotune.probe.result import Interval, Outcome
from autotune.report.trial import Trial


def default_objectives() -> tuple[Objective, ...]:
    """Return the objectives of a search that names none: rate and peak memory."""
    return (builtin.tokens_per_s(), builtin.peak_memory())


def significantly_better(a: Interval, b: Interval, objective: Objective) -> bool:
    """Whether ``a`` is better than ``b`` by more than their spread and the resolution."""
    wide_a, wide_b = _widen(a, objective), _widen(b, objective)
    if objective.maximize:
        return wide_a.low > wide_b.high
    return wide_a.high < wide_b.low


def dominates(a: Trial, b: Trial, objectives: Sequence[Objective] | None = None) -> bool:
    """Whether ``a`` is significantly better in some objective and significantly worse in none.

    Raises:
        ValueError: If one of them has no measurement.
    """
    chosen = tuple(objectives or default_objectives())
    return _dominates(_point(a, chosen), _point(b, chosen))


def tied(a: Trial, b: Trial, objectives: Sequence[Objective] | None = None) -> bool:
    """Whether ``a`` and ``b`` differ significantly in no objective."""
    chosen = tuple(objectives or default_objectives())
    return _tied(_point(a, chosen), _point(b, chosen))


def pareto_set(
    trials: Sequence[Trial], objectives: Sequence[Objective] | None = None
) -> tuple[Trial, ...]:
    """Return the trials worth choosing from, by rising peak memory.

    Only feasible trials with the outcome ``ok`` take part. Measured and predicted ones are not
    compared: if any measured trial is feasible, only measured ones take part.

    Args:
        trials: Trials in any order; the order does not change the answer.
        objectives: What to compare; rate and peak memory if not given.
    """
    chosen = tuple(objectives or default_objectives())
    eligible = [item for item in trials if item.feasible and item.outcome is Outcome.OK]
    eligible = [item for item in eligible if item.measurement is not None]
    if any(item.source == "measured" for item in eligible):
        eligible = [item for item in eligible if item.source == "measured"]
    points = [_point(item, chosen) for item in sorted(eligible, key=lambda item: item.number)]
    kept: list[_Point] = []
    for point in sorted(_undominated(points), key=lambda point: point.preference):
        if not any(_tied(point, other) for other in kept):
            kept.append(point)
    return tuple(point.trial for point in kept)


def balanced(members: Sequence[Trial], budget_bytes: int | None = None) -> Trial:
    """Return the member that gives up least: rate against the best, memory against the budget.

    With the rate r and the peak memory m of each member, its cost is::

        (1 - r / r_max) + (m / budget)^4 / 2

    Memory that the card has anyway is worth little, and room below the budget is worth much: half
    of the budget costs as much as 3 % of the best rate, 70 % of it 12 %, 80 % 20 %, 90 % 33 %,
    and all of it 50 %. So a small share of the memory never makes up for half the rate, and a
    member on the edge gives way to one that is nearly as fast. Of equal members the one that
    takes less memory is taken, then the earliest.

    Args:
        members: At least one.
        budget_bytes: The limit on peak memory; None for the largest peak of the members.

    Raises:
        ValueError: If there is no member, or one has no measurement.
    """
    if not members:
        raise ValueError("an empty Pareto set has no knee")
    rates = {item.number: _median(item.tokens_per_s) for item in members}
    peaks = {item.number: _median(item.peak_interval) for item in members}
    best, budget = max(rates.values()), budget_bytes or max(peaks.values())

    def cost(trial: Trial) -> tuple[float, float, int]:
        lost = 1.0 - rates[trial.number] / best
        share = peaks[trial.number] / budget
        return round(lost + share**4 / 2, 9), peaks[trial.number], trial.number

    return min(members, key=cost)


def fastest(members: Sequence[Trial], baseline: Trial | None = None) -> Trial:
    """Return the member with the greatest median rate, or the baseline if it is greater still.

    A leaner trial may have taken the baseline's place within the noise; what is called fastest
    must not be slower than what was there before.

    Raises:
        ValueError: If there is no member, or one has no measurement.
    """
    rivals = list(members)
    if baseline is not None and baseline.feasible and baseline.outcome is Outcome.OK:
        rivals += [baseline] if all(item.source == baseline.source for item in members) else []
    return min(rivals, key=lambda item: (-_median(item.tokens_per_s), item.number))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A trial with its values, turned so that more is better in every dimension."""

    trial: Trial
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    medians: tuple[float, ...]
    preference: tuple[float, ...]


def _point(trial: Trial, objectives: Sequence[Objective]) -> _Point:
    intervals = [trial.interval(item) for item in objectives]
    turned = [
        _turn(_widen(interval, item), item)
        for interval, item in zip(intervals, objectives, strict=True)
    ]
    peak, rate = trial.peak_interval, trial.tokens_per_s
    return _Point(
        trial=trial,
        lows=tuple(item.low for item in turned),
        highs=tuple(item.high for item in turned),
        medians=tuple(item.median for item in turned),
        preference=(
            peak.median if peak else math.inf,
            len(trial.changed),
            -rate.median if rate else 0.0,
            trial.number,
        ),
    )


def _turn(interval: Interval, objective: Objective) -> Interval:
    if objective.maximize:
        return interval
    return Interval(median=-interval.median, low=-interval.high, high=-interval.low)


def _widen(interval: Interval, objective: Objective) -> Interval:
    half = abs(interval.median) * objective.resolution_ratio / 2
    limit = max(abs(interval.median) * TIE_LIMIT, half)
    return Interval(
        median=interval.median,
        low=max(min(interval.low, interval.median - half), interval.median - limit),
        high=min(max(interval.high, interval.median + half), interval.median + limit),
    )


def _dominates(a: _Point, b: _Point) -> bool:
    if any(low_b > high_a for low_b, high_a in zip(b.lows, a.highs, strict=True)):
        return False
    return any(low_a > high_b for low_a, high_b in zip(a.lows, b.highs, strict=True))


def _dominates_on_medians(a: _Point, b: _Point) -> bool:
    return a.medians != b.medians and all(
        mine >= theirs for mine, theirs in zip(a.medians, b.medians, strict=True)
    )


def _tied(a: _Point, b: _Point) -> bool:
    return all(
        low_a <= high_b and low_b <= high_a
        for low_a, high_a, low_b, high_b in zip(a.lows, a.highs, b.lows, b.highs, strict=True)
    )


def _undominated(points: Sequence[_Point]) -> list[_Point]:
    beats = [
        {j for j, b in enumerate(points) if i != j and _dominates(a, b)}
        for i, a in enumerate(points)
    ]
    beaten = set().union(*beats)
    free = [i for i in range(len(points)) if i not in beaten]
    rest = set(range(len(points))) - set(free) - _reach(free, beats)
    # Only circles, and what hangs below them, are left in ``rest``: almost always nothing.
    reached = {i: _reach([i], beats) for i in rest}
    circles = [i for i in rest if all(j in reached[i] for j in rest if i in reached[j])]
    kept = [
        i for i in circles if not any(_dominates_on_medians(points[j], points[i]) for j in circles)
    ]
    return [points[i] for i in sorted([*free, *kept])]


def _reach(start: Sequence[int], edges: Sequence[set[int]]) -> set[int]:
    seen: set[int] = set()
    todo = list(start)
    while todo:
        new = edges[todo.pop()] - seen
        seen |= new
        todo.extend(new)
    return seen


def _median(interval: Interval | None) -> float:
    if interval is None:
        raise ValueError("a member of a Pareto set has no measurement")
    return interval.median
