"""What each setting costs and saves in a search, from trials that differ in it alone.

An effect speaks of two values of one knob and holds every pair of trials that has them, all else
equal. A value without such a pair is named as well, with what it was only ever seen together
with: a reader must not take a mixture of changes for the work of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from autotune.probe import trl_yaml
from autotune.probe.result import Interval
from autotune.report.compare import Gain, gain_of
from autotune.report.model import Report
from autotune.report.pairs import Pair, pairs
from autotune.report.trial import Trial
from autotune.space.knob import registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One knob's step from a value to another, all else equal.

    Attributes:
        knob: Its name.
        before: The value that is compared with; the baseline's, where one of the two is.
        after: The other value.
        pairs: Numbers of the trials with ``before`` and ``after``, one pair each.
        memory: Peak memory after over before: median, least and greatest of the pairs.
        rate: Rate after over before, likewise; of the pairs whose rates did not vary by more than
            a tie takes in, if there are any.
        memory_is_noise: Whether no direction of memory can be told: all pairs lie within the
            noise, those that do not disagree, or half of them do and point both ways.
        rate_is_noise: The same of the rate.
        changes: What differs in what is trained: ``tokens``, ``method``; empty if it is the same
            training within rounding.
        from_baseline: Whether ``before`` is the baseline's value.
    """

    knob: str
    before: Any
    after: Any
    pairs: tuple[tuple[int, int], ...]
    memory: Interval
    rate: Interval
    memory_is_noise: bool
    rate_is_noise: bool
    changes: tuple[str, ...] = ()
    from_baseline: bool = False

    @property
    def step(self) -> str:
        """Return it in words, such as ``checkpointing: off to full``."""
        values = [value_text(self.knob, value) for value in (self.before, self.after)]
        return f"{self.knob}: {' to '.join(values)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpaired:
    """A value that ran, but in no pair with all else equal.

    Attributes:
        knob: The knob.
        value: Its value.
        trials: Numbers of the trials that ran with it.
        together_with: The fewest other knobs that differed from a trial with another value of it.
        nearest: Number of the trial that differs in so few.
        gain: That trial against the baseline, all its changes together; None if they cannot be
            compared.
    """

    knob: str
    value: Any
    trials: tuple[int, ...]
    together_with: tuple[str, ...]
    nearest: int
    gain: Gain | None = None

    @property
    def sentence(self) -> str:
        """Return it as a whole sentence."""
        setting = trl_yaml.settings({self.knob: self.value})
        text = (
            f"{setting} was only seen together with changes of {_listed(self.together_with)}"
            f" ({_trials(self.trials)}), so that its own effect is not known."
        )
        if self.gain is None:
            return text
        return (
            f"{text} Trial {self.nearest} against the baseline, all its changes together:"
            f" {self.gain.rate_ratio:.2f}x rate, {self.gain.memory_ratio:.2f}x memory."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A value with which no trial ran to its end.

    Attributes:
        knob: The knob.
        value: Its value.
        trials: Numbers of the trials that had it.
        outcomes: How they ended, each once, in the order of the trials.
    """

    knob: str
    value: Any
    trials: tuple[int, ...]
    outcomes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return it as a whole sentence."""
        setting = trl_yaml.settings({self.knob: self.value})
        return (
            f"With {setting} no trial ran to its end ({_trials(self.trials)}:"
            f" {_listed(self.outcomes)}), so that its effect is not known."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What is known of every setting that a search varied.

    Attributes:
        paired: Effects with all else equal, by knob.
        unpaired: Values that were only seen together with other changes.
        failed: Values with which nothing ran.
    """

    paired: tuple[Effect, ...] = ()
    unpaired: tuple[Unpaired, ...] = ()
    failed: tuple[Failed, ...] = ()

    @property
    def first(self) -> tuple[Effect, ...]:
        """Return the effects that tell most: each value against the baseline's, if it has one."""
        known = {(item.knob, str(item.after)) for item in self.paired if item.from_baseline}
        return tuple(
            item
            for item in self.paired
            if item.from_baseline or (item.knob, str(item.after)) not in known
        )


def effects(report: Report) -> Effects:
    """Return what each setting of a search cost and saved, as far as its trials tell."""
    baseline = report.baseline
    usual = {} if baseline is None else baseline.candidate
    groups: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs(report.trials):
        turned = _oriented(pair, usual)
        before, after = turned.before.candidate, turned.after.candidate
        # As texts, since 1, 1.0 and True are equal and not the same setting.
        values = [value_text(pair.knob, side[pair.knob]) for side in (before, after)]
        key = (pair.knob, values[0], values[1])
        groups[key].append(turned)
    found = [_effect(group, usual) for group in groups.values()]
    found.sort(key=lambda item: (item.knob, not item.from_baseline, item.pairs))
    return Effects(
        paired=tuple(found),
        unpaired=tuple(_unpaired(report, found)),
        failed=tuple(_failed(report.trials)),
    )


def _oriented(pair: Pair, usual: Mapping[str, Any]) -> Pair:
    """Return a pair from the baseline's value to another, else from the lesser to the greater."""
    before = pair.before.candidate[pair.knob]
    after = pair.after.candidate[pair.knob]
    if pair.knob in usual and usual[pair.knob] in (before, after):
        keeps = before == usual[pair.knob]
    else:
        keeps = _order(before) <= _order(after)
    if keeps:
        return pair
    gain = pair.gain
    return Pair(
        knob=pair.knob,
        before=pair.after,
        after=pair.before,
        gain=Gain(
            rate_ratio=1 / gain.rate_ratio,
            memory_ratio=1 / gain.memory_ratio,
            rate_is_tied=gain.rate_is_tied,
            memory_is_tied=gain.memory_is_tied,
        ),
    )


def _order(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)


def _effect(group: Sequence[Pair], usual: Mapping[str, Any]) -> Effect:
    first = group[0]
    gains = [pair.gain for pair in group]
    # A rate that may be anything says nothing of a setting's.
    ranked = [p.gain for p in group if not (p.before.is_unranked or p.after.is_unranked)]
    changes = {name for pair in group for name in _changes(pair)}
    return Effect(
        knob=first.knob,
        before=first.before.candidate[first.knob],
        after=first.after.candidate[first.knob],
        pairs=tuple((pair.before.number, pair.after.number) for pair in group),
        memory=_range([gain.memory_ratio for gain in gains]),
        rate=_range([gain.rate_ratio for gain in ranked or gains]),
        memory_is_noise=_is_noise([(g.memory_ratio, g.memory_is_tied) for g in gains]),
        rate_is_noise=_is_noise([(g.rate_ratio, g.rate_is_tied) for g in ranked]),
        changes=tuple(sorted(changes)),
        from_baseline=_is_usual(first, usual),
    )


def _changes(pair: Pair) -> set[str]:
    """Return what differs in what the two trials of a pair train."""
    before, after = {*pair.before.changes}, {*pair.after.changes}
    found = before ^ after
    if pair.knob in registry.names():
        # Both may train on other tokens than the baseline, and not on the same ones.
        knob = registry.get(pair.knob)
        values = (pair.before.candidate[pair.knob], pair.after.candidate[pair.knob])
        own = {knob.change(value) for value in values if value != knob.baseline}
        found |= own & before & after
    return found


def _range(ratios: Sequence[float]) -> Interval:
    return Interval(median=median(ratios), low=min(ratios), high=max(ratios))


def _is_noise(ratios: Sequence[tuple[float, bool]]) -> bool:
    clear = {ratio > 1 for ratio, is_tied in ratios if not is_tied}
    if len(clear) != 1:
        return True
    num_tied = sum(is_tied for _, is_tied in ratios)
    is_split = len({ratio > 1 for ratio, _ in ratios}) > 1
    return is_split and 2 * num_tied >= len(ratios)


def _unpaired(report: Report, found: Sequence[Effect]) -> Iterator[Unpaired]:
    ran = [item for item in report.trials if item.measurements]
    usual = {} if report.baseline is None else report.baseline.candidate
    paired = {
        (item.knob, value_text(item.knob, value))
        for item in found
        for value in (item.before, item.after)
    }
    for knob, value, own in _values(ran):
        rest = [item for item in ran if _has_other(item, knob, value)]
        is_usual = knob in usual and usual[knob] == value  # each other value is told against it
        if is_usual or (knob, value_text(knob, value)) in paired or not rest:
            continue
        differing = [(_others(a, b, knob), a) for a in own for b in rest]
        together_with, nearest = min(differing, key=lambda item: len(item[0]))
        if not together_with:
            continue  # such trials may not be compared: measured elsewhere, or otherwise
        yield Unpaired(
            knob=knob,
            value=value,
            trials=tuple(item.number for item in own),
            together_with=together_with,
            nearest=nearest.number,
            gain=gain_of(nearest, report.baseline),
        )


def _failed(trials: Sequence[Trial]) -> Iterator[Failed]:
    ran = {
        (knob, value_text(knob, value))
        for knob, value, _ in _values([item for item in trials if item.measurements])
    }
    for knob, value, own in _values(trials):
        is_varied = any(_has_other(item, knob, value) for item in trials)
        if is_varied and (knob, value_text(knob, value)) not in ran:
            yield Failed(
                knob=knob,
                value=value,
                trials=tuple(item.number for item in own),
                outcomes=tuple(dict.fromkeys(item.outcome.value for item in own)),
            )


def _values(trials: Sequence[Trial]) -> list[tuple[str, Any, list[Trial]]]:
    """Return every value of every knob with the trials that have it, by knob and value."""
    found: dict[tuple[str, str], tuple[Any, list[Trial]]] = {}
    for item in trials:
        for knob, value in item.candidate.items():
            found.setdefault((knob, value_text(knob, value)), (value, []))[1].append(item)
    return [(knob, value, own) for (knob, _), (value, own) in sorted(found.items())]


def _has_other(trial: Trial, knob: str, value: Any) -> bool:
    return knob in trial.candidate and trial.candidate[knob] != value


def _others(a: Trial, b: Trial, knob: str) -> tuple[str, ...]:
    """Return the other knobs in which two candidates differ."""
    both = a.candidate.keys() & b.candidate.keys()
    return tuple(sorted(name for name in both - {knob} if a.candidate[name] != b.candidate[name]))


def _is_usual(pair: Pair, usual: Mapping[str, Any]) -> bool:
    return pair.knob in usual and usual[pair.knob] == pair.before.candidate[pair.knob]


def value_text(knob: str, value: Any) -> str:
    """Return a value as the YAML shows it."""
    return trl_yaml.settings({knob: value}).removeprefix(f"{knob}=")


def _trials(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"trial{'' if len(numbers) == 1 else 's'} {listed}"


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if words[1:] else "".join(words)
