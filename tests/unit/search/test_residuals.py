"""What measurements teach about candidates that have not been measured."""

from __future__ import annotations

import itertools
import math

import pytest

from autotune.search.quantity import Quantity
from autotune.search.residuals import Likeness, Residuals, Scales

CANDIDATES = [
    {"batching": batching, "length": length, "adapter": adapter}
    for batching, length, adapter in itertools.product(
        ("padded", "packed"), (64, 128, 256), ("full", "lora")
    )
]
SCALES = Scales(common=0.5, knobs=0.2, combinations=0.1, noise=0.01)


def likeness() -> Likeness:
    return Likeness(CANDIDATES, ("length",))


def row(**wanted: object) -> int:
    return next(
        number
        for number, item in enumerate(CANDIDATES)
        if all(item[name] == value for name, value in wanted.items())
    )


def truth(item: dict[str, object]) -> float:
    """Return a quantity to which every knob adds a factor of its own."""
    length = float(str(item["length"]))
    return (
        length
        * (1.5 if item["batching"] == "packed" else 1.0)
        * (0.5 if item["adapter"] == "lora" else 1.0)
    )


def test_a_candidate_is_most_like_itself_and_more_like_its_neighbours() -> None:
    one_by_one, together = likeness().parts([row(length=64)], range(len(CANDIDATES)))
    assert one_by_one[0, row(length=64)] == together[0, row(length=64)] == 1.0
    assert one_by_one[0, row(length=128)] > one_by_one[0, row(length=256)]
    assert together[0, row(length=128)] < 1.0


def test_a_value_that_is_not_active_is_no_neighbour() -> None:
    found = Likeness([{"rank": 8}, {"rank": 16}, {"other": 1}], ("rank",))
    one_by_one, _ = found.parts([0], [1, 2])
    assert one_by_one[0, 0] > one_by_one[0, 1] == 0.0


def test_nothing_observed_leaves_what_was_expected() -> None:
    mean, deviation = Residuals(likeness(), [], [], [], SCALES).posterior([0, 1])
    assert mean == pytest.approx([0.0, 0.0])
    assert deviation == pytest.approx([math.sqrt(0.5**2 + 0.2**2 + 0.1**2)] * 2)


def test_what_is_common_is_learnt_from_one_measurement() -> None:
    found = Residuals(likeness(), [0], [0.6], [0.0], SCALES)
    mean, deviation = found.posterior(range(len(CANDIDATES)))
    assert mean[0] == pytest.approx(0.6, abs=0.01)
    assert (mean > 0.45).all()
    assert deviation[0] < 0.02 < deviation[-1] < SCALES.common


def test_the_effect_of_a_knob_carries_over() -> None:
    """Predictions are off by a factor for packing; a few measurements tell for all."""
    guesses = {
        number: truth({**item, "batching": "padded"}) for number, item in enumerate(CANDIDATES)
    }
    quantity = Quantity(likeness(), len(CANDIDATES), guesses=guesses, lessons={})
    seen = [row(batching="padded"), row(batching="packed"), row(batching="padded", length=256)]
    belief = quantity.believe([(number, truth(CANDIDATES[number])) for number in seen])
    unseen = row(batching="packed", length=256, adapter="lora")
    assert belief.at([unseen], 0.0) == pytest.approx(truth(CANDIDATES[unseen]), rel=0.12)
    assert belief.deviation[unseen] > belief.deviation[seen[0]]


def test_candidates_without_a_prediction_are_filled_in_with_doubt() -> None:
    missing = row(adapter="lora")
    everything = {number: truth(item) for number, item in enumerate(CANDIDATES)}
    most = {number: value for number, value in everything.items() if number != missing}
    sure, unsure = (
        Quantity(likeness(), len(CANDIDATES), guesses=guesses, lessons={}).believe(
            [(number, truth(CANDIDATES[number])) for number in (0, 3, 6, 9)]
        )
        for guesses in (everything, most)
    )
    assert unsure.at([missing], 0.0) == pytest.approx(truth(CANDIDATES[missing]), rel=0.35)
    assert unsure.deviation[missing] > 1.1 * sure.deviation[missing]


def test_what_ran_out_is_moved_beyond_the_limit_and_takes_its_likes_along() -> None:
    guesses = dict.fromkeys(range(len(CANDIDATES)), 0.8)
    quantity = Quantity(likeness(), len(CANDIDATES), guesses=guesses, lessons={})
    over = row(batching="packed", length=256)
    belief = quantity.believe([(row(length=64), 0.8)], above=[over], limit=1.0)
    assert belief.at([over], 0.0) > 0.99
    assert belief.at([row(batching="packed", length=128)], 0.0) > 0.82
    assert belief.at([row(length=64)], 0.0) == pytest.approx(0.8, rel=0.03)


def test_lessons_of_another_run_correct_predictions_before_anything_is_measured() -> None:
    learnt = [{"batching": "packed", "length": 64, "adapter": "full"}]
    both = Likeness([*CANDIDATES, *learnt], ("length",))
    guesses = dict.fromkeys(range(len(CANDIDATES)), 100.0)
    quantity = Quantity(both, len(CANDIDATES), guesses=guesses, lessons={len(CANDIDATES): 2.0})
    belief = quantity.believe([])
    assert belief.at([row(batching="packed", length=64)], 0.0) == pytest.approx(200.0, rel=0.1)


def test_values_that_need_not_be_positive_are_learnt_as_they_are() -> None:
    quantity = Quantity(likeness(), len(CANDIDATES), guesses={}, lessons={})
    belief = quantity.believe([(0, -3.0), (1, 0.0), (2, 3.0)])
    assert not belief.is_log
    assert belief.at([0, 2], 0.0) == pytest.approx([-3.0, 3.0], abs=0.3)
