"""What predicted_vs_measured.py lets a worker process do on the card."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from autotune.probe.spec import ProbeSpec
from autotune.virtual.allocator_settings import AllocatorSettings
from autotune.virtual.allocator_snapshot import replay_snapshot
from autotune.worker.run import run_probe

MAX_EVENTS = 4_000_000
"""Events that PyTorch keeps; of a longer history the beginning would be lost."""


def card_facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what PyTorch tells of the card with index 0."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "total_bytes": int(properties.total_memory),
        "capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": int(properties.multi_processor_count),
        "vendor": "amd" if torch.version.hip else "nvidia",
        "toolkit": torch.version.cuda or torch.version.hip,
    }


def record_probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a probe with PyTorch's record of its allocator on, and replay that record.

    Args:
        request: ``spec`` of the probe, ``settings`` of the allocator as in PYTORCH_ALLOC_CONF.
    """
    os.environ.update(ProbeSpec.from_dict(request["spec"]).process_env)
    # Before that there is no allocator that could be told to record.
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, stacks="python", max_entries=MAX_EVENTS
    )
    answer = run_probe({"spec": request["spec"], "asked_at": time.time()})
    torch.cuda.synchronize()
    # Asking for it is itself an event, the last one.
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    return {**answer, "replay": replayed(events, str(request.get("settings", "")))}


def replayed(events: Iterable[Mapping[str, Any]], settings: str) -> dict[str, Any]:
    """Return what a recorded history and its replay have in common, with the error in percent."""
    found = asdict(replay_snapshot(events, AllocatorSettings.parse(settings)))
    recorded = found["recorded_peak_reserved_bytes"]
    error = 100 * (found["replayed_peak_reserved_bytes"] / recorded - 1.0) if recorded else None
    return {**found, "reserved_error_pct": None if error is None else round(error, 3)}
