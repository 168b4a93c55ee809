"""TRL keys that a space may fix for every candidate, and those that it may not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from autotune.space.domains import Value
from autotune.space.knob import Knob

# Set by the request (model, data, device) or laid over every probe; fixed in a space they would
# be ignored or would break the measurement.
PROBE_KEYS = frozenset(
    {
        "config",
        "dataset_config",
        "dataset_name",
        "datasets",
        "disable_tqdm",
        "logging_steps",
        "logging_strategy",
        "max_steps",
        "model_name_or_path",
        "output_dir",
        "report_to",
        "resume_from_checkpoint",
        "save_strategy",
        "use_cpu",
    }
)


def refuse_fixed(key: str, value: Any, knobs: Iterable[Knob]) -> str | None:
    """Return why a space may not fix ``key`` to ``value``; None if it may."""
    if key in PROBE_KEYS:
        return f"{key} is set by the request or by the probe itself and cannot be fixed"
    written = (
        {key, *(f"{key}.{inner}" for inner in value)} if isinstance(value, Mapping) else {key}
    )
    for knob in knobs:
        for owned in knob.keys:
            whole = owned.startswith(f"{key}.") and not isinstance(value, Mapping)
            if owned in written or whole:
                return (
                    f"{owned} belongs to the knob {knob.name!r} and cannot be fixed beside it;"
                    f" list a single value under knobs instead"
                )
    return None


def merge(into: dict[str, Any], keys: Mapping[str, Any]) -> list[str]:
    """Add ``keys`` to ``into``, mapping by mapping; return the dotted keys that disagree."""
    clashes = []
    for key, value in keys.items():
        present = into.get(key)
        if isinstance(present, dict) and isinstance(value, Mapping):
            clashes += [f"{key}.{inner}" for inner in merge(present, value)]
        elif key in into and present != value:
            clashes.append(key)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value
    return clashes


def shown(name: str, value: Value) -> str:
    """Return a value as it is written after ``--pin``."""
    return f"{name}={value}"
