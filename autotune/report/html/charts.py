"""What is drawn with plain boxes: effects, make-up of predicted peaks, lengths of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.probe import prediction
from autotune.probe.result import PHASES, Interval, phase_name
from autotune.report.cells import percent, ratio, settings
from autotune.report.effect_notes import note
from autotune.report.effects import Effect
from autotune.report.makeup import LOOKS, WHOLE_BLOCKS
from autotune.report.model import Report
from autotune.report.trial import Trial
from autotune.units import format_gib

UNUSED = "reserved, unused"
CONTEXT = "context"
KINDS = (*LOOKS, UNUSED, CONTEXT)
"""What a predicted peak is made of, from the bottom up."""

LEAST_SPAN = math.log(1.1)
"""Bars of effects reach at least 10 % to each side, so that noise looks like noise."""


def effect_rows(found: Sequence[Effect]) -> list[dict[str, Any]]:
    """Return effects with all else equal: texts, and bars to each side of no change."""
    ratios = [side for item in found for side in (item.memory, item.rate)]
    spans = [
        abs(math.log(value)) for side in ratios for value in (side.low, side.high) if value > 0
    ]
    span = max([LEAST_SPAN, *spans])
    return [
        {
            "knob": item.knob,
            "step": item.step.removeprefix(f"{item.knob}: "),
            "pairs": _pairs(item),
            "memory": _side(item.memory, span, is_noise=item.memory_is_noise, less_is_good=True),
            "rate": _side(item.rate, span, is_noise=item.rate_is_noise, less_is_good=False),
            "training": "+".join(item.changes) or "same",
            "note": note(item),
        }
        for item in found
    ]


def _pairs(effect: Effect) -> str:
    shown = [f"{before} and {after}" for before, after in effect.pairs[:3]]
    more = f", {len(effect.pairs) - 3} more" if len(effect.pairs) > 3 else ""
    return f"{len(effect.pairs)}: {', '.join(shown)}{more}"


def _side(value: Interval, span: float, *, is_noise: bool, less_is_good: bool) -> dict[str, Any]:
    """Return a ratio with its bar: where it begins and how wide it is, of the whole width."""
    reach = max(-1.0, min(1.0, math.log(value.median) / span))
    low, high = ratio(value.low), ratio(value.high)
    is_less = value.median < 1
    return {
        "text": ratio(value.median, is_tied=is_noise),
        "range": "" if low == high else f"{low} to {high}",
        "start": 0.5 + min(reach, 0) / 2,
        "width": abs(reach) / 2,
        "look": "noise" if is_noise else "good" if is_less is less_is_good else "cost",
        "words": "within the noise" if is_noise else "less" if is_less else "more",
    }


def makeups(report: Report) -> list[dict[str, Any]]:
    """Return what each predicted member's peak is made of, which adds up to the table's GiB."""
    found = [_makeup(item) for item in report.pareto if item.source == prediction.SOURCE]
    known = [item for item in found if item is not None]
    most = max((item["bytes"] for item in known), default=0) or 1
    for item in known:
        for part in item["parts"]:
            part["share"] = part["bytes"] / most
    return known


def _makeup(trial: Trial) -> dict[str, Any] | None:
    pooled = trial.measurement
    if pooled is None or not isinstance(pooled.makeup, Mapping):
        return None
    at_peak = pooled.makeup.get("at_peak")
    if not isinstance(at_peak, Mapping):
        return None
    parts = {str(kind): int(num) for kind, num in at_peak.items()}
    allocated = pooled.peak_of("allocated_bytes")
    reserved, used = pooled.peak_of("reserved_bytes"), pooled.peak_of("used_bytes")
    levels = [
        (WHOLE_BLOCKS, allocated, sum(parts.values())),
        (UNUSED, reserved, allocated),
        (CONTEXT, used, reserved),
    ]
    for name, upper, lower in levels:
        if upper is not None and lower is not None and upper > lower:
            parts[name] = upper - lower
    total = sum(parts.values())
    order = [*KINDS, *sorted(set(parts) - set(KINDS))]
    return {
        "number": trial.number,
        "title": settings(trial.changed),
        "bytes": total,
        "total": format_gib(total),
        "host": format_gib(trial.host_bytes) if trial.host_bytes else "",
        "parts": [
            {
                "name": words(kind),
                "look": KINDS.index(kind) if kind in KINDS else len(KINDS),
                "bytes": parts[kind],
                "gib": format_gib(parts[kind]),
                "percent": percent(parts[kind] / total if total else 0.0),
            }
            for kind in order
            if parts.get(kind)
        ],
    }


def words(kind: str) -> str:
    """Return a kind of memory as texts call it."""
    return "vLLM (modelled)" if kind == "vllm_modelled" else kind.replace("_", " ")


def peaks_by_phase(report: Report) -> list[dict[str, Any]]:
    """Return each measured member's peak in every phase, with its share of the greatest shown."""
    found: list[tuple[Trial, str, dict[str, int]]] = []
    for trial in report.pareto:
        pooled = trial.measurement
        if pooled is not None and trial.source != prediction.SOURCE:
            order = [*PHASES, *sorted(set(pooled.phases) - set(PHASES))]
            peaks = {
                name: pooled.fit_bytes(pooled.phases[name])
                for name in order
                if name in pooled.phases
            }
            known = {name: peak for name, peak in peaks.items() if peak is not None}
            found.append((trial, pooled.peak_phase, known))
    most = max((peak for _, _, peaks in found for peak in peaks.values()), default=0) or 1
    return [
        {
            "number": trial.number,
            "title": settings(trial.changed),
            "phases": [
                {
                    "name": phase_name(name).removeprefix("the "),
                    "gib": format_gib(peak),
                    "share": peak / most,
                    "is_peak": name == highest,
                }
                for name, peak in peaks.items()
            ],
        }
        for trial, highest, peaks in found
    ]


