"""Why a trial is what it is: its place, what beats it, and what its neighbours would trade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from autotune.probe.result import Outcome
from autotune.report import fidelity, pareto
from autotune.report.compare import closest_first, closest_to_feasible, comparable, gain_of
from autotune.report.figures import figures_of, objective_values
from autotune.report.model import Report
from autotune.report.pairs import differing_knob
from autotune.report.trial import Trial

Obstacle = Literal[
    "out_of_memory", "failed", "over_limit", "predicted", "no_value", "dominated", "tied", "circle"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a trial stands on the Pareto set; 1 is the first.

    Attributes:
        num_members: Trials of the set.
        by_memory: Its rank by peak memory, the leanest first.
        by_speed: Its rank by median speed, the fastest first.
    """

    num_members: int
    by_memory: int
    by_speed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a pick is this trial and not the one that comes next.

    Attributes:
        pick: Its name.
        runner_up: Number of the next one; None if there is no other.
        own: Figures that decide, of the trial.
        other: The same of the next one; empty if there is none.
    """

    pick: str
    own: Mapping[str, Any]
    runner_up: int | None = None
    other: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """What keeps a trial from the Pareto set.

    Attributes:
        kind: Of which kind it is.
        other: The trial that dominates it or that it is tied with; None where that is none.
        over: Per limit, by which share it is over.
        excess_bytes: By how much its peak is over the budget; None if it is not, or not known.
        missing: Objectives that it has no value of, each with the reason.
    """

    kind: Obstacle
    other: Trial | None = None
    over: Mapping[str, float] | None = None
    excess_bytes: int | None = None
    missing: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        other = None if self.other is None else self.other.number
        return {
            "kind": self.kind,
            "trial": other,
            "over": dict(self.over or {}),
            "excess_bytes": self.excess_bytes,
            "missing": dict(self.missing or {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """What another trial, or a prediction, would trade against the explained one.

    Attributes:
        direction: ``leaner`` or ``faster`` on the Pareto set; ``setting`` if it differs in one
            setting alone; ``change`` if it was predicted for this.
        changes: The knobs that differ: the value that it has, None where the knob does not apply.
        instead_of: The explained trial's values of these.
        trial: Its number; None for a prediction beside the run.
        outcome: How it ended.
        source: ``measured`` or ``predicted``.
        fits: Whether it is within all limits.
        over: Per limit that it is over, by which share.
        peak_bytes: Its peak; None if not known.
        tokens_per_s: Its median rate; None if not known.
        memory_bytes: Its peak less the explained trial's; None if they cannot be compared.
        rate_ratio: Its rate over the explained trial's; None as before.
        memory_is_tied: Whether the difference in memory lies within the noise.
        rate_is_tied: Whether the difference in rate does.
        trained_share: Share of the data's loss tokens that it trains on.
        why: Why it was not run, in words; empty if it was.
    """

    direction: Literal["leaner", "faster", "setting", "change"]
    changes: Mapping[str, Any]
    instead_of: Mapping[str, Any]
    outcome: Outcome
    source: str
    fits: bool
    trial: int | None = None
    over: Mapping[str, float] | None = None
    peak_bytes: int | None = None
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    rate_ratio: float | None = None
    memory_is_tied: bool = False
    rate_is_tied: bool = False
    trained_share: float = 1.0
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "outcome": self.outcome.value, "over": dict(self.over or {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything there is to say about why a trial is what it is.

    Attributes:
        report: Where it is from.
        trial: The one that is explained.
        picked_as: The picks that name it.
        place: Where it stands on the Pareto set; None if it is not of it.
        reasons: Why these picks name it.
        why_not: What keeps it from the Pareto set; None if it is of it.
        steps: The neighbours on the Pareto set.
        settings: Trials, and predictions, that differ from it in one setting alone.
        unknown: Knobs that the run varied, but in no such trial.
        nothing_fits: Why nothing fits and what to do, in two sentences; empty if something does.
        fitting: Where nothing fits, changes of this trial that are predicted to fit, fewest first.
        closest: Where none of them fits, those changes of it with the least peaks.
        num_predicted: Predictions that were made for this.
        least_bytes: Where nothing fits, the least peak that is known or predicted; None if none.
        card: Where nothing fits, the smallest card that this would fit on; empty if not known.
        notes: Whole sentences on what could not be said.
    """

    report: Report
    trial: Trial
    picked_as: tuple[str, ...] = ()
    place: Place | None = None
    reasons: tuple[Reason, ...] = ()
    why_not: WhyNot | None = None
    steps: tuple[Neighbour, ...] = ()
    settings: tuple[Neighbour, ...] = ()
    unknown: tuple[str, ...] = ()
    nothing_fits: tuple[str, ...] = ()
    fitting: tuple[Neighbour, ...] = ()
    closest: tuple[Neighbour, ...] = ()
    num_predicted: int = 0
    least_bytes: int | None = None
    card: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        trial, report = self.trial, self.report
        ran = bool(trial.measurements)
        return {
            "trial": trial.number,
            "is_baseline": trial.number == report.baseline_number,
            "picked_as": list(self.picked_as),
            "outcome": trial.outcome.value,
            "feasible": trial.feasible,
            "source": trial.source,
            "candidate": dict(trial.candidate),
            "changed": dict(trial.changed),
            "budget_bytes": report.budget_bytes,
            "figures": figures_of(trial, report.gain(trial)).to_dict() if ran else None,
            "objectives": objective_values(trial, report.known_objectives) if ran else None,
            "place": None if self.place is None else asdict(self.place),
            "reasons": [asdict(item) for item in self.reasons],
            "why_not": None if self.why_not is None else self.why_not.to_dict(),
            "steps": [item.to_dict() for item in self.steps],
            "settings": [item.to_dict() for item in self.settings],
            "unknown": list(self.unknown),
            "nothing_fits": list(self.nothing_fits),
            "fitting": [item.to_dict() for item in self.fitting],
            "closest": [item.to_dict() for item in self.closest],
            "num_predicted": self.num_predicted,
            "least_bytes": self.least_bytes,
            "card": self.card,
            "notes": list(self.notes),
        }


