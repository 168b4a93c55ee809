from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.trainers.schedule import (
    ROWS_KEPT,
    num_steps,
    plan,
    probe_accumulation,
    representatives,
    subset,
)

LENGTHS = [5, 90, 12, 40, 90, 7, 33, 60]


def make_plan(lengths: list[int] = LENGTHS, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "batch_size": 2,
        "accumulation": 2,
        "num_typical_steps": 3,
        "seed": 0,
        "shuffle": True,
    }
    return plan(lengths, **{**values, **changes})


def steps_of(schedule: Any, batch_size: int, accumulation: int) -> list[list[tuple[int, ...]]]:
    """Return the rows per step and micro-batch."""
    rows = schedule.rows
    micros = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return [micros[i : i + accumulation] for i in range(0, len(micros), accumulation)]


def test_the_worst_batch_ends_the_first_the_second_and_the_last_step() -> None:
    schedule = make_plan()
    steps = steps_of(schedule, 2, 2)
    assert schedule.num_steps == len(steps) == num_steps(3) == 6
    # The two longest rows, the earlier one first.
    assert [step[-1] for step in (steps[0], steps[1], steps[5])] == [(1, 4)] * 3
    assert schedule.worst_batch == (2, 90)


def test_the_worst_padded_batch_holds_a_row_to_pad_every_other_time() -> None:
    """Full rows alone need no attention mask, which takes memory."""
    lengths = [10, 50, 90, 90, 90, 70, 70]

    def worst(**changes: Any) -> list[list[int]]:
        schedule = make_plan(lengths, batch_size=3, accumulation=1, **changes)
        steps = [step[0] for step in steps_of(schedule, 3, 1)]
        assert schedule.worst_batch == (3, 90)
        return [[lengths[row] for row in rows] for rows in (steps[0], steps[1], steps[-1])]

    full, padded = [90, 90, 90], [90, 90, 70]
    assert worst(padded=True) == [padded, full, padded]
    assert worst() == [full, full, full]
    predicted = worst(padded=True, num_first_worst=1, representative=True)
    assert (predicted[0], predicted[-1]) == (full, padded)


@pytest.mark.parametrize(
    ("lengths", "batch_size", "expected"),
    [
        ([90, 90, 90], 2, [90, 90]),  # none is shorter
        ([90, 90, 10], 1, [90]),  # nothing to be padded to
        ([90, 80, 10], 2, [90, 80]),  # padded as it is
    ],
)
def test_other_worst_batches_are_the_longest_rows(
    lengths: list[int], batch_size: int, expected: list[int]
) -> None:
    found = make_plan(lengths, batch_size=batch_size, accumulation=1, padded=True)
    assert [lengths[row] for row in found.rows[:batch_size]] == expected


def test_without_accumulation_it_is_the_whole_step() -> None:
    steps = steps_of(make_plan(accumulation=1), 2, 1)
    assert steps[0] == steps[1] == steps[-1] == [(1, 4)]


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=40),
    batch_size=st.integers(1, 8),
    accumulation=st.integers(1, 3),
    num_typical=st.integers(0, 6),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_what_holds_for_every_plan(
    lengths: list[int],
    batch_size: int,
    accumulation: int,
    num_typical: int,
    seed: int,
    shuffle: bool,
) -> None:
    options = {
        "batch_size": batch_size,
        "accumulation": accumulation,
        "num_typical_steps": num_typical,
        "seed": seed,
        "shuffle": shuffle,
    }
    if len(lengths) < batch_size:
        with pytest.raises(ValueError, match="too few"):
            make_plan(lengths, **options)
        return
    schedule = make_plan(lengths, **options)
    assert schedule == make_plan(lengths, **options)
    assert schedule.num_steps == num_steps(num_typical) == 3 + num_typical
    assert len(schedule.rows) == schedule.num_steps * accumulation * batch_size
    assert set(schedule.rows) <= set(range(len(lengths)))
    steps = steps_of(schedule, batch_size, accumulation)
    worst = sorted(lengths, reverse=True)[:batch_size]
    for step in (steps[0], steps[1], steps[-1]):
        assert sorted((lengths[row] for row in step[-1]), reverse=True) == worst
    assert schedule.worst_batch == (batch_size, max(lengths))
    # Typical rows are taken in turn: none a second time before each was taken once.
    typical = [row for step in steps[2:-1] for micro in step for row in micro]
    counts = Counter({row: 0 for row in range(len(lengths))})
    counts.update(typical)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_typical_rows_keep_the_datas_order_where_the_trainer_does() -> None:
    steps = steps_of(make_plan(shuffle=False), 2, 2)
    assert steps[2:-1] == [[(0, 1), (2, 3)], [(4, 5), (6, 7)], [(0, 1), (2, 3)]]


def test_the_order_depends_on_the_seed_alone() -> None:
    import random

    first = make_plan(seed=1)
    random.seed(99)
    assert make_plan(seed=1) == first
    assert make_plan(seed=2).rows != first.rows


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="has 1 row, too few for a micro-batch of 2"):
        make_plan([10])
    with pytest.raises(ValueError, match="has 0 rows"):
        make_plan([])


@pytest.mark.parametrize(
    ("exported", "batch_size", "packed", "probed"),
    [
        (1, 8, False, 1),
        (2, 8, False, 2),
        (3, 8, False, 2),
        (64, 16, False, 2),
        # Rows of differing length: eight to a step, if a full step holds them.
        (64, 4, False, 2),
        (64, 2, False, 4),
        (64, 1, False, 8),
        (64, 3, False, 3),
        (3, 1, False, 3),
        # Packed rows are alike.
        (64, 1, True, 2),
        (1, 1, True, 1),
    ],
)
def test_few_micro_batches_stand_for_many(
    exported: int, batch_size: int, packed: bool, probed: int
) -> None:
    found = probe_accumulation(exported, batch_size=batch_size, packed=packed, rows_per_step=8)
    assert found == probed


