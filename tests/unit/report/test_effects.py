"""What each setting costs and saves, from trials that differ in it alone."""

from __future__ import annotations

from typing import Any

import pytest
from report_factory import make_failure, make_report, make_trial

from autotune.report.effect_notes import note
from autotune.report.effects import Effect, effects
from autotune.report.trial import Trial

BASELINE = {"checkpointing": "full", "adaptation": "full", "per_device_train_batch_size": 4}


def trial(
    number: int, changed: dict[str, Any], rate: float = 1000, peak: float = 10, **values: Any
) -> Trial:
    candidate = {**BASELINE, **changed}
    return make_trial(number, rate, peak, changed=changed, candidate=candidate, **values)


def found(*trials: Trial) -> list[Effect]:
    return list(effects(make_report(trials)).paired)


def test_pairs_of_one_step_are_one_effect_with_median_and_range() -> None:
    (off,) = [
        item
        for item in found(
            trial(0, {}),
            trial(1, {"checkpointing": "none"}, 1500, 12),
            trial(2, {"adaptation": "lora"}, 1000, 5),
            trial(3, {"adaptation": "lora", "checkpointing": "none"}, 1300, 8),
        )
        if item.knob == "checkpointing"
    ]
    assert off.step == "checkpointing: full to none"
    assert off.pairs == ((0, 1), (2, 3))
    assert off.from_baseline
    assert (off.rate.median, off.rate.low, off.rate.high) == pytest.approx((1.4, 1.3, 1.5))
    assert (off.memory.low, off.memory.high) == pytest.approx((1.2, 1.6))
    assert not off.memory_is_noise
    assert not off.rate_is_noise


def test_an_effect_leads_from_the_value_of_the_baseline_whichever_ran_first() -> None:
    # The pair itself leads from 2 to 0: neither of the two trials leaves the knob unchanged.
    (first, *_) = found(
        make_trial(0, candidate={"batch": 1}, changed={}),
        make_trial(1, 2000, 20, candidate={"batch": 2}, changed={"batch": 2}),
        make_trial(2, 4000, 40, candidate={"batch": 4}, changed={"batch": 4}),
    )
    assert (first.before, first.after) == (1, 2)
    assert first.rate.median == pytest.approx(2)


def test_values_that_are_not_the_baselines_are_compared_from_the_lesser_to_the_greater() -> None:
    many, few = (
        trial(number, {"adaptation": "lora", "lora_r": rank}, peak=peak)
        for number, rank, peak in ((1, 64, 12), (2, 8, 6))
    )
    (rank,) = [item for item in found(trial(0, {}), many, few) if item.knob == "lora_r"]
    assert (rank.before, rank.after, rank.from_baseline) == (8, 64, False)
    assert rank.memory.median == pytest.approx(2)


def test_what_differs_by_less_than_the_spread_or_both_ways_is_noise() -> None:
    (same,) = found(trial(0, {}), trial(1, {"checkpointing": "none"}, 1005, 10.01))
    assert same.memory_is_noise
    assert same.rate_is_noise
    mixed = [
        item
        for item in found(
            trial(0, {}),
            trial(1, {"checkpointing": "none"}, 1500),
            trial(2, {"adaptation": "lora"}, 1000, 5),
            trial(3, {"adaptation": "lora", "checkpointing": "none"}, 500, 5),
        )
        if item.knob == "checkpointing"
    ]
    assert mixed[0].rate_is_noise


def test_training_differs_where_one_side_trains_otherwise() -> None:
    (lora,) = found(trial(0, {}), trial(1, {"adaptation": "lora"}, changes=("method",)))
    assert lora.changes == ("method",)


def test_two_trials_that_both_cut_rows_do_not_train_the_same() -> None:
    short, shorter = (
        make_trial(
            number,
            candidate={"max_length": length, "seed": 1},
            changed={"max_length": length, "seed": 1},
            changes=("tokens",),
        )
        for number, length in ((1, 256), (2, 96))
    )
    start = make_trial(0, candidate={"max_length": 1024, "seed": 0}, changed={})
    (cut,) = found(start, short, shorter)
    assert (cut.before, cut.after) == (96, 256)
    assert cut.changes == ("tokens",)


def test_packing_of_rows_that_are_cut_anyway_is_another_training() -> None:
    cut = {"max_length": 448}
    start, padded, packed = (
        make_trial(
            number,
            1000 + 500 * number,
            candidate={"batching": "padded", "max_length": 1024, **changed},
            changed=changed,
            changes=("tokens",) if changed else (),
        )
        for number, changed in enumerate([{}, cut, {**cut, "batching": "bfd"}])
    )
    (packing,) = [item for item in found(start, padded, packed) if item.knob == "batching"]
    assert packing.changes == ("tokens",)


