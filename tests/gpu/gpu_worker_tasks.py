"""What the tests let a worker process do on a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from autotune.devices import base as devices
from autotune.worker.classify import classify


def known_allocations(request: Mapping[str, Any]) -> dict[str, Any]:
    """Allocate and free known sizes; return the peaks that the meters read."""
    device = devices.load(request["device"])
    device.reset_peaks("one")
    before = device.read_peaks()
    kept = torch.empty(request["kept_bytes"], dtype=torch.uint8, device=request["device"])
    freed = torch.empty(request["freed_bytes"], dtype=torch.uint8, device=request["device"])
    del freed
    peak = device.read_peaks()
    device.reset_peaks("two")
    device.synchronize()
    after = device.read_peaks()
    del kept
    return {"before": asdict(before), "peak": asdict(peak), "after": asdict(after)}


def beyond_the_limit(request: Mapping[str, Any]) -> dict[str, Any]:
    """Allocate more than a limit allows; return what the error is taken for."""
    device = devices.load(request["device"])
    device.limit_memory(request["budget_bytes"])
    fits = torch.empty(request["fits_bytes"], dtype=torch.uint8, device=request["device"])
    try:
        torch.empty(request["budget_bytes"], dtype=torch.uint8, device=request["device"])
    except RuntimeError as error:
        kind = classify(error, device.oom_signatures(), device_kind=device.kind, phase="load")
        return {"outcome": str(kind), "fits_bytes": fits.numel()}
    return {"outcome": "ok"}
