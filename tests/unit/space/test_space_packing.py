"""How many rows a candidate trains on: enough for its micro-batch, or it is not drawn."""

from __future__ import annotations

import pytest

from autotune.errors import SpaceError
from autotune.space.packing import packed_rows
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context, make_profile

SHORT = (20, 25, 30, 35, 40, 45, 50, 55, 60, 65)


@pytest.mark.parametrize(
    ("lengths", "strategy", "max_length", "expected"),
    [
        (SHORT, "bfd", 1024, 1),
        (SHORT, "bfd", 64, 8),
        (SHORT, "bfd_split", 64, 8),
        (SHORT, "wrapped", 1024, 1),
        (SHORT, "wrapped", 64, 7),
        ((600, 600, 600), "bfd", 1000, 3),  # one in each, though the tokens would fill two
        ((2500,), "bfd", 1000, 1),
        ((2500,), "bfd_split", 1000, 3),
        ((2500, 500), "bfd_split", 1000, 3),
        ((1000, 1000), "wrapped", 1000, 2),
    ],
)
def test_packed_rows_are_counted_as_trl_packs(
    lengths: tuple[int, ...], strategy: str, max_length: int, expected: int
) -> None:
    assert packed_rows(make_profile(lengths), strategy, max_length, enough=1000) == expected


def test_beyond_a_pool_only_what_is_certain_counts() -> None:
    data = make_profile([1] * 2500)
    assert packed_rows(data, "bfd", 1024, enough=100) == 3
    assert packed_rows(data, "wrapped", 1024, enough=100) == 3


@pytest.mark.parametrize("batching", ["bfd", "bfd_split", "wrapped"])
def test_the_baseline_of_few_packed_rows_has_a_micro_batch_that_they_fill(batching: str) -> None:
    context = make_context(lengths=SHORT, global_batch=8)
    space = SearchSpace.load("sft").resolve(context, {"batching": batching, "max_length": 1024})
    assert space.baseline["per_device_train_batch_size"] == 1
    assert space.config(space.baseline)["gradient_accumulation_steps"] == 8
    assert any("into 1 row" in notice for notice in space.notices)


def test_no_candidate_has_fewer_rows_than_its_micro_batch() -> None:
    context = make_context(lengths=SHORT, global_batch=16)
    space = SearchSpace.load("quick").resolve(context)
    for candidate in space.enumerate():
        if candidate["batching"] == "bfd":
            length = int(candidate["max_length"])
            rows = packed_rows(context.data, "bfd", length, enough=16)
            assert candidate["per_device_train_batch_size"] <= rows


def test_a_pinned_micro_batch_beyond_the_packed_rows_is_refused_with_the_pins() -> None:
    context = make_context(lengths=SHORT, global_batch=8)
    pins = {"batching": "bfd", "max_length": 1024, "per_device_train_batch_size": 8}
    with pytest.raises(SpaceError, match="packs the data into 1 row") as caught:
        SearchSpace.load("quick").resolve(context, pins)
    assert "batching=bfd" in caught.value.message


def test_rows_that_cutting_leaves_without_loss_form_no_micro_batch() -> None:
    data = make_profile([100] * 10)
    dropped = tuple(9 if limit < 100 else 0 for limit in data.max_lengths)
    context = make_context(data=make_profile([100] * 10, rows_dropped=dropped), global_batch=8)
    pins = {"batching": "padded", "max_length": 64}
    space = SearchSpace.load("quick").resolve(context, pins)
    assert space.baseline["per_device_train_batch_size"] == 1
    assert any("max_length=64 leaves only 1 row" in notice for notice in space.notices)