def test_a_saver_that_needs_more_memory_is_called_out() -> None:
    (item,) = found(
        trial(0, {"checkpointing": "none"}, 1000, 10),
        trial(1, {"checkpointing": "full"}, 700, 11),
    )
    assert note(item) == (
        "checkpointing=full instead of none should need less memory, but needed 10% more here and"
        " cost 30% of the rate (1 pair, all else equal)."
    )


def test_a_saver_that_saves_nothing_and_costs_rate_is_called_out() -> None:
    (item,) = found(
        trial(0, {"per_device_train_batch_size": 8}),
        trial(1, {"per_device_train_batch_size": 2}, 700),
    )
    assert note(item) == (
        "per_device_train_batch_size=2 instead of 8 saved no memory here that can be told from"
        " noise, and cost 30% of the rate (1 pair, all else equal)."
    )
    # The same when the baseline is the one that saves.
    (turned,) = found(
        trial(0, {"per_device_train_batch_size": 2}, 700),
        trial(1, {"per_device_train_batch_size": 8}),
    )
    assert note(turned) == note(item)


def test_what_is_better_in_both_is_called_out_and_a_trade_is_not() -> None:
    (both,) = found(trial(0, {}), trial(1, {"adaptation": "lora"}, 1500, 5, changes=("method",)))
    assert note(both) == (
        "adaptation=lora was better than full in both: 50% less memory and 50% more rate (1 pair,"
        " all else equal). It is another training (method)."
    )
    (trade,) = found(trial(0, {}), trial(1, {"adaptation": "lora"}, 700, 5))
    assert note(trade) == ""


def test_a_knob_that_nobody_knows_is_no_saver() -> None:
    (item,) = found(
        make_trial(0, candidate={"mine": "a"}, changed={}),
        make_trial(1, 500, candidate={"mine": "b"}, changed={"mine": "b"}),
    )
    assert note(item) == ""


def test_a_value_without_a_pair_says_what_it_was_seen_with() -> None:
    report = make_report(
        [
            trial(0, {}),
            trial(1, {"checkpointing": "none", "adaptation": "lora"}, 2000, 5),
        ]
    )
    by_knob = {item.knob: item for item in effects(report).unpaired}
    assert len(by_knob) == len(effects(report).unpaired) == 2
    assert by_knob["checkpointing"].sentence == (
        "checkpointing=none was only seen together with changes of adaptation (trial 1), so that"
        " its own effect is not known. Trial 1 against the baseline, all its changes together:"
        " 2.00x rate, 0.50x memory."
    )


def test_a_value_with_which_nothing_ran_says_so() -> None:
    oom = make_failure(1, candidate={**BASELINE, "checkpointing": "none"})
    (item,) = effects(make_report([trial(0, {}), oom])).failed
    assert item.sentence == (
        "With checkpointing=none no trial ran to its end (trial 1: device_oom), so that its effect"
        " is not known."
    )


def test_each_value_is_first_told_against_the_baselines() -> None:
    trials = [
        make_trial(i, 1000 * (i + 1), candidate={"batch": i}, changed={"batch": i} if i else {})
        for i in range(3)
    ]
    every = effects(make_report(trials))
    assert [(item.before, item.after) for item in every.first] == [(0, 1), (0, 2)]
    assert len(every.paired) == 3


@pytest.mark.parametrize("trials", [[], [make_failure(0), make_failure(1)], [trial(0, {})]])
def test_a_search_without_pairs_has_no_effects(trials: list[Trial]) -> None:
    every = effects(make_report(trials))
    assert every.paired == every.unpaired == ()


def test_a_rate_that_may_be_anything_says_nothing_of_a_setting() -> None:
    trials = [trial(0, {}), trial(1, {"checkpointing": "none"}, 3000, 8, spread=0.5)]
    (effect,) = found(*trials)
    assert effect.rate_is_noise
    assert not effect.memory_is_noise
    assert "rate" not in note(effect).replace("none", "")
    # Where another pair has one, that one counts alone.
    other = [
        trial(2, {"adaptation": "lora"}, 1000, 5),
        trial(3, {"adaptation": "lora", "checkpointing": "none"}, 1300, 4),
    ]
    (effect,) = [item for item in found(*trials, *other) if item.knob == "checkpointing"]
    assert effect.rate.median == pytest.approx(1.3)
    assert not effect.rate_is_noise
