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


_SPEEDS = ("tokens_per_s", "samples_per_s", "epoch_time")


def speed_among(names: Sequence[str]) -> Objective:
    """Return what *fast* means in a search: the first speed among its objectives.

    Where there is none, it is the rate in tokens.
    """
    return builtin.get(next((name for name in _SPEEDS if name in names), _SPEEDS[0]))


def speed(trial: Trial, objective: Objective | None = None) -> float:
    """Return a trial's median speed, more being faster; a time's is its inverse.

    Args:
        trial: Any that finished a probe.
        objective: See :func:`speed_among`; the rate in tokens if not given.

    Raises:
        ValueError: If it has none.
    """
    chosen = objective or builtin.tokens_per_s()
    median = trial.interval(chosen).median
    return median if chosen.maximize else 1.0 / median


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

    Only eligible trials with a value of every objective take part. With one objective it is the
    best, and with it what lies within the noise of the best without being tied with it.

    Args:
        trials: Trials in any order; the order does not change the answer.
        objectives: What to compare; rate and peak memory if not given.
    """
    chosen = tuple(objectives or default_objectives())
    ranked = [item for item in eligible(trials) if not missing(item, chosen)]
    points = [_point(item, chosen) for item in sorted(ranked, key=lambda item: item.number)]
    kept: list[_Point] = []
    for point in sorted(_undominated(points), key=lambda point: point.preference):
        if not any(_tied(point, other) for other in kept):
            kept.append(point)
    return tuple(point.trial for point in kept)


def eligible(trials: Sequence[Trial]) -> list[Trial]:
    """Return the feasible trials with the outcome ``ok``, those that may be recommended.

    Measured and predicted ones are not compared: if any measured trial is feasible, only measured
    ones are returned.
    """
    found = [item for item in trials if item.feasible and item.outcome is Outcome.OK]
    found = [item for item in found if item.measurement is not None]
    if any(item.source == "measured" for item in found):
        found = [item for item in found if item.source == "measured"]
    return found


def rankable(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials whose rate varied no more than a tie takes in; all if there are none.

    What is picked for its rate is not picked for a rate that may be anything.
    """
    return [item for item in trials if not item.is_unranked] or list(trials)


def missing(trial: Trial, objectives: Sequence[Objective]) -> dict[str, str]:
    """Return the objectives of which a trial has no value, each with the reason."""
    reasons = {}
    for item in objectives:
        try:
            trial.interval(item)
        except ValueError as error:
            reasons[item.name] = str(error)
    return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a member of the Pareto set gives up, by the formula of :func:`balanced`.

    Attributes:
        number: Its number.
        lost_rate_share: Share of the best member's rate that it lacks.
        budget_share: Share of the budget that its peak takes.
    """

    number: int
    lost_rate_share: float
    budget_share: float

    @property
    def memory(self) -> float:
        """Return the part of the cost that memory makes."""
        return self.budget_share**4 / 2

    @property
    def total(self) -> float:
        """Return the whole cost; the least is taken."""
        return round(self.lost_rate_share + self.memory, 9)


def costs(
    members: Sequence[Trial],
    budget_bytes: int | None = None,
    speed_objective: Objective | None = None,
) -> tuple[Cost, ...]:
    """Return the members' costs, the least first; see :func:`balanced` for arguments.

    Raises:
        ValueError: If one has no measurement.
    """
    rates = {item.number: speed(item, speed_objective) for item in members}
    peaks = {item.number: _median(item.peak_interval) for item in members}
    best, budget = max(rates.values(), default=1.0), budget_bytes or max(peaks.values(), default=1)
    found = [
        Cost(number=number, lost_rate_share=1.0 - rates[number] / best, budget_share=peak / budget)
        for number, peak in peaks.items()
    ]
    return tuple(sorted(found, key=lambda item: (item.total, peaks[item.number], item.number)))


def thinned(members: Sequence[Trial], most: int) -> list[Trial]:
    """Return at most so many members, two or more, spread evenly by rising memory."""
    ordered = sorted(members, key=lambda trial: trial.peak_bytes or 0)
    if len(ordered) <= most:
        return ordered
    last = len(ordered) - 1
    return [
        ordered[place] for place in sorted({round(n * last / (most - 1)) for n in range(most)})
    ]


def balanced(
    members: Sequence[Trial],
    budget_bytes: int | None = None,
    speed_objective: Objective | None = None,
) -> Trial:
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
        speed_objective: What r is; see :func:`speed_among`.

    Raises:
        ValueError: If there is no member, or one has no measurement.
    """
    if not members:
        raise ValueError("an empty Pareto set has no knee")
    number = costs(members, budget_bytes, speed_objective)[0].number
    return next(item for item in members if item.number == number)


def fastest(
    members: Sequence[Trial],
    baseline: Trial | None = None,
    speed_objective: Objective | None = None,
) -> Trial:
    """Return the member with the greatest median rate, or the baseline if it is greater still.

    A leaner trial may have taken the baseline's place within the noise; what is called fastest
    must not be slower than what was there before.

    Raises:
        ValueError: If there is no member, or one has no measurement.
    """
    rivals = list(members)
    if baseline is not None and baseline.feasible and baseline.outcome is Outcome.OK:
        rivals += [baseline] if all(item.source == baseline.source for item in members) else []
    return min(rivals, key=lambda item: (-speed(item, speed_objective), item.number))


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
