"""Why a trial is what it is: its place, what beats it, what its neighbours trade."""

from __future__ import annotations

import json
from typing import Any

import pytest
from report_factory import make_failure, make_report, make_trial

from autotune.errors import NoFeasibleConfigError
from autotune.probe.result import Outcome
from autotune.report.explain import Explanation, closest, explain
from autotune.report.explained_text import render
from autotune.report.model import Report
from autotune.report.trial import Trial
from autotune.units import GIB


def trial(number: int, changed: dict[str, Any], **values: Any) -> Trial:
    candidate = {"adaptation": "full", "checkpointing": "full", "batch": 1, **changed}
    return make_trial(number, changed=changed, candidate=candidate, **values)


def search() -> Report:
    """Return a report with three members of the set, and one of each kind beside it."""
    return make_report(
        [
            trial(0, {}, rate=1000, peak_gib=8, num_probes=2),
            trial(1, {"adaptation": "lora"}, rate=900, peak_gib=4),
            trial(2, {"checkpointing": "none"}, rate=1500, peak_gib=12),
            trial(3, {"batch": 2}, rate=700, peak_gib=9),
            trial(4, {"adaptation": "lora", "batch": 4}, rate=904, peak_gib=4.01),
            trial(
                5,
                {"checkpointing": "none", "batch": 2},
                rate=2000,
                peak_gib=17,
                feasible=False,
                violations={"memory_budget": 1 / 16},
            ),
            make_failure(
                6,
                candidate={"adaptation": "full", "checkpointing": "full", "batch": 8},
                changed={"batch": 8},
            ),
            make_failure(7, Outcome.CRASHED),
        ]
    )


def told(report: Report, number: int) -> tuple[Explanation, str]:
    found = explain(report, report.pick(number))
    json.dumps(found.to_dict(), allow_nan=False)
    return found, " ".join(render(found, 100).plain.split())


def test_a_member_of_the_set_has_a_place_and_neighbours() -> None:
    found, text = told(search(), 0)
    assert found.place is not None
    assert (found.place.by_memory, found.place.by_speed, found.place.num_members) == (2, 2, 3)
    assert "It is the baseline: nothing is changed." in text
    assert "1,000 tokens/s (IQR 2.0%) and a peak of 8.00 GiB" in text
    assert "measured in 2 probes; that is 50.0% of the budget of 16.00 GiB" in text
    assert [(item.direction, item.trial) for item in found.steps] == [("leaner", 1), ("faster", 2)]
    assert (
        "Next leaner, trial 1: 4.00 GiB less, 10% slower, measured, with adaptation=lora instead"
        " of full." in text
    )
    assert "Next faster, trial 2: 4.00 GiB more, 50% faster, measured" in text


def test_neighbours_in_one_setting_say_what_they_trade_and_if_they_fit() -> None:
    found, text = told(search(), 2)
    assert {(item.trial, item.fits) for item in found.settings} == {(0, True), (5, False)}
    assert (
        "With batch=2 instead of 1: 5.00 GiB more, 33% faster, does not fit the budget of 16.00"
        " GiB (trial 5, measured)." in text
    )
    assert found.unknown == ("adaptation",)
    assert "Not known, since no trial differs in it alone: adaptation." in text
    _, text = told(search(), 0)
    assert "With batch=8 instead of 1: runs out of memory (trial 6, measured)." in text


def test_the_balanced_pick_is_explained_by_its_cost_and_the_runner_up_s() -> None:
    report = search()
    found, text = told(report, report.picks()["balanced"])
    reason = next(item for item in found.reasons if item.pick == "balanced")
    own, other = reason.own, reason.other or {}
    assert own["cost"] <= other["cost"]
    assert own["cost"] == pytest.approx(own["lost_rate_share"] + own["memory_cost"], abs=1e-6)
    assert own["memory_cost"] == pytest.approx(own["budget_share"] ** 4 / 2)
    assert f"Next comes trial {reason.runner_up}: {other['cost']:.3f}, of which" in text


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (
            3,
            "dominated",
            "Trial 0 dominates it: rate 1,000 tokens/s against 700 tokens/s (42.9% more)",
        ),
        (4, "tied", "It differs from trial 1 in nothing but noise"),
        (5, "over_limit", "It ran, but is over the budget by 6.2%, which is 1.00 GiB."),
        (6, "out_of_memory", "It runs out of memory (device_oom: tried to allocate 2.00 GiB"),
        (7, "failed", "It did not run to its end (crashed"),
    ],
)
def test_what_keeps_a_trial_from_the_set(number: int, kind: str, words: str) -> None:
    found, text = told(search(), number)
    assert found.why_not is not None
    assert found.why_not.kind == kind
    assert found.place is None
    assert words in text


def test_a_trial_that_would_need_more_says_by_how_much() -> None:
    report = make_report([make_failure(0, needed_bytes=18 * GIB), make_failure(1)])
    assert closest(report).number == 0
    found, text = told(report, 0)
    assert found.nothing_fits
    assert found.least_bytes == 18 * GIB
    assert "The whole run would need 18.00 GiB, 2.00 GiB more than the budget of 16.00" in text
    assert "Nothing fits" in text
    assert "None of 2 trials ran within 16.00 GiB" in text


def test_the_highest_fidelity_names_what_comes_next() -> None:
    found, text = told(search(), search().picks()["highest-fidelity"])
    assert found.trial.number == 2
    assert "[highest-fidelity] keeps 100% of the data's loss tokens with adaptation=full" in text
    assert "Next comes trial 0, which is as faithful" in text


def test_a_run_with_failures_only_and_an_empty_one() -> None:
    report = make_report([make_failure(0, Outcome.CRASHED), make_failure(1, Outcome.TIMEOUT)])
    _, text = told(report, closest(report).number)
    assert "It did not run to its end" in text
    assert "does not run, timeout (trial 1, measured)" in text
    implied = make_failure(0, results=(), skipped_because="out of memory is implied by trial 5")
    assert closest(make_report([implied])).number == 0
    with pytest.raises(NoFeasibleConfigError, match="no trial has ended"):
        closest(make_report([]))


def test_an_interrupted_run_says_so() -> None:
    report = make_report([trial(0, {})], finished=False, interrupted=True)
    _, text = told(report, 0)
    assert "The run was interrupted; this is what its 1 trial" in text
    assert "It is the only one of the Pareto set." in text


def test_one_objective_and_others_than_rate_and_memory() -> None:
    base = search()
    for names in (("peak_memory",), ("epoch_time", "host_memory")):
        report = make_report(base.trials, objectives=names, pareto_numbers=(1,))
        for item in report.trials:
            found, text = told(report, item.number)
            assert (found.place is None) == (found.why_not is not None)
            assert f"Trial {item.number}" in text
    _, text = told(make_report(base.trials, objectives=("epoch_time",), pareto_numbers=(2,)), 3)
    assert "dominates it: an epoch 22 min 13 s against 47 min 37 s" in text