def lengths(report: Report) -> dict[str, Any] | None:
    """Return rows of the data by length, and where picks cut them; None in older reports."""
    ranges = _ranges(report.data.get("length_counts"))
    if not ranges:
        return None
    longest, most = ranges[-1][1], max(count for _, _, count in ranges)
    return {
        "longest": longest,
        "most": f"{most:,}",
        "bars": [
            {"label": f"{first:,} to {last:,} tokens: {count:,} rows", "share": count / most}
            for first, last, count in ranges
        ],
        "marks": _marks(report, longest),
    }


def _ranges(value: object) -> list[tuple[int, int, int]]:
    """Return ranges of lengths with their rows; none if a record holds something else."""
    found = []
    for item in value if isinstance(value, Sequence) and not isinstance(value, str) else ():
        if not isinstance(item, Sequence) or len(item) != 3:
            return []
        if not all(isinstance(number, int) and number >= 0 for number in item):
            return []
        found.append((int(item[0]), int(item[1]), int(item[2])))
    return found if any(count for _, _, count in found) else []


def _marks(report: Report, longest: int) -> list[dict[str, Any]]:
    """Return the lengths that the picks and the baseline train at, each once."""
    named = dict(report.picks())
    baseline = report.baseline
    trials = {name: report.pick(number) for name, number in named.items()}
    if baseline is not None:
        trials["baseline"] = baseline
    found: dict[int | None, list[tuple[str, Trial]]] = {}
    for name, trial in trials.items():
        if "max_length" in trial.config:
            found.setdefault(trial.config["max_length"], []).append((name, trial))
    marks: list[dict[str, Any]] = []
    for length in sorted(found, key=lambda value: math.inf if value is None else value):
        own = found[length]
        trained = sorted({percent(trial.coverage) for _, trial in own})
        beyond = length is None or length > longest
        marks.append(
            {
                "letter": chr(ord("A") + len(marks)),
                "length": "no limit" if length is None else f"{length:,}",
                "names": [f"{name} (trial {trial.number})" for name, trial in own],
                "trained": " or ".join(trained),
                "share": 1.0 if length is None else min(1.0, length / longest),
                "beyond": beyond,
            }
        )
    return marks
