"""Peak memory against rate, drawn with characters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autotune.probe.result import Outcome
from autotune.report.cells import gib
from autotune.report.trial import Trial
from autotune.units import format_gib, format_rate

MARGIN = 10
BUDGET_IN_SIGHT = 2.0
"""A budget beyond this many times the greatest peak would squeeze all points to one side."""


def scatter(
    trials: Sequence[Trial],
    *,
    pareto: Collection[int] = (),
    baseline: int = 0,
    budget_bytes: int | None = None,
    width: int = 72,
    height: int = 14,
) -> str:
    """Return a plot of peak memory (across) against rate (up), with a legend.

    Trials that ended before they had a rate are drawn at the foot of the budget line.

    Returns:
        Lines joined by line breaks; empty if no trial has both values.
    """
    points = [
        (item.peak_bytes, item.tokens_per_s.median, item)
        for item in trials
        if item.peak_bytes is not None and item.tokens_per_s is not None
    ]
    if not points:
        return ""
    no_memory = (Outcome.DEVICE_OOM, Outcome.HOST_OOM)
    num_oom = sum(item.outcome in no_memory for item in trials)
    peaks = [float(peak) for peak, _, _ in points]
    is_drawn = budget_bytes is not None and budget_bytes <= BUDGET_IN_SIGHT * max(peaks)
    if budget_bytes is not None and is_drawn:
        peaks.append(float(budget_bytes))
    x_axis = _Axis(peaks, width - MARGIN - 1)
    y_axis = _Axis([rate for _, rate, _ in points], height)
    grid = [[" "] * x_axis.size for _ in range(height)]
    if budget_bytes is not None and is_drawn:
        column = x_axis.cell(budget_bytes)
        for line in grid:
            line[column] = "|"
        if num_oom:
            grid[0][column] = "x"
    for rank in range(4):
        for peak, rate, item in points:
            mark = _mark(item, pareto, baseline)
            if "·xPb".index(mark) == rank:
                grid[y_axis.cell(rate)][x_axis.cell(peak)] = mark
    lines = [f"tokens/s, {' and '.join(sorted({item.source for _, _, item in points}))}"]
    labels = {0: y_axis.low, height - 1: y_axis.high}
    for row in range(height - 1, -1, -1):
        label = format_rate(labels[row]) if row in labels else ""
        lines.append(f"{label:>{MARGIN - 2}} ┤{''.join(grid[row]).rstrip()}")
    lines.append(" " * (MARGIN - 1) + "└" + "─" * x_axis.size)
    low, high = gib(x_axis.low), f"{gib(x_axis.high)} GiB"
    lines.append(" " * MARGIN + low + high.rjust(max(x_axis.size - len(low), len(high) + 1)))
    return "\n".join([*lines, *_legend(budget_bytes, is_drawn, num_oom)])


def _legend(
    budget_bytes: int | None,
    is_drawn: bool,
    num_oom: int,
) -> list[str]:
    names = {"P": "Pareto set", "b": "baseline", "·": "other", "x": "over a limit"}
    lines = ["  ".join(f"{mark} {name}" for mark, name in names.items())]
    if budget_bytes is not None:
        where = "| " if is_drawn else "not drawn, far to the right: "
        lines[0] += f"  {where}budget {format_gib(budget_bytes)}"
    if num_oom:
        where = "x at the foot of the budget line" if is_drawn else "not drawn"
        lines.append(f"{num_oom} out of memory, so without a rate: {where}")
    return [" " * MARGIN + line for line in lines]


def _mark(trial: Trial, pareto: Collection[int], baseline: int) -> str:
    if trial.number == baseline:
        return "b"
    if trial.number in pareto:
        return "P"
    return "·" if trial.feasible else "x"


class _Axis:
    """Maps values to cells, with all values inside."""

    def __init__(self, values: Sequence[float], size: int) -> None:
        self.size = max(size, 2)
        self.low, self.high = min(values), max(values)
        if self.low == self.high:
            self.low, self.high = self.low * 0.9, self.high * 1.1 or 1.0

    def cell(self, value: float) -> int:
        share = (value - self.low) / (self.high - self.low)
        return round(share * (self.size - 1))
