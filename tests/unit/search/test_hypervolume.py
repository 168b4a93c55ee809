"""The dominated volume against definitions that are slower and plainer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.search.hypervolume import as_gains, front_of, hypervolume, improvements

SIDE = 6
"""Points lie on a small grid, so that volumes can be counted cell by cell."""


def counted(points: np.ndarray) -> int:
    """Return the unit cells that some point dominates."""
    cells = itertools.product(range(SIDE), repeat=points.shape[1])
    return sum(
        any(all(p > c for p, c in zip(q, cell, strict=True)) for q in points) for cell in cells
    )


def sets_of(dimensions: int) -> st.SearchStrategy[np.ndarray]:
    point = st.lists(st.integers(-1, SIDE), min_size=dimensions, max_size=dimensions)
    return st.lists(point, min_size=1, max_size=7).map(lambda rows: np.array(rows, dtype=float))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_the_volume_is_that_of_the_cells_below(dimensions: int) -> None:
    @given(sets_of(dimensions))
    def check(points: np.ndarray) -> None:
        assert hypervolume(points) == counted(np.maximum(points, 0))

    check()


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_an_improvement_is_the_difference_that_a_point_makes(dimensions: int) -> None:
    @given(sets_of(dimensions), sets_of(dimensions))
    def check(front: np.ndarray, points: np.ndarray) -> None:
        expected = [
            hypervolume(np.concatenate([front, [point]])) - hypervolume(front) for point in points
        ]
        assert improvements(points, front_of(front)) == pytest.approx(expected)

    check()


@given(sets_of(2))
def test_a_front_dominates_all_and_none_of_its_own(points: np.ndarray) -> None:
    front = front_of(points)
    for point in points[(points > 0).all(axis=1)]:
        assert (front >= point).all(axis=1).any()
    for one, other in itertools.permutations(front, 2):
        assert not (one >= other).all()


def test_gains_point_upwards_whatever_the_direction() -> None:
    values = np.array([[3.0, 50.0], [12.0, 0.0]])
    gains = as_gains(values, (10.0, 0.0), ("minimize", "maximize"), (10.0, 100.0))
    assert gains == pytest.approx(np.array([[0.7, 0.5], [-0.2, 0.0]]))
