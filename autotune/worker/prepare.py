"""Worker tasks that come before any probe: look at the device, tokenise the data."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from autotune.devices import base as devices
from autotune.probe.result import fit_bytes
from autotune.space.context import DeviceInfo
from autotune.trainers import base as trainers
from autotune.trainers import scripts
from autotune.virtual import cards
from autotune.worker.environment import environment, installed


def describe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device that ``request["device"]`` names, and the installed packages.

    Raises:
        PrerequisiteError: If there is no such device.
    """
    device = devices.load(str(request["device"]))
    info = device.describe()
    return {
        "device": info.to_dict(),
        "occupied_bytes": _occupied(device, info),
        "packages": installed(),
        "environment": environment(device),
        "trainer_keys": device.trainer_keys(),
        "broken_plugins": {
            f"{registry.kind} {name}": reason
            for registry in (devices.registry, trainers.registry)
            for name, reason in registry.broken.items()
        },
    }


def check_virtual(request: Mapping[str, Any]) -> dict[str, Any]:
    """Make a virtual card in this process, to see if there can be one.

    Raises:
        PrerequisiteError: If the installed PyTorch cannot have a device made in Python.
    """
    name = next(iter(cards.catalogue()))
    return {"device": devices.load(f"virtual:{name}").describe().to_dict()}


def _occupied(device: devices.DeviceBackend, info: DeviceInfo) -> int | None:
    """Return the bytes that a probe takes before it loads a model; None if not known."""
    # To set a limit, backends start what they must not count against it, such as threads.
    with contextlib.suppress(MemoryError, KeyError):
        device.limit_memory(info.total_bytes)
    device.reset_peaks()
    occupied = fit_bytes(device.read_peaks(), info.kind)
    device.lift_limit()
    return occupied


def prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Tokenise the data for ``request["trainer"]``; see the adapter's ``prepare``.

    The answer also says how a script builds the trainer, if ``trl`` has no command for it.
    """
    name = str(request["trainer"])
    adapter = trainers.load(name)
    return {**adapter.prepare(request), "script": scripts.described(name, adapter)}
