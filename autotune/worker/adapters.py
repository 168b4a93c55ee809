"""Imports all trainer adapters and device backends, plug-ins included, by being imported."""

from __future__ import annotations

from autotune.devices import base as devices
from autotune.trainers import base as trainers

DEVICES = devices.registry.names()
TRAINERS = trainers.registry.names()