def test_a_small_data_set_is_processed_as_a_whole() -> None:
    assert subset([3, 1, 2], num_needed=100, num_longest=2, seed=0) == [0, 1, 2]
    lengths = [1] * ROWS_KEPT
    assert len(subset(lengths, num_needed=5, num_longest=2, seed=0)) == ROWS_KEPT


def test_of_a_large_one_enough_rows_and_the_longest() -> None:
    lengths = [1 + (i * 7919) % 1000 for i in range(20_000)]
    lengths[17] = lengths[19_999] = 5000
    chosen = subset(lengths, num_needed=100, num_longest=2, seed=3)
    assert chosen == sorted(set(chosen))
    assert {17, 19_999} <= set(chosen)
    assert ROWS_KEPT <= len(chosen) <= ROWS_KEPT + 2
    assert chosen == subset(lengths, num_needed=100, num_longest=2, seed=3)
    assert chosen != subset(lengths, num_needed=100, num_longest=2, seed=4)
    many = subset(lengths, num_needed=4500, num_longest=2, seed=3)
    assert 5000 <= len(many) <= 5002


def test_more_rows_may_be_needed_than_there_are() -> None:
    lengths = [1] * 2500
    assert len(subset(lengths, num_needed=9000, num_longest=2, seed=0)) == 2500
    # Rounded up to whole pools, and still no more than there are.
    assert len(subset(lengths, num_needed=2400, num_longest=2, seed=0)) == 2500


@pytest.mark.parametrize("seed", range(5))
def test_few_representative_batches_have_the_mean_size_of_all(seed: int) -> None:
    source = random.Random(seed)
    lengths = [min(int(source.lognormvariate(5.5, 0.8)), 2048) for _ in range(800)]
    batches = [list(range(i, i + 4)) for i in range(0, 800, 4)]

    def mean_positions(chosen: Sequence[Sequence[int]]) -> float:
        return sum(4 * max(lengths[row] for row in batch) for batch in chosen) / len(chosen)

    def mean_tokens(chosen: Sequence[Sequence[int]]) -> float:
        return sum(lengths[row] for batch in chosen for row in batch) / len(chosen)

    chosen = representatives(batches, lengths, count=2)
    assert len(chosen) == 2
    # Two that are drawn are off by a third on average.
    assert mean_positions(chosen) == pytest.approx(mean_positions(batches), rel=0.08)
    assert mean_tokens(chosen) == pytest.approx(mean_tokens(batches), rel=0.08)
    # They are not twice the same: memory sees rows of several lengths.
    assert mean_positions(chosen[:1]) != pytest.approx(mean_positions(chosen[1:]), rel=0.2)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    size=st.integers(1, 4),
    count=st.integers(1, 9),
)
def test_representatives_are_of_the_batches_and_never_twice_the_same(
    lengths: list[int], size: int, count: int
) -> None:
    batches = [list(range(i, i + size)) for i in range(0, len(lengths) - size + 1, size)]
    chosen = representatives(batches, lengths, count=count)
    assert len(chosen) == min(count, len(batches))
    numbers = [batches.index(list(batch)) for batch in chosen]
    assert numbers == sorted(set(numbers))


def test_a_plan_may_choose_its_typical_batches() -> None:
    lengths = [10] * 50 + [1000] * 50
    options = {"batch_size": 1, "num_first_worst": 1, "representative": True}
    apart = make_plan(lengths, accumulation=1, num_typical_steps=2, **options)
    assert sorted(lengths[row] for row in apart.rows[1:3]) == [10, 1000]
    assert apart.rows[0] == apart.rows[3]
    assert lengths[apart.rows[0]] == 1000
    within = make_plan(lengths, accumulation=2, num_typical_steps=0, **options)
    # The largest comes first and last, two that stand for all between.
    assert within.rows[0] == within.rows[3]
    assert sorted(lengths[row] for row in within.rows[1:3]) == [10, 1000]
    more = make_plan(lengths, accumulation=3, num_typical_steps=1, **options)
    assert len(set(more.rows[1:-1])) == len(more.rows) - 2 == 7
    drawn = {
        tuple(
            sorted(
                lengths[row]
                for row in make_plan(
                    lengths, batch_size=1, num_typical_steps=1, num_first_worst=0, seed=seed
                ).rows[:2]
            )
        )
        for seed in range(20)
    }
    assert drawn > {(10, 1000)}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_process_gets_the_worst_micro_batch(accumulation: int) -> None:
    """accelerate deals micro-batches out in turn: the k-th of rank r is number k * ranks + r."""
    processes = 2
    schedule = make_plan(accumulation=accumulation, processes=processes)
    steps = steps_of(schedule, 2, accumulation * processes)
    assert len(steps) == schedule.num_steps
    assert all(len(step) == accumulation * processes for step in steps)
    for step in (*steps[:2], steps[-1]):
        for rank in range(processes):
            own = step[rank::processes]
            assert sorted(LENGTHS[row] for row in own[-1]) == [90, 90]
    typical = [row for step in steps[2:-1] for micro in step for row in micro]
    # Typical rows differ between processes: all are used before one comes again.
    assert set(typical[: len(LENGTHS)]) == set(range(len(LENGTHS)))


def test_two_processes_need_half_the_micro_batches_for_as_many_rows() -> None:
    options = {"packed": False, "rows_per_step": 8}
    assert probe_accumulation(64, batch_size=1, **options) == 8
    assert probe_accumulation(64, batch_size=2 * 1, **options) == 4
