"""The order in which candidates are predicted."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from autotune.search.spread import spread

SIZES = {"a": 2, "b": 3, "c": 4}
ALL: list[dict[str, Any]] = [
    dict(zip(SIZES, values, strict=True))
    for values in itertools.product(*(range(size) for size in SIZES.values()))
]


def test_every_candidate_comes_once_and_those_that_must_come_first_do() -> None:
    first = [ALL[5], ALL[20]]
    others = [item for item in ALL if item not in first]
    found = list(spread(first, others))
    assert found[:2] == first
    assert sorted(map(str, found)) == sorted(map(str, ALL))


def test_every_beginning_covers_the_values_evenly() -> None:
    found = list(spread(ALL[:1], ALL[1:], seed=3))
    for length in range(4, len(found)):
        for name, size in SIZES.items():
            counts = Counter(item[name] for item in found[:length])
            assert max(counts.values()) - min(counts.get(v, 0) for v in range(size)) <= 2, length


def test_what_is_near_to_what_is_known_comes_late() -> None:
    known = [ALL[0]]
    order = list(spread([], ALL[1:], known=known))
    num_equal = [sum(item[name] == ALL[0][name] for name in SIZES) for item in order]
    assert num_equal[0] == 0
    assert num_equal.index(2) > num_equal.index(1) > 0


def test_a_knob_that_does_not_apply_is_a_value_of_its_own() -> None:
    others = [{"a": 0, "r": 8}, {"a": 0, "r": 16}, {"a": 1}]
    assert list(spread([{"a": 0, "r": 8}], others))[1] == {"a": 1}


def test_the_seed_decides_the_order() -> None:
    orders = [list(spread([], ALL, seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
