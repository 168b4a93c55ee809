"""Predictions that lie beside a measured run, for its picture alone; read leniently."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.report.cells import settings

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
    """

    label: str
    peak_bytes: float
    rate: float


def read_predictions(
    run: Path, objectives: Sequence[str] = (), baseline: Mapping[str, Any] | None = None
) -> tuple[PredictedPoint, ...]:
    """Return the predictions in a run folder; none where there are none.

    They only add to a picture, so that a line which is torn, or which another version wrote, is
    passed over.

    Args:
        run: The run folder.
        objectives: Names of the values, in their order, where a line has a list of them.
        baseline: The baseline's candidate, whose settings are not named.
    """
    try:
        text = (run / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return tuple(_points(text, objectives, dict(baseline or {})))


def _points(
    text: str, objectives: Sequence[str], baseline: dict[str, Any]
) -> Iterator[PredictedPoint]:
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
        record = record.get("prediction", record)
        candidate, values = record.get("candidate"), record.get("values")
        if isinstance(values, list):
            values = dict(zip(objectives, values, strict=False))
        known = {**record, **(values if isinstance(values, dict) else {})}
        peak, rate = _number(known, _PEAKS), _number(known, _RATES)
        if peak is None or rate is None or not isinstance(candidate, dict):
            continue
        changed = {
            name: value
            for name, value in candidate.items()
            if name not in baseline or baseline[name] != value
        }
        yield PredictedPoint(label=settings(changed), peak_bytes=peak, rate=rate)


def _number(record: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        value = record.get(name)
        if isinstance(value, dict):
            value = value.get("median")
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18:
            return float(value)
    return None
