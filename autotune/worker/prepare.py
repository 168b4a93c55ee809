"""Worker tasks that come before any probe: look at the device, tokenise the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.devices import base as devices
from autotune.probe.result import fit_bytes
from autotune.trainers import base as trainers
from autotune.worker.environment import environment, installed


def describe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device that ``request["device"]`` names, and the installed packages.

    Raises:
        PrerequisiteError: If there is no such device.
    """
    device = devices.load(str(request["device"]))
    info = device.describe()
    device.reset_peaks()
    peak = device.read_peaks()
    return {
        "device": info.to_dict(),
        # What a probe's process takes before it loads a model.
        "occupied_bytes": fit_bytes(peak, info.kind),
        "packages": installed(),
        "environment": environment(device),
        "trainer_keys": device.trainer_keys(),
        "broken_plugins": {
            f"{registry.kind} {name}": reason
            for registry in (devices.registry, trainers.registry)
            for name, reason in registry.broken.items()
        },
    }


def prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Tokenise the data for ``request["trainer"]``; see the adapter's ``prepare``."""
    return trainers.load(str(request["trainer"])).prepare(request)
