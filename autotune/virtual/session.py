"""One pretend accelerator at work: its trace, its card and what each operator costs on it."""

from __future__ import annotations

import contextlib
from typing import Any

from autotune.virtual.trace import Cost, Trace

_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm"})

_VARLEN = frozenset({"_flash_attention_forward", "_flash_attention_backward"})


class Session:
    """Receives what the device's kernels do.

    Args:
        capability: Compute capability (major, minor) of the card.
        workspace_bytes: cuBLAS workspace per thread that multiplies matrices; 0 for none.
        roofline: Turns work into seconds; None to count work only.
        scratch: Whether kernels take the memory of a card's kernels beyond their results.
        host_kernels: Whether attention goes the CPU's way, to compare with real tensors there.
        has_triton: Whether TRL's loss runs in Triton kernels, as on a card.
    """

    def __init__(
        self,
        *,
        capability: tuple[int, int] = (8, 0),
        workspace_bytes: int = 0,
        roofline: Any = None,
        scratch: bool = True,
        host_kernels: bool = False,
        has_triton: bool = True,
        name: str = "virtual",
        total_bytes: int = 0,
        multiprocessors: int = 1,
        supports_bf16: bool = True,
    ) -> None:
        self.trace = Trace()
        self.capability = capability
        self.roofline = roofline
        self.scratch = scratch
        self.host_kernels = host_kernels
        self.has_triton = has_triton
        self.name = name
        self.total_bytes = total_bytes
        self.multiprocessors = multiprocessors
        self.supports_bf16 = supports_bf16
        self.modelled: dict[str, Any] = {}
        """What takes memory without any tensor behind it, as plain JSON values by name."""
        self.until_end: contextlib.ExitStack | None = None
        """Undoes, with all other patches, what is patched while trainers choose the device."""
        self._workspace_bytes = workspace_bytes
        self.has_workspace: set[bool] = set()
        """For backward passes (True) and all else (False), once it was taken."""
        self._seconds: dict[int, float] = {}
        self.attention_share = 1.0
        """Of attention's arithmetic over N documents: the real one over N times the longest's."""

    def charge(self, plan: Any) -> str:
        """Count one operator: its work and the library's workspace; return the phase it is in."""
        trace = self.trace
        phase = trace.phase()
        cost = trace.costs.get(phase)
        if cost is None:
            cost = trace.costs[phase] = Cost()
        cost.num_ops += 1
        cost.moved_bytes += plan.moved_bytes
        flops = plan.flops
        if not flops:  # most operators only move bytes
            seconds = self._seconds.get(id(plan))
            if seconds is None:
                seconds = self._seconds[id(plan)] = self._time(plan, 0.0)
            cost.seconds += seconds
            return phase
        varlen = plan.name in _VARLEN
        if varlen:
            flops *= self.attention_share
        cost.flops += flops
        seconds = None if varlen else self._seconds.get(id(plan))
        if seconds is None:
            seconds = self._seconds[id(plan)] = self._time(plan, flops)
        cost.seconds += seconds
        if self._workspace_bytes and plan.name in _MATMULS:
            in_backward = phase == "backward"
            if in_backward not in self.has_workspace:
                # One per thread that calls cuBLAS: autograd has its own.
                self.has_workspace.add(in_backward)
                trace.reserve(self._workspace_bytes, "cublas")
        return phase

    def _time(self, plan: Any, flops: float) -> float:
        if self.roofline is None:
            return 0.0
        return float(self.roofline.op_seconds(plan, flops * plan.tiling))

    def charge_scratch(self, plan: Any) -> None:
        """Count what one operator's kernel takes beside its results, which are there already."""
        if self.scratch:
            self.trace.flash(plan.scratch_bytes, plan.name)

    def charge_move(self, name: str, moved_bytes: float) -> None:
        """Count a copy on the device."""
        cost = self._cost()
        cost.num_ops += 1
        cost.moved_bytes += moved_bytes
        if self.roofline is not None:
            cost.seconds += self.roofline.move_seconds(moved_bytes)

    def charge_matmul(self, flops: float, moved_bytes: float, dtype: Any) -> None:
        """Count a matrix product that is not PyTorch's own."""
        cost = self._cost()
        cost.num_ops += 1
        cost.flops += flops
        cost.moved_bytes += moved_bytes
        if self.roofline is not None:
            cost.seconds += self.roofline.matmul_seconds(flops, moved_bytes, dtype)

    def charge_link(self, nbytes: float) -> None:
        """Count a copy between host and device."""
        cost = self._cost()
        cost.num_ops += 1
        cost.link_bytes += nbytes
        if self.roofline is not None:
            cost.seconds += self.roofline.link_seconds(nbytes)

    def _cost(self) -> Cost:
        phase = self.trace.phase()
        return self.trace.costs.setdefault(phase, Cost())
