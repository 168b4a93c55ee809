"""What a predicted peak is made of: a table, a picture in text and a plot in a file.

Works on the plain values that ``autotune.virtual.summary`` returns, which nothing here imports.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.text import Text

from autotune.probe.result import PHASES as RUN_PHASES
from autotune.probe.result import phase_name
from autotune.report.cells import gib, percent
from autotune.report.pictures import new_figure, save_figure
from autotune.report.plot import BUDGET_IN_SIGHT, MARGIN
from autotune.units import GIB, format_gib

LOOKS = {
    "parameters": ("█", "blue", "#4c72b0"),
    "buffers": ("≡", "cyan", "#64b5cd"),
    "optimizer_states": ("▒", "magenta", "#8172b3"),
    "gradients": ("▓", "yellow", "#ccb974"),
    "workspaces": ("▪", "white", "#8c8c8c"),
    "vllm_modelled": ("◇", "bright_blue", "#937860"),
    "activations": ("░", "green", "#55a868"),
    "temporaries": ("▚", "red", "#c44e52"),
    "whole_blocks": ("□", "bright_black", "#c7c7c7"),
}
"""Character, colour in a terminal and in a file; from the bottom up, what changes least first."""
PHASES = {"load": "l", "forward": "f", "backward": "b", "optimizer": "o", "other": "·"}
WHERE = {"load": "while loading", "other": "between passes", "optimizer": "in the optimizer step"}
BAR_WIDTH = 30
MIN_SIZE = 4
MARK_LINES = 3
MAX_MODULES = 3
LEGEND_COLUMNS = 4
MARK_LEVELS = 4
"""Heights at which names of marks that are close to each other stand in a plot."""

CLOSE_MARKS = 0.04
"""Share of a plot's width that a mark's name takes at most."""

WHOLE_BLOCKS = "whole_blocks"
WHOLE_BLOCKS_MEAN = (
    "Whole blocks: PyTorch's allocator hands out some blocks whole though less was asked for, and"
    " counts them as allocated."
)
BUDGET_MEANS = "That budget is the limit less the context, which is no tensor's."
"""Said below a picture: what it draws is allocated bytes, and budgets are about used ones."""

TITLE = "Predicted memory allocated, in GiB; across: allocations and frees in order"


def makeup_table(summary: Mapping[str, Any], *, width: int = 80, num_largest: int = 5) -> Text:
    """Return what the predicted peak is made of, as text of at most ``width`` columns.

    Args:
        summary: As ``autotune.virtual.summary.summarise`` returns it; with ``allocated_bytes``,
            the peak as the modelled allocator counts it, that is the peak which is shown.
        width: Columns to keep to, as far as the words allow.
        num_largest: How many of the largest groups of storages to list.
    """
    peak, at_peak = _allocated(summary), dict(summary["at_peak"])
    if peak > summary["peak_bytes"]:
        at_peak[WHOLE_BLOCKS] = peak - summary["peak_bytes"]
    title = _wrap(f"Predicted {_peak_line(summary)}: {format_gib(peak)} allocated.", width)
    text = Text().append(title, "bold")
    sizes = [max(map(len, ["total", *map(_words, at_peak)])), max(6, len(gib(peak))), 6]
    bar_width = min(BAR_WIDTH, width - sum(sizes) - 6)
    text.append(f"\n{'kind':<{sizes[0]}}  {'GiB':>{sizes[1]}}  {'share':>{sizes[2]}}", "bold")
    for kind in [*_stacked(at_peak), "total"]:
        num_bytes = at_peak.get(kind, peak)
        share = num_bytes / peak if peak else 0.0
        cells = f"{gib(num_bytes):>{sizes[1]}}  {percent(share):>{sizes[2]}}"
        text.append(f"\n{_words(kind):<{sizes[0]}}  {cells}")
        if kind != "total" and bar_width >= MIN_SIZE:
            text.append(f"  {_look(kind)[0] * max(1, round(share * bar_width))}", _look(kind)[1])
    if WHOLE_BLOCKS in at_peak:
        text.append("\n" + _wrap(WHOLE_BLOCKS_MEAN, width))
    text.append("\nLargest at the peak, predicted:" if summary["largest"] else "", "bold")
    for group in summary["largest"][:num_largest]:
        line = f"- {format_gib(group['bytes'])} {_words(group['kind'])}: {_group(group)}"
        text.append("\n" + _wrap(line, width, hang=2))
    if summary["host_peak_bytes"]:
        host = format_gib(summary["host_peak_bytes"])
        text.append("\n" + _wrap(f"Predicted peak of what is moved to the host: {host}.", width))
    return text


def timeline_picture(
    summary: Mapping[str, Any], width: int = 72, height: int = 14, budget_bytes: int | None = None
) -> Text:
    """Return predicted memory over the run as a stacked area of characters, one for each kind.

    Each column shows the most that was in use among its events.

    Args:
        summary: As ``autotune.virtual.summary.summarise`` returns it.
        width: Columns to keep to; at least about 40.
        height: Rows of the area.
        budget_bytes: Where to draw a line; None for none.

    Returns:
        Lines joined by line breaks; empty if nothing was ever in use.
    """
    timeline, peak = summary["timeline"], _allocated(summary)
    if not peak or not timeline["points"]:
        return Text()
    kinds = _stacked(timeline["kinds"])
    size, height = max(width - MARGIN, MIN_SIZE), max(height, MIN_SIZE)
    budget = _drawn(budget_bytes, peak)
    high = max(peak, budget)
    columns = _columns(timeline, size)
    grid = [
        [_cell(timeline, kinds, number, (row + 0.5) * high / height) for number in columns]
        for row in range(height)
    ]
    if budget:
        grid[max(0, round(budget * height / high) - 1)] = [("─", "bold red")] * size
    text = Text(_wrap(TITLE, width))
    text.append(f"\n{_peak_mark(summary, size)}", style="bold")
    labels = {round(height * part / 4) - 1 for part in range(1, 5)}
    for row in reversed(range(height)):
        label = gib(high * (row + 1) / height) if row in labels else ""
        text.append(f"\n{label:>{MARGIN - 2}} {'┤' if label else '│'}")
        for style, cells in groupby(grid[row], key=lambda cell: cell[1]):
            text.append("".join(mark for mark, _ in cells), style=style)
    ticks = {_column(index, timeline, size) for index, _ in timeline["marks"]}
    text.append(f"\n{'0':>{MARGIN - 2}} └")
    text.append("".join("┬" if column in ticks else "─" for column in range(size)))
    phases = [PHASES.get(timeline["phases"][n] if n is not None else "", " ") for n in columns]
    text.append(f"\n{'phase':>{MARGIN - 2}}  {''.join(phases)}", style="dim")
    for line in _mark_lines(timeline, size):
        text.append(f"\n{' ' * MARGIN}{line}")
    text.append("\n").append_text(_legend(kinds, phases, width))
    if budget_bytes is not None:
        text.append("\n" + _wrap(_budget_line(peak, budget_bytes), width))
    return text


def save_timeline(
    summary: Mapping[str, Any], path: str | Path, budget_bytes: int | None = None
) -> Path:
    """Draw predicted memory over the run as a stacked area, and return the path.

    Args:
        summary: As ``autotune.virtual.summary.summarise`` returns it.
        path: Where to write; ``.png`` or ``.svg`` decides the format.
        budget_bytes: Where to draw a line; None for none.

    Raises:
        UsageError: If the suffix is another.
        PrerequisiteError: If matplotlib is missing.
    """
    target = Path(path)
    figure = new_figure(target)
    draw_timeline(summary, figure, budget_bytes)
    return save_figure(figure, target)


def draw_timeline(summary: Mapping[str, Any], figure: Any, budget_bytes: int | None) -> None:
    """Draw what :func:`save_timeline` writes into an empty figure of matplotlib."""
    timeline, peak = summary["timeline"], _allocated(summary)
    axes = figure.subplots()
    if timeline["points"]:
        # The last point holds until the end: a step has a width.
        points = [*timeline["points"], [timeline["num_events"], *timeline["points"][-1][1:]]]
        kinds = _stacked(timeline["kinds"])
        places = [1 + timeline["kinds"].index(kind) for kind in kinds]
        axes.stackplot(
            [point[0] for point in points],
            [[point[place] / GIB for point in points] for place in places],
            labels=[_words(kind) for kind in kinds],
            colors=[_look(kind)[2] for kind in kinds],
            step="post",
        )
    label = f"predicted peak, {format_gib(peak)} allocated"
    axes.plot([summary["peak_event"]["index"]], [peak / GIB], "kv", label=label)
    title = textwrap.wrap(f"Predicted {_peak_line(summary)}", 90)
    if budget_bytes is not None:
        label = f"budget, {format_gib(budget_bytes)}"
        if _drawn(budget_bytes, peak):
            axes.plot([0, timeline["num_events"]], [budget_bytes / GIB] * 2, "r--", label=label)
        else:  # it would squeeze the rest
            title.append(f"{label}: far above, not drawn")
    _draw_marks(axes, timeline)
    axes.set(xlabel="allocations and frees in order", xlim=(0, max(1, timeline["num_events"])))
    axes.set_ylabel("predicted memory allocated, GiB")
    axes.set_title("\n".join(title), fontsize=10)
    # Not beside the axes, whose title names a module and may be wide.
    figure.legend(loc="outside lower center", fontsize="small", ncols=LEGEND_COLUMNS)


def _draw_marks(axes: Any, timeline: Mapping[str, Any]) -> None:
    """Draw marks with their names, each below the one before where they are close."""
    width, above, level = max(1, timeline["num_events"]), None, 0
    for index, name in timeline["marks"]:
        axes.axvline(index, color="grey", linestyle=":", linewidth=1)
        is_close = above is not None and index - above < CLOSE_MARKS * width
        level = (level + 1) % MARK_LEVELS if is_close else 0
        above = index
        place = {"x": index, "y": 0.99 - level / MARK_LEVELS, "rotation": 90, "va": "top"}
        # Inside of the axes at both ends: numbers stand to the left of them.
        side = "left" if index < width * (1 - CLOSE_MARKS) else "right"
        transform = axes.get_xaxis_transform()
        axes.text(s=name, **place, ha=side, fontsize="x-small", transform=transform)


def _allocated(summary: Mapping[str, Any]) -> int:
    """Return the one peak that is shown, in bytes: as the allocator counts it, where it was asked.

    It hands out some blocks whole though less was asked for, and so counts more than the tensors.
    """
    return max(int(summary.get("allocated_bytes") or 0), int(summary["peak_bytes"]))


def _peak_line(summary: Mapping[str, Any]) -> str:
    event = summary["peak_event"]
    phase = event["phase"]
    text = f"peak {WHERE.get(phase, f'in {phase}')}" if phase else "peak"
    for name, joint in (("module", " of "), ("op", ", op ")):
        text += f"{joint}{event[name]}" if event[name] else ""
    return text + _since(str(event["mark"]))


def _since(mark: str) -> str:
    """Return where in a run a mark places what came after it: in its phase, if it starts one."""
    name = mark.replace(" ", "_")
    if name in RUN_PHASES:
        return f", in {phase_name(name)}"
    return f", after {mark}" if mark else ""


def _group(group: Mapping[str, Any]) -> str:
    where = WHERE.get(group["phase"], group["phase"])
    modules = group.get("modules", ())  # earlier records know none
    if modules:
        tensors = "tensor" if group["count"] == 1 else "tensors"
        return f"{group['count']} {tensors} of {_some(modules)} ({where})"
    times = f"{group['count']} x " if group["count"] > 1 else ""
    module = f" in {group['module']}" if group["module"] else ""
    return f"{times}{group['op']}{module} ({where})"


def _some(names: Sequence[str]) -> str:
    num_left = len(names) - MAX_MODULES
    shown = ", ".join(names[:MAX_MODULES])
    return f"{shown} and {num_left} more" if num_left > 0 else shown


def _stacked(kinds: Sequence[str] | Mapping[str, int]) -> list[str]:
    order = [*LOOKS, *(kind for kind in kinds if kind not in LOOKS)]
    return sorted(kinds, key=order.index)


def _look(kind: str) -> tuple[str, str, str]:
    return LOOKS.get(kind, ("?", "white", "#333333"))


def _words(kind: str) -> str:
    return "vLLM (modelled)" if kind == "vllm_modelled" else kind.replace("_", " ")


def _column(index: int, timeline: Mapping[str, Any], size: int) -> int:
    return min(size - 1, int(index * size // timeline["num_events"]))


def _columns(timeline: Mapping[str, Any], size: int) -> list[int | None]:
    """Return for each column the number of its highest point, or of the last before it."""
    best: list[int | None] = [None] * size
    points = timeline["points"]
    for number in sorted(range(len(points)), key=lambda number: sum(points[number][1:])):
        best[_column(points[number][0], timeline, size)] = number
    for column in range(1, size):
        if best[column] is None:
            best[column] = best[column - 1]
    return best


def _cell(
    timeline: Mapping[str, Any], kinds: Sequence[str], number: int | None, num_bytes: float
) -> tuple[str, str]:
    """Return character and style of the kind that ``num_bytes`` falls into at a point."""
    level = 0
    for kind in () if number is None else kinds:
        level += timeline["points"][number][1 + timeline["kinds"].index(kind)]
        if num_bytes <= level:
            return _look(kind)[:2]
    return " ", ""


def _peak_mark(summary: Mapping[str, Any], size: int) -> str:
    label = f"predicted peak {format_gib(_allocated(summary))} allocated"
    column = _column(summary["peak_event"]["index"], summary["timeline"], size)
    if column + 2 + len(label) <= size:
        return " " * (MARGIN + column) + f"▼ {label}"
    return f"{label} ▼".rjust(MARGIN + column + 1)


def _mark_lines(timeline: Mapping[str, Any], size: int) -> list[str]:
    """Return the names of marks under their columns, as many as find room in a few lines."""
    lines: list[str] = []
    num_left = 0
    for index, name in timeline["marks"]:
        column = _column(index, timeline, size)
        start = max(0, min(column, size - len(name)))
        for number in range(MARK_LINES):
            if number == len(lines):
                lines.append("")
            # A space between names, and no name that is wider than the area.
            if len(lines[number]) + bool(lines[number]) <= start and len(name) <= size:
                lines[number] = lines[number].ljust(start) + name
                break
        else:
            num_left += 1
    lines = [line for line in lines if line]
    return [*lines, f"({num_left} more marks)"] if num_left else lines


def _legend(kinds: Sequence[str], phases: Sequence[str], width: int) -> Text:
    entries = {f"{_look(kind)[0]} {_words(kind)}": _look(kind)[1] for kind in kinds}
    entries |= {f"{mark} {phase}": "dim" for phase, mark in PHASES.items() if mark in phases}
    # Not to be broken at its own spaces.
    joined = "  ".join(entry.replace(" ", "\xa0") for entry in entries)
    text = Text(_wrap(joined, width).replace("\xa0", " "))
    for entry, style in entries.items():
        text.highlight_words([entry], style)
    return text


def _drawn(budget_bytes: int | None, peak: int) -> int:
    """Return the budget if it is in sight of the peak, else 0."""
    return budget_bytes if budget_bytes and budget_bytes <= BUDGET_IN_SIGHT * peak else 0


def _budget_line(peak: int, budget_bytes: int) -> str:
    where = "─ " if _drawn(budget_bytes, peak) else "Not drawn, far above: "
    side = "over it" if peak > budget_bytes else "below it"
    gap = format_gib(abs(peak - budget_bytes))
    return f"{where}budget {format_gib(budget_bytes)}; the predicted peak is {gap} {side}"


def _wrap(text: str, width: int, *, hang: int = 0) -> str:
    # No word is broken, so that a module's path can be copied.
    kept: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, max(width, 20), subsequent_indent=" " * hang, **kept)
