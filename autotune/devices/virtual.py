"""A card that is not there: ``virtual:rtx-4090``, ``virtual:24GiB`` or ``virtual:my-card.toml``."""

from __future__ import annotations

from autotune.devices.base import OomSignature, registry
from autotune.probe.result import MemoryPeak
from autotune.space.context import DeviceInfo
from autotune.virtual import device, state
from autotune.virtual.session import Session


class VirtualDevice:
    kind = "virtual"
    source = "predicted"

    def __init__(self, name: str) -> None:
        self.name = name
        device.install()
        self.session = Session(workspace_bytes=8519680, total_bytes=80 << 30)
        state.activate(self.session)

    def describe(self) -> DeviceInfo:
        return DeviceInfo(name=self.name, kind="cuda", label="virtual", total_bytes=80<<30, free_bytes=80<<30, supports_bf16=True, capability=(8,0))

    def limit_memory(self, budget_bytes: int) -> None: pass
    def lift_limit(self) -> None: pass
    def synchronize(self) -> None: pass
    def reset_peaks(self) -> None:
        self.session.trace.reset_peak()
    def read_peaks(self) -> MemoryPeak:
        t=self.session.trace
        return MemoryPeak(allocated_bytes=t.peak_bytes, reserved_bytes=t.peak_bytes, used_bytes=t.peak_bytes, resident_bytes=t.host_peak_bytes)
    def num_alloc_retries(self) -> int: return 0
    def used_by_others_bytes(self) -> int | None: return None
    def trainer_keys(self) -> dict[str, object]: return {}
    def oom_signatures(self) -> tuple[OomSignature, ...]: return ()


registry.register("virtual", VirtualDevice)
