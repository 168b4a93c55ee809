"""What the pretend accelerator cannot do, and how it runs out of memory."""

from __future__ import annotations

from autotune.units import GIB, KIB, MIB


class NotVirtual(NotImplementedError):  # noqa: N818 - it says what is the case, as NotImplemented
    """Something needs a real card: its code, its data, or its driver.

    Args:
        what: What was asked for, such as ``torch.compile``.
        reason: Why it can't be had without a card; ends the sentence.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} cannot run on a virtual accelerator: {reason}.")
        self.what = what
        self.reason = reason

    def __reduce__(self) -> tuple[type[NotVirtual], tuple[str, str]]:
        # Exceptions are rebuilt from their arguments, of which the base class keeps the message.
        return type(self), (self.what, self.reason)


class NotOnCard(ImportError, ValueError):  # noqa: N818 - it says what is the case
    """The card lacks what is asked for, or a package has no code for it: another card may do.

    Libraries expect an ``ImportError``; a ``ValueError`` is how this package refuses a candidate.
    """


class NoKernel(NotImplementedError):  # noqa: N818 - it says what the card lacks
    """PyTorch has no code for any card, though it has for the CPU: the candidate's fault."""


class NoSuchRow(IndexError, ValueError):  # noqa: N818 - it says what is the case
    """A table was asked for a row that it lacks, at which a card's kernel ends the process.

    Args:
        row: Which one was asked for.
        num_rows: How many the table has.
    """

    def __init__(self, row: int, num_rows: int) -> None:
        super().__init__(row, num_rows)
        self.row = row
        self.num_rows = num_rows

    def __str__(self) -> str:
        """Return what is the matter, and what it comes from."""
        return (
            f"index {self.row:,} is out of range of an embedding of {self.num_rows:,} rows: a"
            " sequence is longer than the positions that the model has learned, or a token is not"
            " in its vocabulary."
        )


REFUSALS = (NoKernel, NoSuchRow, NotOnCard, NotVirtual)
"""What ends a run whenever it is raised, and says all in its message."""


class OutOfMemory(Exception):  # noqa: N818 - named as PyTorch and the project's outcomes name it
    """A request that nothing could serve, after the cache was given back.

    Attributes:
        requested_bytes: As asked for by the run, not rounded.
        allocated_bytes: In blocks that are in use.
        reserved_bytes: In segments.
        limit_bytes: What the segments may not exceed.
        segment_bytes: What was asked of the driver.
        total_bytes: The card's memory, for the message; None if it is not known.
    """

    def __init__(
        self,
        requested_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        limit_bytes: int,
        segment_bytes: int,
        total_bytes: int | None = None,
    ) -> None:
        super().__init__(
            requested_bytes,
            allocated_bytes,
            reserved_bytes,
            limit_bytes,
            segment_bytes,
            total_bytes,
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes
        self.segment_bytes = segment_bytes
        self.total_bytes = total_bytes

    def __str__(self) -> str:
        """Return a message in the style of PyTorch's."""
        free = max(self.limit_bytes - self.reserved_bytes, 0)
        idle = self.reserved_bytes - self.allocated_bytes
        capacity = _size(self.limit_bytes)
        if self.total_bytes is not None:
            # PyTorch names the card's memory alone; what the context takes is part of the truth.
            capacity = f"{_size(self.total_bytes)}, of which PyTorch may reserve {capacity},"
        return (
            f"CUDA out of memory. Tried to allocate {_size(self.segment_bytes)}. "
            f"GPU 0 has a total capacity of {capacity} of which {_size(free)} is "
            f"free. Of the allocated memory {_size(self.allocated_bytes)} is allocated by PyTorch"
            f", and {_size(idle)} is reserved by PyTorch but unallocated."
        )


def _size(nbytes: int) -> str:
    """Return a size as PyTorch's format_size does."""
    for name, unit, most in (("KiB", KIB, MIB), ("MiB", MIB, GIB), ("GiB", GIB, 1 << 63)):
        if KIB < nbytes <= most:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
