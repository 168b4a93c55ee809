"""A card that is not there: ``virtual:rtx-4090``, ``virtual:24GiB`` or ``virtual:my-card.toml``.

Everything it reports is predicted: memory from the lifetimes of the run's tensors, replayed
through a model of PyTorch's caching allocator; time from the card's roofline.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from autotune.devices.base import OomSignature, registry
from autotune.probe.result import MemoryPeak
from autotune.space.context import DeviceInfo
from autotune.virtual import cards, device, placement, state
from autotune.virtual.api import session_for
from autotune.virtual.repeats import Repeats
from autotune.virtual.replay import Replay
from autotune.virtual.summary import summarise


class VirtualDevice:
    """One pretend card, active from its construction to the end of the process.

    Args:
        name: ``virtual:`` and a card, see :func:`autotune.virtual.cards.find`.

    Raises:
        UnknownNameError, UsageError, PrerequisiteError: If there is no such card, or the installed
            PyTorch cannot have a pretend device.
    """

    kind = "virtual"
    source = "predicted"

    def __init__(self, name: str) -> None:
        self.name = name
        self.card = cards.find(name.partition(":")[2])
        device.install()
        self._session = session_for(self.card)
        state.activate(self._session)
        self._replay = Replay(
            self._session.trace,
            settings=_allocator_settings(),
            limit_bytes=self.card.memory_bytes - self.card.context_bytes,
            total_bytes=self.card.memory_bytes,
        )

    def describe(self) -> DeviceInfo:
        """Return the card's figures; rules see a CUDA device, since that is what it stands for."""
        return cards.device_info(self.card, self.name)

    def limit_memory(self, budget_bytes: int) -> None:
        """Let the allocator reserve no more than the budget leaves beside the context."""
        limit = min(budget_bytes, self.card.memory_bytes) - self.card.context_bytes
        self._replay.limit(max(limit, 0))

    def lift_limit(self) -> None:
        """Let a run that has not begun take more than the card has, to see how much it needs.

        One that has begun, and may have run out, needs no memory of the device to report.
        """
        if not self._replay.has_begun:
            self._replay.limit(None)

    def clock(self) -> float:
        """Return the predicted time that the run has taken on the card, in seconds."""
        return sum(cost.seconds for cost in self._session.trace.costs.values())

    def synchronize(self) -> None:
        """Do nothing: what is predicted is done when the call returns."""

    def reset_peaks(self, phase: str = "") -> None:
        """Start a new phase."""
        self._replay.advance()
        self._replay.reset_peaks()
        self._session.trace.reset_peak()
        self._session.trace.mark(phase.replace("_", " ") or "phase")

    def read_peaks(self) -> MemoryPeak:
        """Return the peaks since :meth:`reset_peaks`; ``resident_bytes`` is what the host holds.

        Raises:
            OutOfMemory: If the allocator could not serve a request.
        """
        self._replay.advance()
        return MemoryPeak(
            allocated_bytes=self._replay.peak_allocated_bytes,
            reserved_bytes=self._replay.peak_reserved_bytes,
            used_bytes=self._replay.peak_reserved_bytes + self.card.context_bytes,
            resident_bytes=self._session.trace.host_peak_bytes,
        )

    def num_alloc_retries(self) -> int:
        """Return how often the allocator had to give back its cache."""
        return self._replay.num_alloc_retries

    def used_by_others_bytes(self) -> int | None:
        """Return 0: nobody else uses a card that is not there."""
        return 0

    def trainer_keys(self) -> dict[str, object]:
        """Return nothing: the card stands for an accelerator, the trainers' default."""
        return {}

    def oom_signatures(self) -> tuple[OomSignature, ...]:
        """Return the modelled allocator's exception."""
        return (OomSignature(type_name="autotune.virtual.errors.OutOfMemory"),)

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Let trainers choose this device while the block runs."""
        usual = gc.get_threshold()
        # What the trace keeps per operator would have garbage collected ten times as often as in
        # the training itself.
        gc.set_threshold(10 * usual[0], *usual[1:])
        try:
            with placement.placed(self._session), placement.without_initialisation():
                yield
        finally:
            gc.set_threshold(*usual)

    def repeats(self) -> Repeats:
        """Return what spares a trainer micro-batches that its trace knows already."""
        return Repeats(self._session.trace)

    def run_facts(self, *, num_points: int) -> Mapping[str, Any]:
        """Return what the peak is made of, with so many points of how memory changed.

        ``work`` is that of the whole run by phase: see :class:`autotune.virtual.trace.Cost`.
        """
        trace = self._session.trace
        makeup = summarise(trace, max_points=num_points)
        makeup["work"] = {phase: asdict(cost) for phase, cost in trace.costs.items()}
        modelled = self._session.modelled
        return {"makeup": {**makeup, "modelled": modelled} if modelled else makeup}


def _allocator_settings() -> str:
    """Return PyTorch's allocator settings, as the environment has them."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


registry.register("virtual", VirtualDevice)
