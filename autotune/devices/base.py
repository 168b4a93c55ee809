"""What a device backend must offer; backends live in the worker process."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.errors import UnknownNameError, UsageError
from autotune.probe.result import MemoryPeak
from autotune.registry import Registry
from autotune.space.context import DeviceInfo
from autotune.virtual import cards


@dataclass(frozen=True, slots=True, kw_only=True)
class OomSignature:
    """How an allocation failure looks on a device.

    Attributes:
        type_name: Qualified name of the exception's class or of one of its bases.
        message: Text the message must contain; empty accepts any.
    """

    type_name: str
    message: str = ""


class MicroBatches(Protocol):
    """Knows which micro-batches a trainer need not run again."""

    def expect(self, batch: Mapping[str, Any]) -> None:
        """Take note of a collated micro-batch, in the order in which they will be run."""
        ...

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``training_step`` of a Trainer that runs ``step`` only if it must."""
        ...

    def generate_less(self, model: Any) -> None:
        """Let ``model`` generate without running every step, where that tells the same."""
        ...


class DeviceBackend(Protocol):
    """Memory and clock edges of one device, from inside the probe process.

    Attributes:
        kind: Name of the backend.
        source: ``measured``, or ``predicted`` where nothing real is read.
    """

    kind: str
    source: str

    def describe(self) -> DeviceInfo:
        """Return name, memory and capabilities; may create a device context."""
        ...

    def limit_memory(self, budget_bytes: int) -> None:
        """Make allocations fail, as a real out-of-memory, beyond the budget.

        Raises:
            MemoryError: If the process is above the budget already.
        """
        ...

    def lift_limit(self) -> None:
        """Undo :meth:`limit_memory`, so that a failed probe can still report."""
        ...

    def clock(self) -> float:
        """Return the time in seconds, from any start; differences are what counts."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all work that was queued."""
        ...

    def reset_peaks(self, phase: str = "") -> None:
        """Start a new phase: later peaks count from the present use.

        Args:
            phase: Its name, where one keeps it.
        """
        ...

    def read_peaks(self) -> MemoryPeak:
        """Return the peaks since :meth:`reset_peaks`, in bytes."""
        ...

    def num_alloc_retries(self) -> int:
        """Return how often the allocator had to free its cache to serve a request."""
        ...

    def used_by_others_bytes(self) -> int | None:
        """Return the bytes other processes hold on the device; None if unknown."""
        ...

    def trainer_keys(self) -> dict[str, object]:
        """Return the TRL keys that place training on this device, such as ``use_cpu: true``."""
        ...

    def oom_signatures(self) -> tuple[OomSignature, ...]:
        """Return how this device's allocation failures look."""
        ...

    def placed(self) -> AbstractContextManager[None]:
        """Return the block within which a trainer is built and run."""
        ...

    def repeats(self) -> MicroBatches | None:
        """Return what spares a trainer micro-batches that repeat; None where all must be run."""
        ...

    def run_facts(self, *, num_points: int) -> Mapping[str, Any]:
        """Return further facts of the finished run, by their names in a measurement.

        Args:
            num_points: The most points of a timeline, if there is one.
        """
        ...


class Measured:
    """What real devices share: the wall clock, and nothing to set up."""

    source = "measured"

    def clock(self) -> float:
        """Return the wall clock, in seconds."""
        return time.perf_counter()

    def placed(self) -> AbstractContextManager[None]:
        """Return a block that changes nothing."""
        return nullcontext()

    def repeats(self) -> MicroBatches | None:
        """Return None: what is measured must be run."""
        return None

    def run_facts(self, *, num_points: int) -> Mapping[str, Any]:
        """Return nothing."""
        return {}


class DeviceFactory(Protocol):
    """Builds a backend for a resolved device name."""

    def __call__(self, name: str) -> DeviceBackend:
        """Return the backend for ``name``, such as ``cuda:1``."""
        ...


BUILT_IN = ("cpu", "cuda", "mps", "virtual", "xpu")
"""Kinds of the built-in backends, which the search must know without importing PyTorch."""

_INDEXED = ("cuda", "xpu")

registry: Registry[DeviceFactory] = Registry(
    "device",
    group="autotune.devices",
    builtin=(
        "autotune.devices.cpu",
        "autotune.devices.accelerators",
        "autotune.devices.virtual",
    ),
)


def check_name(name: str) -> None:
    """Check how a device is named, before a process is started to look for it.

    Raises:
        UnknownNameError: If no backend is known for its kind.
        UsageError: If its index is no number, or it takes none.
        PrerequisiteError: If a virtual card's file is missing.
    """
    kind, colon, index = name.partition(":")
    if kind == "virtual":
        cards.find(index)
        return
    known = {"auto", *BUILT_IN, *registry.declared()}
    if kind not in known:
        raise UnknownNameError("device", name, known, hint=_card_hint(name))
    if kind in _INDEXED and colon and not (index.isascii() and index.isdecimal()):
        raise UsageError(
            f"the device {name!r} has no number after the colon.",
            hint=f"Write {kind}, {kind}:0, {kind}:1, ...",
        )
    if kind in ("auto", *BUILT_IN) and kind not in _INDEXED and colon:
        raise UsageError(f"the device {kind!r} takes no index.", hint=f"Write {kind}.")


def _card_hint(name: str) -> str:
    """Return how to name a card of the catalogue; empty if ``name`` is none."""
    if not cards.is_known(name):
        return ""
    virtual = shlex.quote(f"virtual:{name}")
    return f"--device {virtual} predicts for that card; --device cuda is one in this machine."


def load(name: str) -> DeviceBackend:
    """Return the backend for a device name: ``cpu``, ``cuda``, ``cuda:1``, ``auto``, ...

    Raises:
        PrerequisiteError: If there is no such device here.
        UnknownNameError: If no backend is registered for its kind.
    """
    resolved = resolve(name)
    return registry.get(resolved.partition(":")[0])(resolved)


def resolve(name: str) -> str:
    """Return a full device name: ``auto`` is the accelerator that PyTorch sees, or the CPU."""
    import torch

    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = found.type if found is not None else "cpu"
    return f"{name}:0" if name in ("cuda", "xpu") else name
