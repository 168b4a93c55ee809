"""Imports plug-ins' trainer adapters and device backends by being imported.

An adapter that is asked for as an attribute is imported too, with the trainer behind it.
"""

from __future__ import annotations

from typing import Any

from autotune.devices import base as devices
from autotune.trainers import base as trainers

DEVICES = devices.registry.names()
TRAINERS = trainers.registry.names()


def __getattr__(name: str) -> Any:
    """Return the trainer adapter of that name.

    Raises:
        AttributeError: If there is none.
    """
    if name not in trainers.registry.declared():
        raise AttributeError(name)
    return trainers.registry.get(name)
