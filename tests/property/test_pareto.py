from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "report"))
from report_factory import make_failure, make_report, make_trial

from autotune import objectives
from autotune.probe.result import Interval, Outcome
from autotune.report import Report, Trial
from autotune.report.pareto import balanced, dominates, pareto_set, significantly_better, tied

NUMBERS = st.floats(min_value=1, max_value=20)


@st.composite
def feasible(draw, number=0):
    trial = make_trial(
        number,
        rate=draw(NUMBERS) * 100,
        peak_gib=draw(st.one_of(NUMBERS, st.sampled_from([8.0, 8.02, 8.2]))),
        spread=draw(st.sampled_from([0.0, 0.01, 0.1, 0.4])),
        changed={str(index): 1 for index in range(draw(st.integers(0, 3)))},
    )
    if draw(st.booleans()):
        again = make_trial(number, rate=draw(NUMBERS) * 100, peak_gib=draw(NUMBERS), spread=0.1)
        trial = replace(trial, results=(*trial.results, *again.results))
    return trial


@st.composite
def any_trial(draw, number=0):
    kind = draw(st.sampled_from(["feasible"] * 4 + ["over", "failed", "skipped", "predicted"]))
    if kind == "failed":
        return make_failure(number, draw(st.sampled_from(list(Outcome)[1:])))
    if kind == "skipped":
        return make_failure(number, results=(), skipped_because="implied by trial 0")
    trial = draw(feasible(number))
    if kind == "over":
        return replace(trial, feasible=False, violations={"memory_budget": draw(NUMBERS)})
    return replace(trial, source="predicted") if kind == "predicted" else trial


def lists_of(strategy):
    return st.lists(strategy, max_size=9).map(
        lambda found: [replace(item, number=index) for index, item in enumerate(found)]
    )


TRIALS = lists_of(any_trial())
FEASIBLE = lists_of(feasible()).filter(bool)


def beats_by_chain(a, b, trials):
    seen, todo = {a.number}, [a]
    while todo:
        current = todo.pop()
        if current.number != b.number and dominates(current, b):
            return True
        for other in trials:
            if other.number not in seen and dominates(current, other):
                seen.add(other.number)
                todo.append(other)
    return False


@given(FEASIBLE)
def test_no_member_is_dominated(trials):
    for member in pareto_set(trials):
        for other in trials:
            if other.number != member.number and dominates(other, member):
                # Only in a circle, which the member closes.
                assert beats_by_chain(member, other, trials)


@given(FEASIBLE)
def test_no_two_members_are_tied(trials):
    members = pareto_set(trials)
    for a in members:
        assert not any(tied(a, b) for b in members if a.number != b.number)


@given(FEASIBLE)
def test_each_trial_left_out_has_a_reason(trials):
    members = pareto_set(trials)
    kept = {item.number for item in members}
    for trial in trials:
        others = [item for item in trials if item.number != trial.number]
        if trial.number not in kept:
            assert any(dominates(other, trial) for other in others) or any(
                tied(member, trial) for member in members
            )


@given(TRIALS, st.randoms())
def test_the_order_does_not_matter(trials, random):
    shuffled = list(trials)
    random.shuffle(shuffled)
    assert pareto_set(shuffled) == pareto_set(trials)


@given(TRIALS)
def test_it_is_empty_only_if_nothing_is_feasible(trials):
    assert bool(pareto_set(trials)) == any(item.feasible for item in trials)


@given(FEASIBLE, st.data())
def test_adding_a_dominated_trial_changes_nothing(trials, data):
    members = pareto_set(trials)
    model = data.draw(st.sampled_from(members))
    worse = replace(model, number=99, results=tuple(shrunk(item) for item in model.results))
    assert dominates(worse, model) is False
    if dominates(model, worse):
        assert pareto_set([*trials, worse]) == members


def shrunk(result):
    measurement = result.measurement
    steps = tuple(
        replace(step, micro_times_s=tuple(4 * t for t in step.micro_times_s))
        for step in measurement.steps
    )
    phases = {
        name: replace(peak, used_bytes=peak.used_bytes * 2)
        for name, peak in measurement.phases.items()
    }
    return replace(result, measurement=replace(measurement, steps=steps, phases=phases))


@given(FEASIBLE)
def test_the_knee_is_a_member_whatever_the_order(trials):
    members = pareto_set(trials)
    assert balanced(members) in members
    assert balanced(members[::-1]) == balanced(members)


@pytest.mark.parametrize("name", objectives.registry.names())
@given(a=NUMBERS, b=NUMBERS)
def test_directions(name, a, b):
    objective = objectives.get(name)
    less, more = sorted([a, b])
    low, high = (Interval(median=v, low=v, high=v) for v in (less, more))
    better, worse = (high, low) if objective.direction == "maximize" else (low, high)
    assert not significantly_better(worse, better, objective)
    assert significantly_better(better, worse, objective) or more <= less * 1.0101
    assert objective.is_better(better.median, worse.median) == (less != more)


@pytest.mark.parametrize("name", ["tokens_per_s", "samples_per_s", "epoch_time"])
def test_a_faster_trial_is_better(name):
    objective = objectives.get(name)
    slow, fast = make_trial(1, 1000).measurement, make_trial(2, 2000).measurement
    assert significantly_better(objective.read(fast), objective.read(slow), objective)


@given(TRIALS)
def test_json_round_trip(trials):
    report = make_report(trials)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    for trial in trials:
        assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial
