"""How fast this machine's processor is: what a virtual card that stands for it needs to know."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from autotune.virtual.roofline import BANDWIDTH_EFFICIENCY, MATRIX_EFFICIENCY

_SIZE = 1024
_COPIED_BYTES = 1 << 28
_MOST_RUNS = 5
_ENOUGH_S = 0.2
"""Per quantity. What takes a slow processor longer is timed once."""


def measure(request: Mapping[str, Any]) -> dict[str, float]:
    """Return the processor's rates as a card's: products in float32 and bfloat16, and copies.

    A card's figures are theoretical ones, of which predictions take the share that is usually
    reached. What is measured here is what was reached, and is stated so that predictions take all
    of it.

    Args:
        request: Nothing is asked of it; the threads are those that the environment sets.
    """
    num_operations = 2 * _SIZE**3
    rates = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        matrix = torch.full((_SIZE, _SIZE), 0.5, dtype=dtype)
        seconds = _least_s(partial(torch.matmul, matrix, matrix))
        rates[name] = num_operations / seconds / 1e12 / MATRIX_EFFICIENCY
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    seconds = _least_s(lambda: target.copy_(source))
    # A copy reads and writes.
    rates["bandwidth_bytes_per_s"] = 2 * _COPIED_BYTES / seconds / BANDWIDTH_EFFICIENCY
    return rates


def _least_s(run: Callable[[], object]) -> float:
    """Return the least time of a few runs, in seconds: what disturbs makes them longer."""
    run()
    times: list[float] = []
    while len(times) < _MOST_RUNS and sum(times) < _ENOUGH_S:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
