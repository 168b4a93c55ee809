"""A trace's allocations, replayed through the model of PyTorch's caching allocator."""

from __future__ import annotations

from autotune.virtual.allocator import CachingAllocator, OutOfMemory
from autotune.virtual.allocator_settings import AllocatorSettings
from autotune.virtual.trace import ALLOC, EMPTY, ENGINE, FREE, Trace


class Replay:
    """Follows a trace; may lag behind it and catch up.

    Args:
        trace: The events.
        settings: As in ``PYTORCH_ALLOC_CONF``; empty for the defaults.
        limit_bytes: What the allocator may reserve at most; None for no limit.
        total_bytes: The card's memory, which a share in the settings is one of.

    Raises:
        UsageError: If a setting is unknown or wrong.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        settings: str = "",
        limit_bytes: int | None,
        total_bytes: int | None = None,
    ) -> None:
        self._trace = trace
        self._total_bytes = total_bytes
        self._settings = AllocatorSettings.parse(settings)
        share = self._settings.per_process_memory_fraction
        self._allowed = None if total_bytes is None or share == 1.0 else int(total_bytes * share)
        self._allocator = self._make(limit_bytes)
        self._next = 0

    def _make(self, limit_bytes: int | None) -> CachingAllocator:
        allowed = None if limit_bytes is None else self._allowed
        return CachingAllocator(self._settings, limit_bytes, allowed_bytes=allowed)

    @property
    def has_begun(self) -> bool:
        """Return whether anything was allocated, so that the limit stands."""
        return bool(self._next and self._allocator.peak_reserved_bytes)

    def limit(self, limit_bytes: int | None) -> None:
        """Lower, raise or lift (None) the limit, before anything was allocated.

        Raises:
            ValueError: If events have been replayed already.
        """
        if self.has_begun:
            raise ValueError("the limit must be set before anything is allocated")
        self._allocator = self._make(limit_bytes)

    def advance(self) -> None:
        """Replay the events that have come since the last call.

        Raises:
            OutOfMemory: If a request could not be served.
        """
        try:
            self._advance()
        except OutOfMemory as error:
            error.total_bytes = self._total_bytes  # which the allocator does not know
            raise

    def _advance(self) -> None:
        events, storages = self._trace.events, self._trace.storages
        malloc, free = self._allocator.malloc, self._allocator.free
        end = len(events)
        while self._next < end:
            action, number = events[self._next]
            self._next += 1
            if action == ALLOC:
                storage = storages[number]
                if storage.kind == ENGINE:
                    self._allocator.take_beside(number, storage.nbytes)
                else:
                    malloc(number, storage.nbytes)
            elif action == FREE:
                free(number)
            elif action == EMPTY:
                self._allocator.empty_cache()

    def reset_peaks(self) -> None:
        """Start new peaks from what is in use now."""
        self._allocator.reset_peaks()

    @property
    def peak_allocated_bytes(self) -> int:
        """Return the most that was allocated, as ``torch.cuda.max_memory_allocated`` counts."""
        return self._allocator.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the most that was reserved, as ``torch.cuda.max_memory_reserved`` counts."""
        return self._allocator.peak_reserved_bytes

    @property
    def num_alloc_retries(self) -> int:
        """Return how often the cache was given back to serve a request."""
        return self._allocator.num_alloc_retries
