"""The candidates that a search chooses from: all of a space, or a part of a huge one."""

from __future__ import annotations

import random
from typing import Any

from autotune.space.space import ResolvedSpace

MOST = 4000
"""Candidates that are weighed against each other at most."""


def pool(space: ResolvedSpace, *, seed: int) -> list[dict[str, Any]]:
    """Return all candidates of a space, or so many of them drawn at random if it has more.

    The baseline and the leanest one are always among them.
    """
    if space.size(MOST + 1) <= MOST:
        return list(space.enumerate())
    draw = random.Random(seed)
    found = {space.digest(item): item for item in (space.baseline, space.leanest)}
    for _ in range(2 * MOST):
        candidate = space.draw(lambda name, values, ordered: draw.choice(values))
        found.setdefault(space.digest(candidate), candidate)
        if len(found) >= MOST:
            break
    return list(found.values())
