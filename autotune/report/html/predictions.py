"""Predictions that lie beside a measured run, for its picture alone; read leniently."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from autotune.report.cells import settings
from autotune.report.model import Report

FILE = "predictions.jsonl"
_PEAKS = ("peak_bytes", "peak_memory", "peak")
_RATES = ("tokens_per_s", "rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPoint:
    """A candidate as it was predicted, without a probe.

    Attributes:
        label: Its settings, in words.
        peak_bytes: Its peak memory.
        rate: Its rate in tokens per second.
        is_scaled: Whether both were multiplied by what the run's own trials measured over what
            was predicted of them (the median), since predictions of a device are mostly off alike.
    """

    label: str
    peak_bytes: float
    rate: float
    is_scaled: bool = False


def read_predictions(run: Path, report: Report) -> tuple[PredictedPoint, ...]:
    """Return the predictions in a run folder of candidates that did not run; mostly none.

    They only add to a picture, so that a line which is torn, or which another version wrote, is
    passed over.
    """
    try:
        if not (run / FILE).is_file():
            return ()  # such as a pipe, which would have it wait
        text = (run / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    ran = {_key(item.candidate): item for item in report.trials if item.measurements}
    ratios: list[tuple[float, float]] = []
    usual = {} if report.baseline is None else report.baseline.candidate
    found = {}
    for record in _records(text):
        candidate, values = record.get("candidate"), record.get("values")
        if not isinstance(candidate, dict):
            continue
        known = {**record, **(values if isinstance(values, dict) else {})}
        peak, rate = _number(known, _PEAKS), _number(known, _RATES)
        if peak is None or rate is None:
            continue
        trial = ran.get(_key(candidate))
        if trial is not None:
            if trial.peak_bytes and trial.tokens_per_s is not None:
                ratios.append((trial.peak_bytes / peak, trial.tokens_per_s.median / rate))
            continue
        changed = {k: v for k, v in candidate.items() if k not in usual or usual[k] != v}
        # Of one candidate the last line counts.
        found[_key(candidate)] = PredictedPoint(
            label=settings(changed), peak_bytes=peak, rate=rate
        )
    if not ratios:
        return tuple(found.values())
    memory, speed = (median(parts) for parts in zip(*ratios, strict=True))
    return tuple(
        replace(item, peak_bytes=item.peak_bytes * memory, rate=item.rate * speed, is_scaled=True)
        for item in found.values()
    )


def _key(candidate: Mapping[str, Any]) -> str:
    return json.dumps(dict(candidate), sort_keys=True)


def _records(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        inner = record.get("prediction", record) if isinstance(record, dict) else None
        if isinstance(inner, dict):
            yield inner


def _number(record: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        value = record.get(name)
        if isinstance(value, dict):
            value = value.get("median")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18:
            return float(value)
    return None
