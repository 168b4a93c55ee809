"""``fit``: what a traced run takes of a card, beyond the bytes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.probe.prediction import MEMORY_MARGIN
from autotune.units import format_gib, format_gib_apart
from autotune.virtual import cards
from autotune.virtual.allocator import OutOfMemory
from autotune.virtual.cards import Card
from autotune.virtual.replay import Replay
from autotune.virtual.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a run takes of a card; all of it predicted.

    Attributes:
        allocated_bytes: Most in tensors at once, as ``torch.cuda.max_memory_allocated`` counts.
        reserved_bytes: Most that PyTorch's allocator holds, as ``torch.cuda.max_memory_reserved``
            counts: the former and fragmentation.
        used_bytes: Reserved, and the context: what the card loses to the process.
        memory_bytes: What a process can use of the card.
        fits: Whether the run gets through, and leaves the margin for what predictions may be
            wrong by (5 % of the card's memory).
        out_of_memory: What PyTorch would have said when it ran out; empty if it gets through. The
            bytes are then those of a card that is large enough.
        num_alloc_retries: How often the allocator had to give back its cache to go on.
    """

    allocated_bytes: int
    reserved_bytes: int
    used_bytes: int
    memory_bytes: int
    fits: bool
    out_of_memory: str
    num_alloc_retries: int

    def __str__(self) -> str:
        """Return one line for people."""
        verdict = "fits" if self.fits else "does not fit" if self.out_of_memory else "too close"
        return (
            f"{verdict}: {' of '.join(format_gib_apart(self.used_bytes, self.memory_bytes))} used"
            f" (allocated {format_gib(self.allocated_bytes)}, reserved"
            f" {format_gib(self.reserved_bytes)}), predicted"
        )


def fit(trace: Trace, card: str | Card, *, settings: str = "") -> Fit:
    """Return what a traced run takes of a card, and whether it fits there.

    The run's allocations are replayed through a model of PyTorch's caching allocator. They may
    have been traced on another card, as far as both run the same kernels.

    Args:
        trace: As :func:`autotune.virtual.accelerator` yields it; best when its block has ended.
        card: A name as in ``--device virtual:NAME``, or a :class:`~autotune.virtual.cards.Card`.
        settings: The allocator's, as in ``PYTORCH_ALLOC_CONF``.

    Raises:
        UnknownNameError: If there is no such card, or setting.
    """
    found = cards.find(card) if isinstance(card, str) else card
    limit = found.memory_bytes - found.context_bytes
    total = found.memory_bytes
    replay = Replay(trace, settings=settings, limit_bytes=limit, total_bytes=total)
    ended = ""
    try:
        replay.advance()
    except OutOfMemory as error:
        ended = str(error)
        replay = Replay(trace, settings=settings, limit_bytes=None, total_bytes=total)
        replay.advance()
    used = replay.peak_reserved_bytes + found.context_bytes
    return Fit(
        allocated_bytes=replay.peak_allocated_bytes,
        reserved_bytes=replay.peak_reserved_bytes,
        used_bytes=used,
        memory_bytes=total,
        fits=not ended and used <= round(total * (1.0 - MEMORY_MARGIN)),
        out_of_memory=ended,
        num_alloc_retries=replay.num_alloc_retries,
    )
