"""Peak memory against rate, drawn with characters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autotune.probe.result import Outcome
from autotune.report.cells import gib
from autotune.report.trial import Trial
from autotune.units import format_gib, format_rate

MARGIN = 10
FLAT_RATIO = 1e-3
"""Values that differ by less are drawn in one place, in the middle of their axis."""

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
        Lines joined by line breaks; empty if no two trials differ in what would be drawn.
    """
    points = [
        (item.peak_bytes, item.tokens_per_s.median, item)
        for item in trials
        if item.peak_bytes is not None and item.tokens_per_s is not None
    ]
    if len({(peak, rate) for peak, rate, _ in points}) < 2:
        return ""  # one mark in an empty frame shows nothing that the table does not
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
    sources = sorted({item.source for _, _, item in points})
    axes = "tokens/s" if sources == ["measured"] else "tokens/s against peak memory"
    lines = [f"{axes}, {' and '.join(sources)}"]
    labels = {y_axis.cell(value): value for value in (y_axis.low, y_axis.high)}
    for row in range(height - 1, -1, -1):
        label = format_rate(labels[row]) if row in labels else ""
        lines.append(f"{label:>{MARGIN - 2}} ┤{''.join(grid[row]).rstrip()}")
    lines.append(" " * (MARGIN - 1) + "└" + "─" * x_axis.size)
    lines.append(" " * MARGIN + _foot(x_axis))
    return "\n".join([*lines, *_legend(budget_bytes, is_drawn, num_oom)])


def _foot(axis: _Axis) -> str:
    """Return the values at the ends of the memory's axis, or the one under its middle."""
    low, high = gib(axis.low), f"{gib(axis.high)} GiB"
    if axis.is_flat:
        return f"{high:^{axis.size}}".rstrip()
    return low + high.rjust(max(axis.size - len(low), len(high) + 1))


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
        # As far as labels can tell: they should not claim a range that is rounding alone.
        self.is_flat = self.high - self.low <= FLAT_RATIO * abs(self.high)

    def cell(self, value: float) -> int:
        if self.is_flat:
            return (self.size - 1) // 2
        share = (value - self.low) / (self.high - self.low)
        return round(share * (self.size - 1))
