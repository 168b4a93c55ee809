from __future__ import annotations

import pytest
from report_factory import make_failure, make_measurement, make_result, make_trial

from autotune.objectives import Objective, epoch_time, peak_memory, samples_per_s, tokens_per_s
from autotune.probe.result import Interval
from autotune.report.pareto import (
    balanced,
    dominates,
    fastest,
    pareto_set,
    significantly_better,
    tied,
)
from autotune.units import GIB


def numbers(trials):
    return [item.number for item in trials]


def test_a_dominated_trial_is_left_out_and_the_rest_sorted_by_memory():
    trials = [make_trial(0, 1000, 10), make_trial(1, 2000, 15), make_trial(2, 900, 12)]
    assert numbers(pareto_set(trials)) == [0, 1]


def test_overlapping_rates_are_a_tie_and_memory_decides():
    noisy = make_trial(1, 1030, 10, spread=0.2)
    lean = make_trial(2, 1000, 8, spread=0.2)
    assert dominates(lean, noisy)
    assert numbers(pareto_set([noisy, lean])) == [2]


def test_among_trials_tied_in_everything_the_leanest_then_the_simplest_is_shown():
    many = {"a": 1, "b": 2}
    assert tied(make_trial(1, 1000, 10.00), make_trial(2, 1003, 10.02))
    assert numbers(pareto_set([make_trial(1, 1003, 10.02), make_trial(2, 1000, 10.0)])) == [2]
    same = [make_trial(1, 1000, 10, changed=many), make_trial(2, 1000, 10, changed={"a": 1})]
    assert numbers(pareto_set(same)) == [2]
    assert numbers(pareto_set([make_trial(2), make_trial(1)])) == [1]


def test_differences_within_the_resolution_are_a_tie_without_any_spread():
    exact = tokens_per_s()
    a, b, c = (Interval(median=v, low=v, high=v) for v in (1000.0, 1005.0, 1020.0))
    assert not significantly_better(b, a, exact)
    assert significantly_better(c, a, exact)
    assert significantly_better(a, c, peak_memory())


def test_peaks_of_several_probes_overlap_where_their_ranges_do():
    low, high = make_measurement(peak_gib=9.0), make_measurement(peak_gib=11.0)
    wide = make_trial(1, results=(make_result(low), make_result(high)))
    assert tied(wide, make_trial(2, peak_gib=10.5), [peak_memory()])
    assert not tied(wide, make_trial(2, peak_gib=12.0), [peak_memory()])


def test_infeasible_failed_and_predicted_trials_do_not_take_part():
    over = make_trial(1, 9000, 1, feasible=False)
    predicted = make_trial(2, 9000, 1, source="predicted")
    kept = make_trial(3)
    assert numbers(pareto_set([over, predicted, kept, make_failure(4)])) == [3]
    assert numbers(pareto_set([over, predicted])) == [2]
    assert pareto_set([over, make_failure(4)]) == ()
    assert pareto_set([]) == ()


def _bands(objective_values):
    """Return objectives that read chosen intervals by trial number."""

    def objective(name, index, direction):
        def read(measurement):
            low, high = objective_values[measurement.rows_per_epoch][index]
            return Interval(median=(low + high) / 2, low=low, high=high)

        return Objective(name, "", direction, read)

    return [objective("rate", 0, "maximize"), objective("memory", 1, "minimize")]


def test_a_circle_of_dominance_still_leaves_something():
    # 1 beats 2 beats 3 on rate; 3 beats 4 beats 1 on memory; ties elsewhere.
    values = {
        1.0: ((107, 108), (107, 108)),
        2.0: ((104, 105), (102, 107)),
        3.0: ((101, 102), (101, 102)),
        4.0: ((102, 107), (104, 105)),
    }
    trials = [make_trial(n, measurement_values={"rows_per_epoch": float(n)}) for n in values_of(4)]
    objectives = _bands(values)
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert all(dominates(trials[a], trials[b], objectives) for a, b in pairs)
    kept = pareto_set(trials, objectives)
    assert kept
    below = make_trial(5, measurement_values={"rows_per_epoch": 5.0})
    values[5.0] = ((100.1, 100.2), (109, 110))
    assert pareto_set([*trials, below], objectives) == kept


def values_of(count):
    return range(1, count + 1)


def test_custom_objectives_are_used():
    short = make_trial(1, 1000, 10)
    rows = make_trial(2, 900, 10, measurement_values={"rows_per_sample": 0.5})
    assert numbers(pareto_set([short, rows], [samples_per_s()])) == [2]
    assert numbers(pareto_set([short, rows], [tokens_per_s()])) == [1]


