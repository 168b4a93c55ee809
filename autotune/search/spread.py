"""An order of candidates in which every beginning covers the space evenly."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Candidate = Mapping[str, Any]


def spread(
    first: Sequence[Candidate],
    others: Sequence[dict[str, Any]],
    *,
    known: Sequence[Candidate] = (),
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the candidates such that every prefix covers the knobs' values evenly.

    Each is one that differs in most knobs from the nearest of those before it; of several, one
    whose values came up least so far.

    Args:
        first: Come first, as they are.
        others: In any order.
        known: Candidates that count as having come before all.
        seed: Decides among those that are alike in both.
    """
    names = sorted({name for item in (*known, *first, *others) for name in item})
    rows = [tuple(item.get(name) for name in names) for item in others]
    rest = list(range(len(rows)))
    random.Random(seed).shuffle(rest)
    distance = dict.fromkeys(rest, len(names) + 1)
    counts: list[dict[Any, int]] = [{} for _ in names]

    def note(chosen: tuple[Any, ...]) -> None:
        for value, count in zip(chosen, counts, strict=True):
            count[value] = count.get(value, 0) + 1
        for index in rest:
            differing = sum(a != b for a, b in zip(rows[index], chosen, strict=True))
            distance[index] = min(distance[index], differing)

    def preference(index: int) -> tuple[int, int]:
        seen = sum(count.get(value, 0) for value, count in zip(rows[index], counts, strict=True))
        return distance[index], -seen

    for item in known:
        note(tuple(item.get(name) for name in names))
    for item in first:
        note(tuple(item.get(name) for name in names))
        yield dict(item)
    while rest:
        best = max(rest, key=preference)
        rest.remove(best)
        note(rows[best])
        yield dict(others[best])
