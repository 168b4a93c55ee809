"""The CPU as a device: its memory is the host's, and what counts is the resident size."""

from __future__ import annotations

import resource

import torch

from autotune.devices import host
from autotune.devices.base import Measured, OomSignature, registry
from autotune.probe.result import MemoryPeak
from autotune.space.context import DeviceInfo

_RESERVED_PER_RESIDENT = 1.6
"""Reserved over resident growth that a probe within its budget may need: seen up to 1.4 on the
demo. With less slack a candidate that fits would run out of memory, and its verdict be used as
proof against others; what goes over the budget within the slack is judged by its measured peak."""


class CpuDevice(Measured):
    """Resident size of the process, with a real limit on its growth."""

    kind = "cpu"

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        self._can_reset = host.reset_peak_resident()

    def describe(self) -> DeviceInfo:
        """Return the host's memory, cgroup limits included."""
        return DeviceInfo(
            name="cpu",
            kind="cpu",
            label=host.cpu_label(),
            total_bytes=host.total_memory(),
            free_bytes=host.available_memory(),
            # PyTorch runs bfloat16 on every CPU, in software where the hardware has none.
            supports_bf16=True,
        )

    def limit_memory(self, budget_bytes: int) -> None:
        """Let the data segment grow by no more than the budget leaves above the resident size.

        ``RLIMIT_DATA`` counts reserved, not resident bytes (getrlimit(2)), so the limit is stated
        as growth from now on. Thread stacks are reserved first: they are never resident as a whole
        and must not eat the budget.

        Raises:
            MemoryError: If the process is above the budget already.
        """
        _start_threads()
        memory = host.process_memory()
        growth = budget_bytes - memory["VmRSS"]
        if growth <= 0:
            raise MemoryError(
                f"the budget of {budget_bytes} bytes is below what PyTorch and TRL take before "
                f"a model is loaded ({memory['VmRSS']} bytes)"
            )
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = memory["VmData"] + int(growth * _RESERVED_PER_RESIDENT) + host.MALLOC_PAD_BYTES
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def lift_limit(self) -> None:
        """Raise the limit back to what the process was started with."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def synchronize(self) -> None:
        """Do nothing: work on the CPU is done when the call returns."""

    def reset_peaks(self, phase: str = "") -> None:
        """Reset the kernel's peak counter to the present resident size."""
        host.reset_peak_resident()

    def read_peaks(self) -> MemoryPeak:
        """Return the peak resident size since the last reset."""
        memory = host.process_memory()
        peak = memory.get("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryPeak(resident_bytes=peak)

    def num_alloc_retries(self) -> int:
        """Return 0: there is no caching allocator."""
        return 0

    def used_by_others_bytes(self) -> int | None:
        """Return None: on the host every process shares."""
        return None

    def trainer_keys(self) -> dict[str, object]:
        """Return ``use_cpu: true``, without which TRL refuses a machine without accelerator."""
        return {"use_cpu": True}

    def oom_signatures(self) -> tuple[OomSignature, ...]:
        """Return PyTorch's CPU allocator message and Python's own MemoryError."""
        return (
            OomSignature(type_name="RuntimeError", message="DefaultCPUAllocator: can't allocate"),
            OomSignature(type_name="RuntimeError", message="std::bad_alloc"),
            OomSignature(type_name="RuntimeError", message="could not create a primitive"),
            OomSignature(type_name="MemoryError"),
        )


def _start_threads() -> None:
    """Make PyTorch start its worker threads and the backward pass its own."""
    a = torch.ones(256, 256, requires_grad=True)
    (a @ a).relu().sum().backward()
    torch.ones(1 << 20).mul_(2.0)


registry.register("cpu", CpuDevice)
