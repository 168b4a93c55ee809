"""The volume that a Pareto front dominates, and what a further point would add to it.

All points here are gains over a reference point: more is better in every dimension, and what is
not above zero in each dominates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]


def as_gains(
    values: Points, reference: Sequence[float], directions: Sequence[str], scale: Sequence[float]
) -> Points:
    """Return values as gains over a reference point.

    Args:
        values: In the objectives' units. Shape (..., D).
        reference: The worst values that count. Shape (D,).
        directions: ``minimize`` or ``maximize`` per objective.
        scale: What a gain of 1 is, in the objectives' units. Shape (D,).
    """
    signs = np.array([1.0 if item == "maximize" else -1.0 for item in directions])
    return np.asarray((values - np.asarray(reference)) * signs / np.asarray(scale))


def front_of(points: Points) -> Points:
    """Return the points that no other dominates, each once. Shapes (N, D) and (M, D)."""
    inside = np.unique(points[(points > 0).all(axis=1)], axis=0)
    beaten = np.asarray((inside[:, None, :] <= inside[None, :, :]).all(axis=2))
    np.fill_diagonal(beaten, False)
    return inside[~beaten.any(axis=1)]


def hypervolume(points: Points) -> float:
    """Return the volume between the reference point and the points. Shape (N, D)."""
    front = front_of(points)
    if not len(front):
        return 0.0
    if front.shape[1] == 1:
        return float(front.max())
    # Slices along the last dimension, from the outermost point inwards (While et al., 2006,
    # "A faster algorithm for calculating hypervolume": hypervolume by slicing objectives).
    order = front[np.argsort(-front[:, -1])]
    depths = np.append(order[:, -1], 0.0)
    return float(
        sum(
            (depths[index] - depths[index + 1]) * hypervolume(order[: index + 1, :-1])
            for index in range(len(order))
            if depths[index] > depths[index + 1]
        )
    )


def improvements(points: Points, front: Points) -> NDArray[np.float64]:
    """Return the volume that each point alone would add to a front.

    Args:
        points: Shape (N, D).
        front: Of :func:`front_of`. Shape (M, D).

    Returns:
        Shape (N,).
    """
    points = np.maximum(points, 0.0)
    if points.shape[1] == 1:
        best = front.max() if len(front) else 0.0
        return np.maximum(points[:, 0] - best, 0.0)
    if points.shape[1] == 2:
        return _improvements_2d(points, front)
    return np.array([_improvement(point, front) for point in points])


def _improvements_2d(points: Points, front: Points) -> NDArray[np.float64]:
    """Return them strip by strip: between two points of the front its height is that of the next.

    Args:
        points: Not below zero. Shape (N, 2).
        front: Shape (M, 2).
    """
    order = front[np.argsort(front[:, 0])]
    left = np.concatenate(([0.0], order[:, 0]))
    right = np.concatenate((order[:, 0], [np.inf]))
    height = np.concatenate((order[:, 1], [0.0]))
    widths = np.maximum(np.minimum(points[:, :1], right) - left, 0.0)
    return np.asarray(np.sum(widths * np.maximum(points[:, 1:] - height, 0.0), axis=1))


def _improvement(point: Points, front: Points) -> float:
    volume = float(np.prod(point))
    return volume - hypervolume(np.minimum(front, point)) if len(front) and volume else volume
