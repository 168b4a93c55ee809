"""What differs between a recorded search and the one that is asked for, in words for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.units import format_gib

MAX_LENGTH = 60

_LABELS = {
    "model": "the model",
    "revision": "the model's revision (--revision)",
    "dataset": "the data set",
    "dataset.dataset_name": "the data set",
    "dataset.datasets": "the data set",
    "dataset.dataset_config": "--dataset-config",
    "dataset.dataset_train_split": "--split",
    "trainer": "--trainer",
    "pins": "--pin",
    "device": "the device",
    "memory_budget_bytes": "--memory-budget",
    "global_batch": "--global-batch",
    "min_coverage": "--min-coverage",
    "objectives": "--objective",
    "weights": "--weights",
    "phases": "--phases",
    "processes": "--processes",
    "accelerate_config": "--accelerate-config",
    "steps": "warm-up and measured steps (--measured-steps)",
}
_DIGESTS = {
    "data_fingerprint": "the content of the data is another",
    "space": "the search space (--space) has other knobs, values or fixed keys",
}
"""What is compared by a digest: both would be noise."""


_DEFAULTS = {"objectives": ["peak_memory", "tokens_per_s"]}
"""What a record means that does not say it."""


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return a text for each thing that differs: its name, what it was, what it is now.

    Args:
        known: Plain JSON values that were recorded.
        wanted: The same of what is asked for.
    """
    found = []
    for name in sorted({*known, *wanted}):
        default = _DEFAULTS.get(name)
        before, now = known.get(name, default), wanted.get(name, default)
        if before == now:
            continue
        if name in _DIGESTS:
            found.append(_DIGESTS[name])
        elif isinstance(before, Mapping) and isinstance(now, Mapping):
            found += [
                _change(f"{name}.{key}", before.get(key), now.get(key))
                for key in sorted({*before, *now})
                if before.get(key) != now.get(key)
            ]
        else:
            found.append(_change(name, before, now))
    return found


def _change(name: str, before: Any, now: Any) -> str:
    shown: Callable[[Any], str] = _bytes if name.endswith("_bytes") else _value
    label = _LABELS.get(name, name)
    if name.startswith("pins."):
        label = f"--pin {name.removeprefix('pins.')}"
    return f"{label}: {shown(before)} before, {shown(now)} now"


def _bytes(value: Any) -> str:
    return format_gib(value) if isinstance(value, int) else _value(value)


def _value(value: Any) -> str:
    if value is None or value in ([], {}, ""):
        return "not given"
    if isinstance(value, Mapping):
        text = ", ".join(f"{key}={_value(item)}" for key, item in value.items())
    elif isinstance(value, list | tuple):
        text = ", ".join(_value(item) for item in value)
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    if len(text) <= MAX_LENGTH:
        return text
    # Paths differ at their ends more often than at their beginnings.
    half = (MAX_LENGTH - 3) // 2
    return f"{text[:half]}...{text[-half:]}"
