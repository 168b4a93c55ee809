"""Pairs of trials that differ in one setting alone."""

from __future__ import annotations

from typing import Any

from report_factory import make_failure, make_trial

from autotune.report.pairs import differing_knob, pairs
from autotune.report.trial import Trial


def trial(number: int, changed: dict[str, Any], **values: Any) -> Trial:
    candidate = {"adaptation": "full", "length": 64, "batch": 1, **changed}
    return make_trial(number, changed=changed, candidate=candidate, **values)


def test_one_differing_knob_makes_a_pair() -> None:
    assert differing_knob(trial(0, {}), trial(1, {"batch": 2})) == "batch"
    assert differing_knob(trial(0, {}), trial(1, {"batch": 2, "length": 32})) is None
    assert differing_knob(trial(0, {}), trial(1, {})) is None


def test_what_follows_from_the_knob_is_no_further_difference() -> None:
    adapted = trial(1, {"adaptation": "lora", "rank": 16})
    assert differing_knob(trial(0, {}), adapted) == "adaptation"
    assert differing_knob(adapted, trial(2, {"adaptation": "lora", "rank": 8})) == "rank"


def test_gains_are_against_the_value_of_the_baseline() -> None:
    found = pairs(
        [trial(3, {}, rate=1000, peak_gib=10), trial(1, {"batch": 2}, rate=1500, peak_gib=12)]
    )
    (pair,) = found
    assert (pair.before.number, pair.after.number) == (3, 1)
    assert round(pair.gain.rate_ratio, 3) == 1.5
    assert round(pair.gain.memory_ratio, 3) == 1.2


def test_what_did_not_run_or_is_predicted_beside_measured_ones_takes_no_part() -> None:
    failed = make_failure(1, candidate={"adaptation": "full", "length": 64, "batch": 2})
    predicted = trial(2, {"batch": 4}, source="predicted")
    assert pairs([trial(0, {}), failed, predicted]) == ()
