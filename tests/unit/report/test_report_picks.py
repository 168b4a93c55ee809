"""Picks, and what is said where they are not the trials with the extreme figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from report_factory import (
    make_failure,
    make_measurement,
    make_report,
    make_result,
    make_trial,
)

from autotune.probe.result import PHASES, MemoryPeak
from autotune.probe.trl_yaml import header_lines
from autotune.report import Report, warnings
from autotune.report.model import SIZE_LIMIT
from autotune.report.picks import pick_notes
from autotune.report.terminal import render_text
from autotune.report.trial import Trial
from autotune.units import GIB


def test_a_disturbed_trial_is_no_pick():
    """Its rate of 0.48x, 164 % wide, tied with all; as the leanest of the tied it won thrice."""
    measurement = make_measurement((100.0, 300.0, 480.0, 1087.0, 1300.0), 9.98)
    disturbed = make_trial(2, results=(make_result(measurement),))
    rate = disturbed.tokens_per_s
    assert (round(rate.median), round(rate.spread_ratio, 2)) == (480, 1.64)
    trials = [make_trial(0, 1000, 10), make_trial(1, 1050, 10.02), disturbed]
    report = make_report(trials)
    assert 2 not in report.pareto_numbers
    assert report.picks()["fastest"] == 1
    assert 2 not in report.picks().values()


def test_where_the_baseline_is_the_fastest_it_is_the_pick_and_the_report_says_so():
    trials = [make_trial(0, 1000, 10, spread=0.1), make_trial(1, 960, 8, spread=0.1)]
    report = make_report(trials)
    assert report.pareto_numbers == (1,)
    picks = report.picks()
    assert (picks["fastest"], picks["leanest"], picks["balanced"]) == (0, 1, 1)
    assert report.pick("fastest").number == 0
    assert report.pick("fastest").facts["picked_as"][0] == "fastest"
    (note,) = pick_notes(report)
    assert "[fastest] is the baseline, trial 0" in note
    assert note in " ".join(render_text(report, width=200).split())


def test_a_baseline_in_the_pareto_set_that_is_the_fastest_is_named_so():
    report = make_report([make_trial(0, 1000, 10), make_trial(1, 500, 5)])
    assert report.picks()["fastest"] == 0
    (note,) = pick_notes(report)
    assert note == (
        "[fastest] is the baseline, trial 0: no other member of the Pareto set has a higher"
        " median rate."
    )


def test_a_leaner_trial_within_the_noise_is_explained():
    # 1 is leaner than 2 by less than one per cent and trains the same as the baseline, so that
    # the second table shows it.
    trials = [
        make_trial(0, 1000, 12),
        make_trial(1, 600, 8.70),
        make_trial(2, 900, 8.77, changes=("method",)),
    ]
    report = make_report(trials)
    assert report.picks()["leanest"] == 2
    _, note = pick_notes(report)
    assert note == (
        "[leanest] is trial 2 at 8.77 GiB: trial 1, at 8.70 GiB, needs less within the noise only,"
        " and is slower."
    )
    assert "trial 1, at 8.70 GiB" in " ".join(render_text(report, width=200).split())


def test_a_faster_trial_within_the_noise_is_explained():
    report = make_report([make_trial(0, 500, 4), make_trial(1, 1000, 10), make_trial(2, 1015, 12)])
    assert report.picks()["fastest"] == 1
    (note,) = pick_notes(report)
    assert "trial 2, at 1,015, is faster within the noise only" in note


def test_picks_with_the_extreme_figures_need_no_words():
    assert pick_notes(make_report([make_trial(0, 500, 4), make_trial(1, 1000, 10)])) == []
    assert pick_notes(make_report([make_failure(0)])) == []


def test_few_candidates_tried_is_said():
    trials = [make_trial(0, 500, 4), make_trial(1, 1000, 10)]
    (note,) = pick_notes(make_report(trials, num_candidates=19_000))
    assert note.startswith("2 of 19,000 candidates were tried: [fastest] is the fastest of those.")
    (note,) = pick_notes(make_report(trials, num_candidates=SIZE_LIMIT))
    assert f"2 of {SIZE_LIMIT:,} or more candidates" in note
    for enough in (2, 4, 0):  # 0: an earlier report, which does not say
        assert pick_notes(make_report(trials, num_candidates=enough)) == []


def test_a_predicted_lead_within_the_error_is_said():
    trials = [make_trial(n, rate, 4 + n, source="predicted") for n, rate in enumerate((900, 1000))]
    (note,) = pick_notes(make_report(trials))
    assert note == (
        "[fastest] is predicted to be 11% faster than trial 0, which is within the ±25% that"
        " predicted rates may be off by: on the card the order may be another."
    )
    trials[0] = make_trial(0, 700, 4, source="predicted")
    assert pick_notes(make_report(trials)) == []
    assert pick_notes(make_report([make_trial(0, 900, 4), make_trial(1, 1000, 5)])) == []


def test_a_report_says_which_phases_its_probes_covered():
    trials = [make_trial(0)]
    text = " ".join(render_text(make_report(trials)).split())
    assert "probes covered load and the first step, not the later steps, eval or save" in text
    peaks = dict.fromkeys(PHASES, MemoryPeak(used_bytes=GIB))
    pooled = make_measurement(phases=peaks)
    report = make_report([make_trial(0, results=(make_result(pooled),))])
    text = " ".join(render_text(report).split())
    wanted = "load, generation, the first step, the later steps, eval and save"
    assert f"probes covered {wanted}" in text
    header = "\n".join(header_lines(report.pick(0).header(), file_name="x.yaml"))
    assert "covers" in header
    assert wanted in header
    assert "covered" not in render_text(make_report([make_failure(0)]))


def test_a_rate_too_wide_to_rank_is_named():
    trials = [make_trial(0, 1000, 10), make_trial(1, 480, 5, spread=1.64)]
    report = make_report(trials)
    assert "(rate too noisy to rank)" in render_text(report)
    (text,) = [line for line in warnings.collect(trials) if "interquartile" in line]
    assert "trial 1 it is too wide to rank: no more than 10% to each side" in text
    (text,) = [
        line for line in warnings.collect([make_trial(0, spread=0.15)]) if "interquartile" in line
    ]
    assert "rank" not in text


# --- nothing fits -------------------------------------------------------------------------------

PINS = ("dtype=bfloat16", "adaptation=lora_4bit")
OWN = {"budget_source": "--memory-budget"}
CARD = {"name": "virtual:card", "kind": "cuda", "label": "Card", "total_bytes": 24 * GIB}


def failed(number, phase, **candidate):
    trial = make_failure(number, candidate=candidate or {"dtype": "float32"})
    return replace(trial, results=(replace(trial.results[0], phase=phase),))


def test_if_nothing_could_be_loaded_the_weights_are_to_blame():
    trials = [
        failed(0, "load"),
        make_failure(1, results=(), skipped_because="loads at least the weights of trial 0"),
    ]
    error = make_report(trials, lean_pins=PINS, **OWN).nothing_fits()
    assert error.message == (
        "none of 2 trials ran within 16.00 GiB: 2 device_oom. All of them ran out while the model"
        " was loaded: the weights alone do not fit."
    )
    assert error.hint == (
        "Try --pin dtype=bfloat16 --pin adaptation=lora_4bit, raise the memory budget, or widen"
        " the search space."
    )


def test_pins_that_were_tried_or_are_not_legal_are_not_named():
    trials = [failed(0, "load", dtype="bfloat16", adaptation="full")]
    assert "dtype" not in make_report(trials, lean_pins=PINS).nothing_fits().hint
    trials = [failed(0, "load", dtype="bfloat16", adaptation="lora_4bit")]
    for pins in (PINS, ()):
        error = make_report(trials, lean_pins=pins, min_coverage=0.9, **OWN).nothing_fits()
        assert error.hint == "Raise the memory budget, or take a smaller model."


def test_without_a_trial_that_ran_the_one_that_came_furthest_is_named():
    trials = [failed(0, "load"), failed(1, "later_steps"), failed(2, "first_step")]
    error = make_report(trials, lean_pins=PINS, min_coverage=0.95).nothing_fits()
    assert (
        "Trial 1 came closest: device_oom in the later steps (CUDA out of memory. Tried to"
        " allocate 2.00 GiB)." in error.message
    )
    assert "lower --min-coverage" in error.hint


def test_of_trials_that_came_as_far_the_one_that_lacked_least_is_named():
    words = (
        "CUDA out of memory. Tried to allocate {} GiB. GPU 0 has 23 GiB of which {} MiB is free."
    )
    trials = [make_failure(0), *(failed(n, "first_step") for n in (1, 2, 3))]
    for number, tried, free in (
        (1, "3.00", "512.00"),
        (2, "1.50", "256.00"),
        (3, "0.50", "900.00"),
    ):
        detail = words.format(tried, free)
        results = (replace(trials[number].results[0], detail=detail),)
        trials[number] = replace(trials[number], results=results)
    assert (
        "Trial 2 came closest: device_oom in the first step, where one allocation lacked 1.25 GiB;"
        " how much more the rest of the run takes is not known."
        in make_report(trials).nothing_fits().message
    )


def test_what_the_whole_run_would_need_ranks_and_is_named_where_it_is_predicted():
    trials = [
        replace(failed(0, "later_steps"), source="predicted", needed_bytes=49 * GIB),
        replace(failed(1, "first_step"), source="predicted", needed_bytes=round(22.105 * GIB)),
        replace(failed(2, "later_steps"), source="predicted"),
    ]
    error = make_report(trials, device=CARD, **OWN).nothing_fits()
    assert error.message == (
        "none of 3 trials ran within 16.00 GiB: 3 device_oom. Trial 1 came closest: the whole run"
        " would need a predicted 22.11 GiB, 6.11 GiB more."
    )
    assert error.hint == "Raise the memory budget to 22.11 GiB, or widen the search space."
    # What the card does not have, no budget can be raised to.
    small = {**CARD, "total_bytes": 20 * GIB}
    error = make_report(trials, device=small, **OWN).nothing_fits()
    assert error.hint == "Use a card with more than 22.11 GiB, or widen the search space."


def test_what_ran_out_while_it_was_loaded_says_what_it_would_need_in_all():
    trials = [replace(failed(0, "load"), source="predicted", needed_bytes=8 * GIB)]
    error = make_report(trials, device=CARD, budget_bytes=6 * GIB, **OWN).nothing_fits()
    assert error.message.endswith(
        "the weights alone do not fit. Trial 0 came closest: the whole run would need a predicted"
        " 8.00 GiB, 2.00 GiB more."
    )
    assert error.hint == "Raise the memory budget to 8.00 GiB, or take a smaller model."


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"device": CARD, **OWN}, "Raise the memory budget (the card has 24.00 GiB), or widen"),
        ({"device": CARD}, "Use a card with more memory, or widen"),
        ({"device": {**CARD, "total_bytes": 16 * GIB}, **OWN}, "Use a card with more memory, or"),
        ({"device": {**CARD, "kind": "cpu"}}, "Raise the memory budget (the machine has 24.00"),
    ],
)
def test_a_budget_is_to_be_raised_only_where_it_is_the_limit_and_there_is_more(values, hint):
    assert make_report([make_failure(0)], **values).nothing_fits().hint.startswith(hint)


def test_memory_is_no_remedy_against_another_limit():
    over = make_trial(0, peak_gib=10, feasible=False, violations={"coverage": 0.2})
    error = make_report([over], lean_pins=PINS, min_coverage=0.9).nothing_fits()
    assert error.hint == "Lower --min-coverage for shorter rows, or widen the search space."


def test_what_was_predicted_beyond_the_card_round_trips():
    trial = replace(make_failure(0), needed_bytes=GIB)
    assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))).needed_bytes == GIB
    assert "needed_bytes" not in make_failure(0).to_dict()


def test_a_trial_that_ran_but_is_over_comes_closest():
    over = make_trial(2, peak_gib=17, feasible=False, violations={"memory_budget": 0.0625})
    error = make_report([failed(0, "load"), over], lean_pins=PINS).nothing_fits()
    assert (
        "trial 2 came closest with a peak of 17.00 GiB of a budget of 16.00 GiB" in error.message
    )
    assert "memory_budget by 6.2%" in error.message
    assert "--pin adaptation=lora_4bit" in error.hint


def test_a_report_of_an_earlier_version_names_no_pins():
    data = make_report([make_trial(0)]).to_dict()
    del data["lean_pins"]
    assert Report.from_dict(json.loads(json.dumps(data))).lean_pins == ()


def test_a_pick_that_something_beats_in_what_is_no_objective_is_explained_by_that():
    trials = [make_trial(0, 1000, 10), make_trial(1, 400, 3)]
    by_rate = make_report(trials, objectives=("tokens_per_s",), pareto_numbers=(0,))
    assert pick_notes(by_rate) == [
        "[fastest] is the baseline, trial 0: no other member of the Pareto set has a higher median"
        " rate.",
        "[leanest] is trial 0 at 10.00 GiB: trial 1, at 3.00 GiB, needs less, but peak memory is"
        " no objective of this search.",
    ]
    by_memory = make_report(
        [make_trial(0, 300, 10), make_trial(1, 400, 3), make_trial(2, 900, 9)],
        objectives=("peak_memory",),
        pareto_numbers=(1,),
    )
    (note,) = pick_notes(by_memory)
    assert note.endswith("trial 2, at 900, is faster, but speed is no objective of this search.")


def test_a_trial_that_no_pick_goes_by_is_named():
    report = make_report([make_trial(0, 500, 4), make_trial(1, 1000, 10, spread=0.5)])
    assert report.picks()["fastest"] == 0
    notes = " ".join(pick_notes(report))
    assert "Trial 1 has a higher median rate than [fastest], but its steps varied" in notes


def test_speed_that_is_no_objective_is_not_told_of_the_pareto_set():
    trials = [make_trial(0, 1000, 10), make_trial(1, 500, 4)]
    report = make_report(trials, objectives=("peak_memory",))
    assert not any("No member of the Pareto set" in text for text in pick_notes(report))
