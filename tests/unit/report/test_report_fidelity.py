"""The pick highest-fidelity: coverage, then values that knobs declare, then rate and memory."""

from __future__ import annotations

from typing import Any

import pytest
from report_factory import make_failure, make_report, make_trial

from autotune.report.fidelity import most_faithful
from autotune.report.trial import Trial


def trial(number: int, changed: dict[str, Any] | None = None, **values: Any) -> Trial:
    return make_trial(number, changed=changed or {}, candidate=changed or {}, **values)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({}, {"adaptation": "lora"}),
        ({"adaptation": "lora"}, {"adaptation": "lora_8bit"}),
        ({"adaptation": "lora_8bit"}, {"adaptation": "lora_4bit"}),
        ({"adaptation": "lora_4bit"}, {"adaptation": "lora_4bit_nested"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"batching": "bfd_split"}, {"batching": "wrapped"}),
        ({"optim": "adamw_torch"}, {"optim": "adamw_8bit"}),
        # All weights in bfloat16 before adapters in float32, wrapped documents before both.
        ({"dtype": "bfloat16"}, {"adaptation": "lora"}),
        ({"batching": "wrapped"}, {"dtype": "bfloat16"}),
    ],
)
def test_faithful_values_go_before_rate(better: dict[str, Any], worse: dict[str, Any]) -> None:
    trials = [trial(1, better, rate=100), trial(2, worse, rate=9000, peak_gib=1)]
    found = most_faithful(trials)
    assert found is not None
    assert found.number == 1


def test_coverage_goes_first_and_a_row_more_is_no_difference() -> None:
    whole = trial(1, {"adaptation": "lora"}, coverage=1.0)
    cut = trial(2, coverage=0.99)
    found = most_faithful([whole, cut])
    assert found is not None
    assert found.number == 1
    found = most_faithful([whole, trial(2, coverage=0.99999)])
    assert found is not None
    assert found.number == 2


def test_of_equally_faithful_trials_the_fastest_then_the_leanest() -> None:
    layouts = [trial(1, {"batching": "padded"}), trial(2, {"batching": "bfd"}, rate=1500)]
    report = make_report([*layouts, trial(3, {"dtype": "float32"}, rate=1500, peak_gib=9)])
    assert report.pick("highest-fidelity").number == 3
    assert report.picks()["highest-fidelity"] == 3


def test_only_what_fits_is_picked_though_it_is_not_of_the_pareto_set() -> None:
    trials = [
        trial(0, feasible=False, violations={"memory_budget": 0.5}),
        trial(1, {"adaptation": "lora"}, rate=500, peak_gib=12),
        trial(2, {"adaptation": "lora_4bit"}, rate=1000, peak_gib=4),
        make_failure(3),
    ]
    report = make_report(trials)
    assert report.pareto_numbers == (2,)
    assert report.pick("highest-fidelity").number == 1
    assert most_faithful([trials[0], trials[3]]) is None


def test_of_those_as_fast_within_the_noise_the_leanest() -> None:
    trials = [trial(1, rate=1000, peak_gib=9), trial(2, {"batching": "bfd"}, rate=999, peak_gib=5)]
    found = most_faithful(trials)
    assert found is not None
    assert found.number == 2


def test_a_rate_that_may_be_anything_takes_no_pick() -> None:
    trials = [trial(1, rate=1000), trial(2, rate=3000, spread=0.5, peak_gib=12)]
    found = most_faithful(trials)
    assert found is not None
    assert found.number == 1
    picks = make_report(trials).picks()
    assert picks["fastest"] == picks["balanced"] == picks["highest-fidelity"] == 1
    assert make_report([trial(2, rate=3000, spread=0.5)]).picks()["fastest"] == 2
