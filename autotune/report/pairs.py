"""Trials that differ in one setting alone: what that setting costs and saves, all else equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from autotune.report.compare import Gain, gain_of
from autotune.report.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two trials that ran and that differ in one knob.

    Attributes:
        knob: Its name.
        before: The trial with the value that is compared with; the baseline's, where one has it.
        after: The other one.
        gain: ``after`` against ``before``.
    """

    knob: str
    before: Trial
    after: Trial
    gain: Gain


def differing_knob(a: Trial, b: Trial) -> str | None:
    """Return the one knob in which two candidates differ; None if there are none or several.

    A knob that is active in one of them alone follows from the one that they differ in: a rank
    belongs to the change from full fine-tuning to adapters.
    """
    both = a.candidate.keys() & b.candidate.keys()
    found = [name for name in both if a.candidate[name] != b.candidate[name]]
    return found[0] if len(found) == 1 else None


def pairs(trials: Sequence[Trial]) -> tuple[Pair, ...]:
    """Return all pairs of trials that may be compared and differ in one knob, by knob and number.

    Trials that did not run to their end have nothing to compare and take no part.
    """
    found = []
    ran = sorted((item for item in trials if item.measurements), key=lambda item: item.number)
    for first, second in combinations(ran, 2):
        knob = differing_knob(first, second)
        if knob is None:
            continue
        before, after = first, second
        if knob in before.changed and knob not in after.changed:
            before, after = after, before
        gain = gain_of(after, before)
        if gain is not None:
            found.append(Pair(knob=knob, before=before, after=after, gain=gain))
    return tuple(sorted(found, key=lambda item: item.knob))
