"""CUDA (and ROCm), XPU and MPS, read through PyTorch's own memory statistics."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import torch

from autotune.devices import host
from autotune.devices.base import Measured, OomSignature, registry
from autotune.errors import PrerequisiteError
from autotune.probe.result import MemoryPeak
from autotune.space.context import DeviceInfo

_OOM = (
    OomSignature(type_name="torch.OutOfMemoryError"),
    OomSignature(type_name="torch.cuda.OutOfMemoryError"),
    OomSignature(type_name="RuntimeError", message="out of memory"),
    OomSignature(type_name="RuntimeError", message="CUBLAS_STATUS_ALLOC_FAILED"),
    OomSignature(type_name="RuntimeError", message="CUDNN_STATUS_ALLOC_FAILED"),
    # vLLM does not start where its share is not free. That its share is too small for a cache is
    # another ValueError: a larger share helps, so that it is no want of the card's memory.
    OomSignature(type_name="ValueError", message="is less than desired GPU memory utilization"),
)


class AcceleratorDevice(Measured):
    """A device with PyTorch's caching allocator: ``cuda:N`` or ``xpu:N``.

    ``used_bytes`` is what the card loses to this process: the allocator's reserved memory plus the
    context and library handles, seen as the difference between the driver's figure and the
    allocator's. Other processes' share is read before the context exists and subtracted.

    Raises:
        PrerequisiteError: If PyTorch has no such device.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = name.partition(":")[0]
        module = getattr(torch, self.kind, None)
        if module is None or not module.is_available():
            raise PrerequisiteError(
                f"there is no {self.kind} device here: PyTorch {torch.__version__} sees none.",
                hint="Use --device cpu, or install the PyTorch build for your accelerator.",
            )
        index = int(name.partition(":")[2] or 0)
        if index >= module.device_count():
            raise PrerequisiteError(
                f"{name} is not there: {module.device_count()} {self.kind} device(s) are visible.",
                hint=f"Choose an index below {module.device_count()}.",
            )
        self._module: Any = module
        self._index = index
        self._others = _used_before_context(self.kind, index)
        module.set_device(index)
        torch.empty(1, device=name)  # creates the context, so that its size can be told
        self._overhead = 0
        self._note_overhead()

    def describe(self) -> DeviceInfo:
        """Return the card's name, memory, driver and capabilities."""
        free, total = self._module.mem_get_info(self._index)
        properties = self._module.get_device_properties(self._index)
        capability = None
        if self.kind == "cuda":
            capability = tuple(self._module.get_device_capability(self._index))
        if self._others is not None:
            free = total - self._others
        return DeviceInfo(
            name=self.name,
            kind=self.kind,
            label=str(properties.name),
            total_bytes=total,
            free_bytes=free,
            supports_bf16=self._has_bf16(),
            capability=capability,
            driver=_driver(self._index) if self.kind == "cuda" else None,
            num_devices=self._module.device_count(),
        )

    def _has_bf16(self) -> bool:
        if self.kind == "cuda":
            # Emulated, it works but takes float32's time: no reason to choose it over float16.
            return bool(self._module.is_bf16_supported(including_emulation=False))
        return bool(self._module.is_bf16_supported())

    def limit_memory(self, budget_bytes: int) -> None:
        """Cap the caching allocator at the budget less what the context takes."""
        _, total = self._module.mem_get_info(self._index)
        share = max(budget_bytes - self._overhead, 1) / total
        self._module.set_per_process_memory_fraction(min(share, 1.0), self._index)

    def lift_limit(self) -> None:
        """Do nothing: reporting needs no memory of the device."""

    def synchronize(self) -> None:
        """Wait for the device."""
        self._module.synchronize(self._index)

    def reset_peaks(self, phase: str = "") -> None:
        """Start new peaks of allocated and reserved memory."""
        self._note_overhead()
        self._module.reset_peak_memory_stats(self._index)
        host.reset_peak_resident()

    def read_peaks(self) -> MemoryPeak:
        """Return the peaks since the last reset."""
        self._note_overhead()
        reserved = self._module.max_memory_reserved(self._index)
        return MemoryPeak(
            allocated_bytes=self._module.max_memory_allocated(self._index),
            reserved_bytes=reserved,
            used_bytes=reserved + self._overhead,
            resident_bytes=host.process_memory().get("VmHWM"),
        )

    def num_alloc_retries(self) -> int:
        """Return the allocator's own count."""
        return int(self._module.memory_stats(self._index).get("num_alloc_retries", 0))

    def used_by_others_bytes(self) -> int | None:
        """Return what other processes held before this one's context existed."""
        return self._others

    def trainer_keys(self) -> dict[str, object]:
        """Return nothing: an accelerator is the trainers' default."""
        return {}

    def oom_signatures(self) -> tuple[OomSignature, ...]:
        """Return the allocator's exception and the libraries' allocation failures."""
        return _OOM

    def _note_overhead(self) -> None:
        free, total = self._module.mem_get_info(self._index)
        reserved = self._module.memory_reserved(self._index)
        self._overhead = max(self._overhead, total - free - reserved - (self._others or 0))