def closest(report: Report) -> Trial:
    """Return the trial that comes closest where nothing fits.

    Raises:
        NoFeasibleConfigError: If no trial has ended.
    """
    ran = closest_to_feasible(report.trials)
    known = [item for item in report.trials if item.needed_bytes is not None]
    least = min(known, key=lambda item: (item.needed_bytes or 0, item.number), default=None)
    probed = closest_first(report.trials)
    found = ran or least or (probed[0] if probed else None)
    if found is None and report.trials:
        found = report.trials[0]
    if found is None:
        raise report.nothing_fits()
    return report.pick(found.number)


def explain(report: Report, trial: Trial) -> Explanation:
    """Return why a trial of a report is what it is, from what the run itself has found."""
    members = report.pareto
    is_member = any(item.number == trial.number for item in members)
    picks = tuple(name for name, number in report.picks().items() if number == trial.number)
    settings = _settings(report, trial)
    explained = Explanation(
        report=report,
        trial=trial,
        picked_as=picks,
        place=_place(report, members, trial) if is_member else None,
        reasons=tuple(_reason(report, members, trial, name) for name in picks),
        why_not=None if is_member else _why_not(report, members, trial),
        steps=_steps(report, members, trial) if is_member else (),
        settings=settings,
        unknown=unknown_settings(report, trial, settings),
    )
    if members:
        return explained
    error = report.nothing_fits()
    known = [item.needed_bytes or item.peak_bytes for item in report.trials]
    return replace(
        explained,
        nothing_fits=(f"{error.message[:1].upper()}{error.message[1:]}", error.hint),
        least_bytes=min((size for size in known if size), default=None),
    )


def unknown_settings(
    report: Report, trial: Trial, settings: Sequence[Neighbour]
) -> tuple[str, ...]:
    """Return the knobs that the run varied, but that no neighbour differs in alone."""
    seen: dict[str, set[Any]] = {}
    for item in report.trials:
        for name, value in item.candidate.items():
            seen.setdefault(name, set()).add(value)
    told = {name for item in settings for name in item.changes}
    return tuple(
        name for name in trial.candidate if len(seen.get(name, ())) > 1 and name not in told
    )


def against(
    report: Report,
    trial: Trial,
    other: Trial,
    direction: Literal["leaner", "faster", "setting", "change"],
    *,
    is_own: bool = True,
) -> Neighbour:
    """Return what ``other`` trades against ``trial``.

    Args:
        report: Where ``trial`` is from.
        trial: The explained one.
        other: Its neighbour.
        direction: What kind of neighbour it is.
        is_own: Whether it is a trial of the run, and not a prediction beside it.
    """
    names = sorted(
        name
        for name in {*trial.candidate, *other.candidate}
        if trial.candidate.get(name) != other.candidate.get(name)
    )
    knob = differing_knob(trial, other)
    names = names if knob is None else [knob]
    rate, peak = other.tokens_per_s, other.peak_bytes
    gain = gain_of(other, trial)
    own_peak = trial.peak_bytes if trial.peak_bytes is not None else trial.needed_bytes
    difference = None
    if peak is not None and own_peak is not None and other.source == trial.source:
        difference = peak - own_peak
    return Neighbour(
        direction=direction,
        changes={name: other.candidate.get(name) for name in names},
        instead_of={name: trial.candidate.get(name) for name in names},
        trial=other.number if is_own else None,
        outcome=other.outcome,
        source=other.source,
        fits=other.feasible,
        over={name: value for name, value in other.violations.items() if value > 0},
        peak_bytes=peak if peak is not None else other.needed_bytes,
        tokens_per_s=None if rate is None else rate.median,
        memory_bytes=difference,
        rate_ratio=None if gain is None else gain.rate_ratio,
        memory_is_tied=gain is not None and gain.memory_is_tied,
        rate_is_tied=gain is not None and gain.rate_is_tied,
        trained_share=other.coverage,
        why=other.skipped_because or "",
    )


