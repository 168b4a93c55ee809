"""What the peak of a traced run is made of, and how memory in use changes over the run.

Everything is bytes in use, in the allocator's blocks of 512 bytes, as
:attr:`~autotune.virtual.trace.Trace.peak_bytes` counts them; what the allocator reserves beyond
that is not part of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from autotune.virtual.trace import ALLOC, FREE, KINDS, MARK, Storage, Trace, rounded

MAX_GROUPS = 10
HELD = ("parameters", "buffers", "gradients", "optimizer_states")
"""Kinds that belong to a module's parameters, whatever operator made them."""

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def summarise(trace: Trace, *, max_points: int = 240) -> dict[str, Any]:
    """Return what was in use at the whole run's peak, and a timeline, as plain JSON values.

    The peak is that of every event, whether or not the run reset its own peak since. ``index``
    always counts events, not seconds.

    Args:
        trace: A run, best closed; what is still alive then is in use until the end.
        max_points: The most points of the timeline. Each stands for as many events, and is where
            most was in use among them, so that no peak is lost.

    Returns:
        ``peak_bytes``; ``peak_event`` (``index``, ``op``, ``module``, ``phase``, ``mark``);
        ``at_peak``, bytes by kind, which add up to the peak; ``largest``, the groups of storages
        with most bytes at the peak (what belongs to parameters is one group whatever module holds
        it: ``modules`` names them all, most bytes first); ``timeline`` (``num_events``,
        ``kinds``, ``points``: an index and bytes per kind each, ``phases``: one per point,
        ``marks``: index and name each); and ``host_peak_bytes``, since the last reset.

    Raises:
        ValueError: If there is to be no point.
    """
    if max_points < 1:
        raise ValueError("a timeline needs at least one point")
    # Events first: a storage is listed before its event, so every number is known below.
    events = list(trace.events)
    storages = list(trace.storages)
    kinds = [trace.kind_of(storage) for storage in storages]
    blocks = [rounded(storage.nbytes) for storage in storages]
    indices, peak_bytes, peak_index = _maxima(events, blocks, max_points)
    names = _in_order(kinds)
    levels = list(_levels(events, blocks, [names.index(kind) for kind in kinds], indices))
    at_peak = levels[indices.index(peak_index)] if indices else []
    return {
        "peak_bytes": peak_bytes,
        "peak_event": _event(trace, events, storages, peak_index),
        "at_peak": {name: num for name, num in zip(names, at_peak, strict=False) if num},
        "largest": _largest(events[: peak_index + 1], storages, kinds, blocks),
        "timeline": {
            "num_events": len(events),
            "kinds": names,
            "points": [[at, *level] for at, level in zip(indices, levels, strict=True)],
            "phases": [_phase(events, storages, index) for index in indices],
            "marks": [
                [index, trace.marks[number]]
                for index, (action, number) in enumerate(events)
                if action == MARK
            ],
        },
        "host_peak_bytes": trace.host_peak_bytes,
    }


def collapsed(module: str) -> str:
    """Return a module's path with ``*`` for every number in it, such as ``model.layers.*.mlp``."""
    return _NUMBER.sub("*", module)


def _in_order(kinds: Sequence[str]) -> list[str]:
    found = set(kinds)
    return [kind for kind in KINDS if kind in found] + sorted(found - set(KINDS))


def _maxima(
    events: Sequence[tuple[int, int]], blocks: Sequence[int], max_points: int
) -> tuple[list[int], int, int]:
    """Return where each stretch of events has its most, and the most of all and its index.

    Of equal ones, the first counts, so that the most of all is among the stretches' own.
    """
    count = min(len(events), max_points)
    indices: list[int] = []
    total, peak_bytes, peak_index = 0, 0, 0
    for part in range(count):
        first, last = part * len(events) // count, (part + 1) * len(events) // count
        most, at = -1, first
        for index, (action, number) in enumerate(events[first:last], first):
            if action == ALLOC:
                total += blocks[number]
            elif action == FREE:
                total -= blocks[number]
            if total > most:
                most, at = total, index
        indices.append(at)
        if most > peak_bytes:
            peak_bytes, peak_index = most, at
    # Without any bytes, the first point stands for a peak of none.
    return indices, peak_bytes, peak_index if peak_bytes or not indices else indices[0]


def _levels(
    events: Sequence[tuple[int, int]],
    blocks: Sequence[int],
    kinds: Sequence[int],
    indices: Sequence[int],
) -> Iterator[list[int]]:
    """Yield the bytes of each kind after the event at each of the ascending ``indices``."""
    level = [0] * (max(kinds, default=-1) + 1)
    done = 0
    for index in indices:
        for action, number in events[done : index + 1]:
            if action == ALLOC:
                level[kinds[number]] += blocks[number]
            elif action == FREE:
                level[kinds[number]] -= blocks[number]
        done = index + 1
        yield list(level)


def _event(
    trace: Trace, events: Sequence[tuple[int, int]], storages: Sequence[Storage], index: int
) -> dict[str, Any]:
    marks = [number for action, number in events[: index + 1] if action == MARK]
    found = {"index": index, "op": "", "module": "", "phase": _phase(events, storages, index)}
    if events and events[index][0] == ALLOC:
        storage = storages[events[index][1]]
        found |= {"op": storage.op, "module": collapsed(storage.module)}
    return found | {"mark": trace.marks[marks[-1]] if marks else ""}


def _phase(events: Sequence[tuple[int, int]], storages: Sequence[Storage], index: int) -> str:
    """Return the phase of an event; of a mark, that of the event before it; "" for none."""
    while 0 <= index < len(events):
        action, number = events[index]
        if action == ALLOC:
            return storages[number].phase
        if action == FREE:
            return storages[number].freed_phase
        index -= 1
    return ""


def _largest(
    events: Sequence[tuple[int, int]],
    storages: Sequence[Storage],
    kinds: Sequence[str],
    blocks: Sequence[int],
) -> list[dict[str, Any]]:
    """Return what is alive after ``events``, in groups, largest first.

    The phase tells groups apart too: what is computed again in the backward pass is not what the
    forward pass kept. What belongs to parameters is not told apart by module, of which there would
    be too many of a size; their names are listed.
    """
    alive: set[int] = set()
    for action, number in events:
        if action == ALLOC:
            alive.add(number)
        elif action == FREE:
            alive.discard(number)
    paths = {module: collapsed(module) for module in {storages[n].module for n in alive}}
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    holders: dict[tuple[str, str, str, str], Counter[str]] = {}
    for number in alive:
        storage = storages[number]
        is_held = kinds[number] in HELD
        module = "" if is_held else paths[storage.module]
        key = (kinds[number], storage.op, module, storage.phase)
        if is_held and storage.module:
            holders.setdefault(key, Counter())[paths[storage.module]] += blocks[number]
        group = groups.setdefault(key, [0, 0])
        group[0] += blocks[number]
        group[1] += 1
    ranked = sorted(groups.items(), key=lambda item: (-item[1][0], item[0]))
    return [
        {
            "bytes": num_bytes,
            "count": count,
            "kind": kind,
            "op": op,
            "module": module,
            "phase": phase,
            "modules": _by_bytes(holders.get((kind, op, module, phase), Counter())),
        }
        for (kind, op, module, phase), (num_bytes, count) in ranked[:MAX_GROUPS]
        if num_bytes
    ]


def _by_bytes(holders: Counter[str]) -> list[str]:
    """Return the names with most bytes first; of equal ones, by name."""
    return sorted(holders, key=lambda name: (-holders[name], name))
