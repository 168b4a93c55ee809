"""The Pareto picture: peak memory against rate, as what plotly.js draws.

Plain JSON values. Colours are names of the style sheet's, such as ``@accent``, which the page's
script looks up, so that the picture follows light and dark.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from autotune.probe import prediction
from autotune.report.figures import known_spread
from autotune.report.html.captions import (
    MOST_PREDICTED,
    NO_MEMORY,
    budget_in_sight,
    drawn,
    failed_text,
    names_of,
    predicted_text,
    trial_text,
)
from autotune.report.html.predictions import PredictedPoint
from autotune.report.model import Report
from autotune.report.plot import BUDGET_IN_SIGHT
from autotune.report.trial import Trial
from autotune.units import GIB, format_gib

FONT = "system-ui, sans-serif"

STYLES: dict[str, tuple[str, str, str, int]] = {
    "other": ("other, within the limits", "circle-open", "@muted", 10),
    "over": ("over a limit", "triangle-up-open", "@over", 12),
    "pareto": ("Pareto set", "circle", "@accent", 13),
    "baseline": ("baseline", "diamond", "@ink", 13),
}
"""Legend, marker, colour and size, in the order in which they are drawn."""


def kind_of(trial: Trial, pareto: Collection[int], baseline: int) -> str:
    """Return which of :data:`STYLES` a trial is drawn in."""
    if trial.number == baseline:
        return "baseline"
    if trial.number in pareto:
        return "pareto"
    return "other" if trial.feasible else "over"


def figure(report: Report, predicted: Sequence[PredictedPoint] = ()) -> dict[str, Any] | None:
    """Return data and layout for plotly.js; None if no trial has a place in the picture.

    Args:
        report: Any.
        predicted: Candidates that were predicted beside a measured run.
    """
    points = drawn(report.trials)
    if not points:
        return None
    failed = [item for item in report.trials if item.outcome in NO_MEMORY]
    peaks = [float(item.peak_bytes or 0) for item in points]
    budget = report.budget_bytes
    in_sight = budget_in_sight(report)
    edge = float(budget) if budget is not None and in_sight else max(peaks) * 1.06
    near = [item for item in predicted if item.peak_bytes <= BUDGET_IN_SIGHT * max(*peaks, edge)]
    traces = [_front(report), _predicted(near[:MOST_PREDICTED])]
    for kind in STYLES:
        own = [
            item
            for item in points
            if kind_of(item, report.pareto_numbers, report.baseline_number) == kind
        ]
        traces.append(_trace(report, kind, own))
    traces.append(_out_of_memory(failed, edge, max(peaks) - min(peaks)))
    return {
        "data": [trace for trace in traces if trace is not None],
        "layout": _layout(report, bool(failed), in_sight=in_sight),
    }


def _front(report: Report) -> dict[str, Any] | None:
    """Return the line below which every point gives way to a member."""
    members = [item for item in drawn(report.pareto)]
    if not members:
        return None
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "best rate within that memory",
        "showlegend": False,
        "hoverinfo": "skip",
        "x": [_gib(item.peak_bytes) for item in members],
        "y": [_median(item) for item in members],
        "line": {"color": "@accent", "width": 1.25, "dash": "dot", "shape": "hv"},
    }


def _trace(report: Report, kind: str, trials: Sequence[Trial]) -> dict[str, Any] | None:
    if not trials:
        return None
    name, symbol, colour, size = STYLES[kind]
    # A dot within: not colour alone tells a prediction.
    is_predicted = all(item.source == prediction.SOURCE for item in trials)
    intervals = [item.tokens_per_s for item in trials]
    spreads = [known_spread(item.tokens_per_s, item.source) for item in trials]
    peaks = [item.peak_interval for item in trials]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": f"{name}, predicted" if is_predicted else name,
        "x": [_gib(item.peak_bytes) for item in trials],
        "y": [_median(item) for item in trials],
        "customdata": [item.number for item in trials],
        "text": [trial_text(report, item) for item in trials],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "symbol": f"{symbol}-dot" if is_predicted else symbol,
            "color": colour,
            "size": size,
            "line": {"color": colour if symbol.endswith("-open") else "@paper", "width": 1.5},
        },
        "error_y": _bar(
            [
                0.0 if s is None or r is None else s.high - r.median
                for s, r in zip(spreads, intervals, strict=True)
            ],
            [
                0.0 if s is None or r is None else r.median - s.low
                for s, r in zip(spreads, intervals, strict=True)
            ],
            colour,
        ),
        "error_x": _bar(
            [0.0] * len(trials),
            [0.0 if peak is None else (peak.high - peak.low) / GIB for peak in peaks],
            colour,
        ),
    }


def _bar(up: Sequence[float], down: Sequence[float], colour: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": list(up),
        "arrayminus": list(down),
        "color": colour,
        "thickness": 1,
        "width": 3,
        "visible": any((*up, *down)),
    }


def _predicted(points: Sequence[PredictedPoint]) -> dict[str, Any] | None:
    if not points:
        return None
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "predicted only, not run",
        "x": [item.peak_bytes / GIB for item in points],
        "y": [item.rate for item in points],
        "text": [predicted_text(item) for item in points],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "square-open", "color": "@faint", "size": 6, "line": {"width": 1}},
    }


def _out_of_memory(trials: Sequence[Trial], edge: float, width: float) -> dict[str, Any] | None:
    if not trials:
        return None
    # Side by side, so that each can be pointed at; they are somewhere beyond the line.
    step = max(width, edge / 10) / 60
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "out of memory: no rate",
        "x": [(edge + step * (place + 1)) / GIB for place in range(len(trials))],
        "y": [0.5] * len(trials),
        "yaxis": "y2",
        "customdata": [item.number for item in trials],
        "text": [failed_text(item) for item in trials],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "x", "color": "@bad", "size": 9},
    }


def _gib(num_bytes: float | None) -> float:
    return (num_bytes or 0.0) / GIB


def _median(trial: Trial) -> float:
    interval = trial.tokens_per_s
    return 0.0 if interval is None else interval.median


def _layout(report: Report, has_failed: bool, *, in_sight: bool) -> dict[str, Any]:
    source = ", predicted" if report.is_predicted else ""
    axis = {
        "gridcolor": "@grid",
        "linecolor": "@line",
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": "@line",
        "automargin": True,
    }
    layout: dict[str, Any] = {
        "font": {"family": FONT, "size": 13, "color": "@ink"},
        "paper_bgcolor": "@paper",
        "plot_bgcolor": "@paper",
        "margin": {"l": 12, "r": 12, "t": 8, "b": 12},
        "hovermode": "closest",
        "hoverlabel": {
            "align": "left",
            "bgcolor": "@panel",
            "bordercolor": "@line",
            "font": {"family": FONT, "color": "@ink", "size": 12},
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {**axis, "title": {"text": f"peak memory, GiB{source}"}, "anchor": "y"},
        "yaxis": {**axis, "title": {"text": f"rate, tokens/s{source}"}, "domain": [0, 1]},
        "annotations": _labels(report),
        "shapes": [],
    }
    if has_failed:
        layout["yaxis"]["domain"] = [0.13, 1]
        layout["yaxis2"] = {
            "domain": [0, 0.09],
            "range": [0, 1],
            "visible": False,
            "fixedrange": True,
        }
        layout["xaxis"]["anchor"] = "free"
        layout["xaxis"]["position"] = 0
    if in_sight and report.budget_bytes is not None:
        x = report.budget_bytes / GIB
        layout["shapes"].append(
            {
                "type": "line",
                **{"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"},
                "line": {"color": "@over", "width": 1.5, "dash": "dash"},
            }
        )
        layout["annotations"].append(
            {
                **{"x": x, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "right"},
                "text": f"budget {format_gib(report.budget_bytes)}",
                "showarrow": False,
                "font": {"color": "@over", "size": 12},
            }
        )
    return layout


def _labels(report: Report) -> list[dict[str, Any]]:
    """Return the names of the picks, above and left of their points, where no point can lie."""
    names = names_of(report)
    known = {item.number: item for item in drawn(report.trials)}
    low = min(_gib(item.peak_bytes) for item in known.values())
    high = max(_gib(item.peak_bytes) for item in known.values())
    found = []
    for number, words in names.items():
        if number not in known:
            continue
        x = _gib(known[number].peak_bytes)
        is_left = x - low < 0.4 * (high - low)
        found.append(
            {
                "x": x,
                "y": _median(known[number]),
                "text": " + ".join(words),
                "showarrow": True,
                "arrowhead": 0,
                "arrowwidth": 1,
                "arrowcolor": "@muted",
                "ax": 14 if is_left else -14,
                "ay": -26,
                "xanchor": "left" if is_left else "right",
                "font": {"color": "@ink", "size": 12},
                "standoff": 6,
            }
        )
    return found