class MpsDevice(Measured):
    """Apple's GPU, which shares the host's memory."""

    kind = "mps"

    def __init__(self, name: str = "mps") -> None:
        self.name = name
        if not torch.backends.mps.is_available():
            raise PrerequisiteError(
                "there is no mps device here.", hint="Use --device cpu on this machine."
            )
        self._peak = 0
        self._driver_peak = 0

    def describe(self) -> DeviceInfo:
        """Return the memory that Metal recommends to use at most."""
        total = int(torch.mps.recommended_max_memory())
        return DeviceInfo(
            name="mps",
            kind="mps",
            label="Apple GPU",
            total_bytes=total,
            free_bytes=total - int(torch.mps.driver_allocated_memory()),
            supports_bf16=torch.backends.mps.is_macos_or_newer(14, 0),
        )

    def limit_memory(self, budget_bytes: int) -> None:
        """Cap the allocator at the budget."""
        torch.mps.set_per_process_memory_fraction(
            min(budget_bytes / torch.mps.recommended_max_memory(), 1.0)
        )

    def lift_limit(self) -> None:
        """Do nothing: reporting needs no memory of the device."""

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.mps.synchronize()

    def reset_peaks(self, phase: str = "") -> None:
        """Start new peaks. Metal keeps none, so the present use is all that is known."""
        self._peak = self._driver_peak = 0
        self._sample()

    def read_peaks(self) -> MemoryPeak:
        """Return the largest use seen at a phase's edges (Metal keeps no peak of its own)."""
        self._sample()
        return MemoryPeak(
            allocated_bytes=self._peak,
            reserved_bytes=self._driver_peak,
            used_bytes=self._driver_peak,
            resident_bytes=host.process_memory().get("VmHWM"),
        )

    def num_alloc_retries(self) -> int:
        """Return 0: not counted by this backend."""
        return 0

    def used_by_others_bytes(self) -> int | None:
        """Return None: not known."""
        return None

    def trainer_keys(self) -> dict[str, object]:
        """Return nothing: an accelerator is the trainers' default."""
        return {}

    def oom_signatures(self) -> tuple[OomSignature, ...]:
        """Return the allocator's message."""
        return (OomSignature(type_name="RuntimeError", message="MPS backend out of memory"),)

    def _sample(self) -> None:
        self._peak = max(self._peak, int(torch.mps.current_allocated_memory()))
        self._driver_peak = max(self._driver_peak, int(torch.mps.driver_allocated_memory()))


def _nvidia_smi(field: str, index: int) -> str | None:
    binary = shutil.which("nvidia-smi")
    if binary is None:
        return None
    command = [binary, f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _physical_index(index: int) -> int | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return index
    entries = [entry.strip() for entry in visible.split(",")]
    return int(entries[index]) if index < len(entries) and entries[index].isdigit() else None


def _used_before_context(kind: str, index: int) -> int | None:
    physical = _physical_index(index)
    if kind != "cuda" or physical is None:
        return None
    used = _nvidia_smi("memory.used", physical)
    return int(used) * 1024**2 if used is not None and used.isdigit() else None


def _driver(index: int) -> str | None:
    physical = _physical_index(index)
    return None if physical is None else _nvidia_smi("driver_version", physical)


registry.register("cuda", AcceleratorDevice)
registry.register("xpu", AcceleratorDevice)
registry.register("mps", MpsDevice)