def _place(report: Report, members: Sequence[Trial], trial: Trial) -> Place:
    fast = sorted(members, key=lambda item: (-pareto.speed(item, report.speed), item.number))
    return Place(
        num_members=len(members),
        by_memory=1 + [item.number for item in members].index(trial.number),
        by_speed=1 + [item.number for item in fast].index(trial.number),
    )


def _reason(report: Report, members: Sequence[Trial], trial: Trial, pick: str) -> Reason:
    others = [item for item in members if item.number != trial.number]
    if pick == "balanced":
        costs = pareto.costs(pareto.rankable(members), report.budget_bytes, report.speed)
        told = [
            {
                "lost_rate_share": item.lost_rate_share,
                "budget_share": item.budget_share,
                "memory_cost": item.memory,
                "cost": item.total,
            }
            for item in costs[:2]
        ]
        following = costs[1].number if costs[1:] else None
        return Reason(pick=pick, own=told[0], runner_up=following, other=(*told, {})[1])
    if pick == "highest-fidelity":
        rivals = [item for item in report.trials if item.number != trial.number]
        second = fidelity.most_faithful(rivals)
        is_as_faithful = second is not None and fidelity.as_faithful(trial, second)
        own = {**_faith(trial), "is_as_faithful": is_as_faithful}
        if second is None:
            return Reason(pick=pick, own=own)
        return Reason(pick=pick, own=own, runner_up=second.number, other=_faith(second))
    if pick == "leanest":
        runner_up = min(others, key=lambda item: item.peak_bytes or 0, default=None)
        figure = _peak
    else:
        runner_up = max(others, key=lambda item: pareto.speed(item, report.speed), default=None)
        figure = _rate
    return Reason(
        pick=pick,
        own=figure(trial, report),
        runner_up=None if runner_up is None else runner_up.number,
        other={} if runner_up is None else figure(runner_up, report),
    )


def _peak(trial: Trial, report: Report) -> dict[str, Any]:
    return {"peak_bytes": trial.peak_bytes}


def _rate(trial: Trial, report: Report) -> dict[str, Any]:
    return {report.speed.name: trial.interval(report.speed).median}


def _faith(trial: Trial) -> dict[str, Any]:
    return {"trained_share": trial.coverage, "settings": fidelity.settings_of(trial)}


def _why_not(report: Report, members: Sequence[Trial], trial: Trial) -> WhyNot:
    budget, objectives = report.budget_bytes, report.known_objectives
    if trial.outcome in (Outcome.DEVICE_OOM, Outcome.HOST_OOM):
        needed = trial.needed_bytes
        over = None if needed is None or budget is None else max(needed - budget, 0) or None
        return WhyNot(kind="out_of_memory", excess_bytes=over)
    if trial.outcome is not Outcome.OK or trial.measurement is None:
        return WhyNot(kind="failed")
    if not trial.feasible:
        peak = trial.peak_bytes
        excess = None if peak is None or budget is None or peak <= budget else peak - budget
        limits = {name: value for name, value in trial.violations.items() if value > 0}
        return WhyNot(kind="over_limit", over=limits, excess_bytes=excess)
    ranked = pareto.eligible(report.trials)
    if all(item.number != trial.number for item in ranked):
        return WhyNot(kind="predicted")
    if lacking := pareto.missing(trial, objectives):
        return WhyNot(kind="no_value", missing=lacking)
    ranked = [
        item
        for item in ranked
        if item.number != trial.number and not pareto.missing(item, objectives)
    ]
    first = {item.number for item in members}
    for item in sorted(ranked, key=lambda item: item.number not in first):
        if pareto.dominates(item, trial, objectives):
            return WhyNot(kind="dominated", other=item)
    for item in members:
        if pareto.tied(item, trial, objectives):
            return WhyNot(kind="tied", other=item)
    return WhyNot(kind="circle")


def _steps(report: Report, members: Sequence[Trial], trial: Trial) -> tuple[Neighbour, ...]:
    index = [item.number for item in members].index(trial.number)
    found = []
    if index:
        found.append(against(report, trial, members[index - 1], "leaner"))
    fast = sorted(members, key=lambda item: (pareto.speed(item, report.speed), item.number))
    place = [item.number for item in fast].index(trial.number)
    if place + 1 < len(fast):
        found.append(against(report, trial, fast[place + 1], "faster"))
    return tuple(found)


def _settings(report: Report, trial: Trial) -> tuple[Neighbour, ...]:
    best: dict[tuple[str, str], tuple[tuple[bool, bool, int], Trial]] = {}
    for other in report.trials:
        knob = None if other.number == trial.number else differing_knob(trial, other)
        if knob is None or other.outcome in (Outcome.CRASHED, Outcome.LOST):
            continue  # these say nothing about the setting
        # A knob that follows from it, as a rank does from adapters, may vary.
        key = (knob, str(other.candidate[knob]))
        rank = (other.outcome is not Outcome.OK, not comparable(other, trial), other.number)
        if key not in best or rank < best[key][0]:
            best[key] = (rank, other)
    order = list(trial.candidate)
    found = [(order.index(key[0]), other.number, other) for key, (_, other) in best.items()]
    return tuple(
        against(report, trial, other, "setting")
        for _, _, other in sorted(found, key=lambda x: x[:2])
    )