def test_spread_beyond_the_limit_does_not_tie():
    """A probe that other work disturbed must not be as good as every other for that."""
    baseline, fast = make_trial(0, 1000, 10), make_trial(1, 1500, 10.5)
    disturbed = make_trial(2, 480, 9.95, spread=1.64)
    assert not tied(disturbed, baseline)
    assert not tied(disturbed, fast)
    members = pareto_set([baseline, fast, disturbed])
    assert numbers(members) == [0, 1]
    assert disturbed.is_unranked
    assert not baseline.is_unranked


@pytest.mark.parametrize("spread", [0.21, 0.5, 1.64])
def test_a_tie_spans_a_bounded_distance_however_wide_the_spreads(spread):
    a = make_trial(1, 1000, 10, spread=spread)
    assert tied(a, make_trial(2, 1150, 10, spread=spread))
    assert not tied(a, make_trial(2, 1300, 10, spread=spread))


def test_fastest_is_never_slower_than_a_feasible_baseline():
    baseline = make_trial(0, 1000, 10, spread=0.1)
    leaner = make_trial(1, 960, 8, spread=0.1)
    members = pareto_set([baseline, leaner])
    assert numbers(members) == [1]
    assert fastest(members).number == 1
    assert fastest(members, baseline).number == 0
    assert fastest(members, make_trial(0, 900)).number == 1
    assert fastest(members, make_trial(0, 2000, feasible=False)).number == 1
    assert fastest(members, make_failure(0)).number == 1
    assert fastest(members, make_trial(0, 2000, source="predicted")).number == 1


@pytest.mark.parametrize(
    ("members", "budget_gib", "best"),
    [
        # A card of 80 GiB: memory that is there anyway does not make up for half of the rate.
        ([(1000, 8.8), (2400, 40), (2500, 68)], 75, 2),
        ([(1000, 8.8), (2500, 60)], 75, 2),
        # A card of 24 GiB: what is nearly as fast and leaves room goes before the edge.
        ([(400, 8), (850, 14), (1000, 22)], 22.8, 2),
        ([(400, 8), (1000, 14), (1050, 22)], 22.8, 2),
        # The edge is taken where all else is far slower.
        ([(300, 8), (400, 14), (1000, 22.5)], 22.8, 3),
        # Little memory costs nothing worth naming.
        ([(990, 4), (1000, 6)], 75, 2),
        ([(500, 4), (900, 5), (1000, 16)], 16, 2),
    ],
)
def test_balanced_weighs_rate_against_room_in_the_budget(members, budget_gib, best):
    trials = [make_trial(n, *figures) for n, figures in enumerate(members, start=1)]
    assert balanced(trials, round(budget_gib * GIB)).number == best


def test_balanced_without_a_budget_measures_memory_by_the_largest():
    members = [make_trial(1, 500, 4), make_trial(2, 900, 5), make_trial(3, 1000, 16)]
    assert balanced(members).number == 2
    assert balanced([make_trial(1, 1000, 4), make_trial(2, 1020, 16)]).number == 1
    assert balanced([make_trial(1, 100, 15), make_trial(2, 1000, 16)]).number == 2


def test_of_equally_balanced_members_the_leaner_then_the_earlier_is_taken():
    assert balanced([make_trial(2, 1000, 4), make_trial(1, 1000, 4)]).number == 1
    assert balanced([make_trial(1, 1000, 0.05), make_trial(2, 1000, 0.04)], 75 * GIB).number == 2


def test_balanced_of_one_and_of_none():
    assert balanced([make_trial(1)]).number == 1
    with pytest.raises(ValueError, match="empty"):
        balanced([])


def test_what_has_no_value_of_an_objective_is_left_out():
    whole = make_trial(0, 500, 4)
    short = make_trial(1, 1000, 4, measurement_values={"rows_per_epoch": 0.0})
    chosen = [epoch_time()]
    assert [item.number for item in pareto_set([whole, short], chosen)] == [0]
    assert [item.number for item in pareto_set([whole, short])] == [1]


def test_of_one_objective_the_best_and_of_the_tied_the_leanest():
    trials = [make_trial(0, 1000, 9), make_trial(1, 1005, 5), make_trial(2, 700, 2)]
    assert [item.number for item in pareto_set(trials, [tokens_per_s()])] == [1]
