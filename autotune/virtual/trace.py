"""What a run allocates: every storage's bytes, kind, phase and lifetime, in order.

A trace only counts; the tensors come from :mod:`autotune.virtual.device` (no data) or from
:mod:`autotune.virtual.realtrace` (real ones on the CPU).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.units import format_duration, format_gib

BLOCK_BYTES = 512
"""PyTorch's caching allocator for CUDA rounds every request up to this (kMinBlockSize)."""

KINDS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_states",
    "activations",
    "temporaries",
    "workspaces",
    "vllm_modelled",
)
ENGINE = KINDS[-1]
"""Kind of what vLLM holds: the only one that no operator took and that lies in no pool."""

PHASES = ("load", "forward", "backward", "optimizer", "other")

ALLOC, FREE, MARK, EMPTY = 0, 1, 2, 3


def rounded(nbytes: int) -> int:
    """Return ``nbytes`` as the allocator hands it out: whole blocks of 512 bytes."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(slots=True)
class Storage:
    """One block of memory of the traced device.

    Attributes:
        index: Its number, in the order of allocation.
        nbytes: As asked for, not rounded.
        op: The operator that made it.
        phase: The phase it was made in; one of :data:`PHASES`.
        module: Path of the innermost module that ran, or "".
        kind: Given when it becomes known; "" until then.
        freed_phase: The phase it ended in; "" while it lives.
    """

    index: int
    nbytes: int
    op: str
    phase: str
    module: str
    kind: str = ""
    freed_phase: str = ""


@dataclass(slots=True)
class Cost:
    """Predicted work of one phase.

    Attributes:
        flops: Floating point operations of matrix products and attention.
        moved_bytes: Bytes that operators read and wrote in device memory.
        link_bytes: Bytes copied between the host and the device.
        num_ops: Operators launched.
        seconds: Predicted time on the card; 0 without one.
    """

    flops: float = 0.0
    moved_bytes: float = 0.0
    link_bytes: float = 0.0
    num_ops: int = 0
    seconds: float = 0.0

    def add(self, part: Cost, times: int = 1) -> None:
        """Add the work of ``part`` so many times, or take it away (-1)."""
        self.flops += times * part.flops
        self.moved_bytes += times * part.moved_bytes
        self.link_bytes += times * part.link_bytes
        self.num_ops += times * part.num_ops
        self.seconds += times * part.seconds


@dataclass(slots=True, repr=False)
class Trace:
    """Events of one run on one device, and the same for the bytes it keeps on the host.

    What to read of it: :attr:`peak_bytes`, :attr:`host_peak_bytes`, :attr:`costs` and
    :meth:`summary`; :func:`autotune.virtual.fit` says what it takes of a card.

    Attributes:
        storages: Every storage of the device, by its number.
        events: ``(ALLOC | FREE, storage number)`` in order; ``(MARK, n)`` is ``marks[n]``, and
            ``(EMPTY, 0)`` says that the allocator's cache was given back.
        marks: Names of the marks that the run set, such as ``first_step``.
        allocated_bytes: In use now, in blocks of 512 bytes.
        peak_bytes: The most that was in use at once since :meth:`reset_peak`, as
            ``torch.cuda.max_memory_allocated`` counts it.
        host_bytes: Bytes of host memory that hold copies of device data or paged states, now.
        host_peak_bytes: The most of that at once.
        costs: Predicted work by phase (of :data:`PHASES`): see :class:`Cost`.
        closed: Whether the run is over, so that nothing is counted any more.
        sums: Storages of gradients whose sums are of interest, by number; each with the number of
            what was added to it last.
        sums_cost: Work of adding to them.
    """

    storages: list[Storage] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    allocated_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    host_peak_bytes: int = 0
    costs: dict[str, Cost] = field(default_factory=dict)
    module_depth: int = 0
    in_optimizer: bool = False
    modules: list[str] = field(default_factory=list)
    _alive: dict[int, _Alive] = field(default_factory=dict)
    sums: dict[int, int | None] = field(default_factory=dict)
    sums_cost: Cost = field(default_factory=Cost)
    _copies: dict[int, str] = field(default_factory=dict)
    _host: dict[int, Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)
    closed: bool = False
    after_bytes: int = 0

    def __repr__(self) -> str:
        """Return its figures: what it holds would fill many screens."""
        host = f", {format_gib(self.host_peak_bytes)} on the host" if self.host_peak_bytes else ""
        seconds = sum(cost.seconds for cost in self.costs.values())
        return (
            f"<Trace: peak {format_gib(self.peak_bytes)} allocated{host},"
            f" {format_duration(seconds)} predicted, {len(self.storages):,} storages,"
            f" {len(self.events):,} events>"
        )

    def summary(self, *, max_points: int = 240) -> dict[str, Any]:
        """Return what the peak is made of and how memory changed, as plain JSON values.

        Args:
            max_points: The most points of the timeline.

        Returns:
            As :func:`autotune.virtual.summary.summarise` says.
        """
        # That module reads traces, and so imports this one.
        from autotune.virtual.summary import summarise

        return summarise(self, max_points=max_points)

    def phase(self) -> str:
        """Return the phase that runs now."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        if self.in_optimizer:
            return "optimizer"
        if self.module_depth:
            return "forward"
        return "other" if self.marks else "load"

    def allocate(
        self, storage: Any, nbytes: int, op: str, kind: str = "", phase: str | None = None
    ) -> int:
        """Count a new storage until it is freed; return its number."""
        if phase is None:
            phase = self.phase()
        alive = _Alive(storage, self._freed)
        alive.key = key = storage._cdata
        with self._lock:
            storages, modules = self.storages, self.modules
            alive.number = number = len(storages)
            storages.append(
                Storage(number, nbytes, op, phase, modules[-1] if modules else "", kind)
            )
            self.events.append((ALLOC, number))
            self.allocated_bytes = total = (
                self.allocated_bytes + -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
            )
            if total > self.peak_bytes:
                self.peak_bytes = total
            self._alive[key] = alive
        return number

    def reserve(self, nbytes: int, op: str, kind: str = "workspaces") -> None:
        """Count memory that a library takes and never gives back."""
        with self._lock:
            self._begin(nbytes, op, self.phase(), kind=kind)

    def hold(self, nbytes: int, op: str, kind: str) -> int:
        """Count memory until :meth:`let_go`; return its number."""
        with self._lock:
            return self._begin(nbytes, op, self.phase(), kind=kind)

    def let_go(self, number: int) -> None:
        """Count what :meth:`hold` counted as freed."""
        with self._lock:
            self._end(number, self.phase())

    def empty_cache(self) -> None:
        """Note that the allocator is told to give back what it holds and nothing uses."""
        with self._lock:
            self.events.append((EMPTY, 0))

    def flash(self, sizes: Iterable[int], op: str) -> None:
        """Count blocks that a kernel takes and gives back before it returns."""
        with self._lock:
            phase = self.phase()
            numbers = [self._begin(nbytes, op, phase, kind="temporaries") for nbytes in sizes]
            for number in numbers:
                self._end(number, phase)

    def _begin(self, nbytes: int, op: str, phase: str, *, module: str = "", kind: str = "") -> int:
        """Count a storage that nothing holds, until :meth:`_end`; return its number."""
        number = len(self.storages)
        self.begin_again(Storage(number, nbytes, op, phase, module, kind))
        return number

    def _end(self, number: int, phase: str) -> None:
        self.storages[number].freed_phase = phase
        self.end_again(number)

    def _freed(self, alive: _Alive) -> None:
        key, number = alive.key, alive.number
        with self._lock:
            # Another storage may lie at the same address already, or the run be over.
            if self._alive.get(key) is not alive or self.closed:
                return
            del self._alive[key]
            self._end(number, self.phase())

    def repeat(self, number: int, *, freed_phase: str = "") -> int:
        """Count a further storage like that one, until :meth:`release`; return its number.

        Args:
            number: Of the storage to count again.
            freed_phase: The phase it will be freed in; by default that of the other one.
        """
        with self._lock:
            entry = self.storages[number]
            # Those that stay are said to be gradients.
            kind = "" if entry.kind == "gradients" else entry.kind
            again = self._begin(
                entry.nbytes, entry.op, entry.phase, module=entry.module, kind=kind
            )
            self._copies[again] = freed_phase or entry.freed_phase or entry.phase
        return again

    def release(self, number: int) -> None:
        """Count a storage of :meth:`repeat` as freed."""
        with self._lock:
            self._end(number, self._copies.pop(number))

    def take_back(self, event: int, number: int, peak_bytes: int) -> bool:
        """Forget what was done since, if all of it but workspaces is freed and nothing else is.

        Args:
            event: Number of events to keep.
            number: Number of storages to keep.
            peak_bytes: The peak so far.

        Returns:
            Whether it could be forgotten. Workspaces are, too: their library must take them again.
        """
        with self._lock:
            since = self.storages[number:]
            freed = {found for action, found in self.events[event:] if action == FREE}
            stays = [entry for entry in since if entry.index not in freed]
            if any(found < number for found in freed) or any(
                entry.kind != "workspaces" for entry in stays
            ):
                return False
            del self.events[event:], self.storages[number:]
            self.allocated_bytes -= sum(rounded(entry.nbytes) for entry in stays)
            self.peak_bytes = peak_bytes
            return True

    def begin_again(self, entry: Storage) -> None:
        """Count a storage that was taken out of the trace; its number must be the next one.

        It ends by :meth:`end_again`, or with the tensor that :meth:`renumber` gave this number.
        """
        self.storages.append(entry)
        self.events.append((ALLOC, entry.index))
        self.allocated_bytes += rounded(entry.nbytes)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def end_again(self, number: int) -> None:
        """Count a storage as freed that already says in which phase it was."""
        self.events.append((FREE, number))
        self.allocated_bytes -= rounded(self.storages[number].nbytes)

    def renumber(self, moved: Callable[[int], int]) -> None:
        """Give live storages other numbers, where the trace is about to be written anew."""
        for alive in self._alive.values():
            alive.number = moved(alive.number)

    def end(self, tensor: torch.Tensor) -> None:
        """Count the storage behind ``tensor`` as freed, though the tensor lives on in another."""
        alive = self._alive.get(tensor.untyped_storage()._cdata)
        if alive is not None:
            self._freed(alive)

    def end_number(self, number: int) -> None:
        """The same for a storage by its number."""
        for alive in [item for item in self._alive.values() if item.number == number]:
            self._freed(alive)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the storage behind ``tensor``; None if it is not traced."""
        try:
            alive = self._alive.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:
            return None  # a wrapper of torch.func, around a tensor that is counted by itself
        return None if alive is None else alive.number

    def tag(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say what these tensors' storages are; the first word on a storage stands."""
        for tensor in tensors:
            number = self.number_of(tensor)
            if number is not None and not self.storages[number].kind:
                self.storages[number].kind = kind

    def hold_on_host(self, storage: Any, nbytes: int) -> None:
        """Count host memory that holds device data until ``storage`` is freed; once each."""
        key = storage._cdata
        with self._lock:
            if key in self._host:
                return
            self._host[key] = weakref.ref(storage, _HostFreed(self, key, nbytes))
            self.host_bytes += nbytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def mark(self, name: str) -> None:
        """Set a mark between events."""
        self.events.append((MARK, len(self.marks)))
        self.marks.append(name)

    def reset_peak(self) -> None:
        """Start a new peak from what is in use now."""
        self.peak_bytes = self.allocated_bytes
        self.host_peak_bytes = self.host_bytes

    def close(self) -> None:
        """Stop counting; what is freed from now on is not part of the run."""
        self.closed = True
        for alive in self._alive.values():
            self.storages[alive.number].freed_phase = ""

    def kind_of(self, storage: Storage) -> str:
        """Return a storage's kind, from what it was tagged as or else from its lifetime.

        What outlives the forward pass that made it is kept for the backward pass: an activation.
        """
        if storage.kind:
            return storage.kind
        if storage.phase == "forward" and storage.freed_phase != "forward":
            return "activations"
        if storage.phase == "other" and storage.freed_phase == "backward":
            return "activations"  # of a loss that is computed outside of any module
        return "temporaries"


class _Alive(weakref.ref[Any]):
    """A reference that knows its storage's number; there are as many as operators."""

    __slots__ = ("key", "number")
    key: int
    number: int


class _HostFreed:
    __slots__ = ("key", "nbytes", "trace")

    def __init__(self, trace: Trace, key: int, nbytes: int) -> None:
        self.trace, self.key, self.nbytes = trace, key, nbytes

    def __call__(self, _: object) -> None:
        with self.trace._lock:
            if self.trace._host.pop(self.key, None) is not None:
                self.trace.host_bytes -= self.nbytes
