"""Settings of PyTorch's CUDA caching allocator, read as PyTorch 2.13 reads them.

The constants have the names and values of ``c10/core/AllocatorConfig.h``. Versions before 2.10 or
so have a fixed ``kLargeBuffer`` of 20 MiB where this one has ``large_segment_size_mb``, with 20 as
its default, and older ones read ``>`` in a list of divisions one interval lower.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotune.errors import UnknownNameError, UsageError
from autotune.units import MIB

MIN_BLOCK_BYTES = 512
"""kMinBlockSize: every request is rounded up to this."""
SMALL_BYTES = MIB
"""kSmallSize: the largest request that the pool of small blocks serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""kSmallBuffer: a segment of the pool of small blocks."""
MIN_LARGE_BYTES = 10 * MIB
"""kMinLargeAlloc: a request from here on gets a segment of its own size."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""kLargeBuffer, later the default of large_segment_size: a segment for requests below that."""
ROUND_LARGE_BYTES = 2 * MIB
"""kRoundLarge: segments for one request are a multiple of this."""
NUM_INTERVALS = 16
"""kRoundUpPowerOfTwoIntervals: from 1 MiB, each twice the one before; the last has no end."""

_MODELLED = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
)
_IGNORED = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What PYTORCH_ALLOC_CONF can say that changes how much device memory is held.

    Attributes:
        expandable_segments: Whether segments grow by pages instead of being fixed.
        max_split_size_bytes: Blocks from this size on are not split; None is no such size.
        max_non_split_rounding_bytes: How much larger than asked for such a block may be.
        roundup_power2_divisions: Steps between powers of two that sizes are rounded up to: one
            number for each of 16 intervals, or nothing. 0 and 1 round to whole blocks only.
        garbage_collection_threshold: Share of the allowed memory above which unused blocks are
            freed before new memory is asked for; 0 is never.
        large_segment_size_bytes: A segment for requests below 10 MiB, and the page of expandable
            segments that hold blocks larger than 1 MiB.
        per_process_memory_fraction: As given; whoever knows the card's memory multiplies it.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    large_segment_size_bytes: int = LARGE_SEGMENT_BYTES
    per_process_memory_fraction: float = 1.0

    def __post_init__(self) -> None:
        if len(self.roundup_power2_divisions) not in (0, NUM_INTERVALS):
            raise ValueError(f"roundup_power2_divisions needs {NUM_INTERVALS} numbers, or none")

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Return the settings that a value of PYTORCH_ALLOC_CONF means.

        PyTorch itself lets some nonsense pass, such as ``30.5`` for 30; here it is refused.

        Raises:
            UsageError: If a key is unknown, a value is bad, or what it asks for is not modelled.
        """
        values = _entries(text)
        large = _whole(values, "large_segment_size_mb", MIN_LARGE_BYTES // MIB + 1)
        least = LARGE_SEGMENT_BYTES // MIB if large is None else large
        split = _whole(values, "max_split_size_mb", least)
        rounding = _whole(values, "max_non_split_rounding_mb", least)
        backend = values.get("backend", "native")
        if backend in ("cudaMallocAsync", "hipMallocAsync"):
            raise UsageError(
                f"the allocator backend {backend} is not supported.",
                hint="Only PyTorch's own, backend:native, is modelled.",
            )
        if backend != "native":
            raise _bad("backend", backend, "native")
        if _flag(values, "throw_on_cudamalloc_oom"):
            raise UsageError("throw_on_cudamalloc_oom:True is not supported.")
        return cls(
            expandable_segments=_flag(values, "expandable_segments"),
            max_split_size_bytes=None if split is None else split * MIB,
            max_non_split_rounding_bytes=(least if rounding is None else rounding) * MIB,
            roundup_power2_divisions=_divisions(values.get("roundup_power2_divisions")),
            garbage_collection_threshold=_share(values, "garbage_collection_threshold", 0.0),
            large_segment_size_bytes=least * MIB,
            per_process_memory_fraction=_share(values, "per_process_memory_fraction", 1.0),
        )

    def round_size(self, nbytes: int) -> int:
        """Return the size of the block that serves a request of ``nbytes`` (round_size)."""
        if nbytes >= MIN_BLOCK_BYTES and self.roundup_power2_divisions:
            exponent = nbytes.bit_length() - 1
            index = min(max(exponent - 20, 0), NUM_INTERVALS - 1)
            divisions = self.roundup_power2_divisions[index]
            if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
                # roundup_power2_next_division; divisions is itself a power of two.
                step = (1 << exponent) // divisions
                return -(-nbytes // step) * step
        return max(-(-nbytes // MIN_BLOCK_BYTES), 1) * MIN_BLOCK_BYTES

    def segment_size(self, block_bytes: int) -> int:
        """Return what is asked of the driver for a block that nothing cached can serve.

        This is get_allocation_size. With expandable segments it is only what is compared with the
        allowed memory; pages are mapped for the block itself.
        """
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_BYTES:
            return self.large_segment_size_bytes
        return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _entries(text: str) -> dict[str, str]:
    """Return the keys and values; white space counts nowhere, and the last of two stands."""
    compact = "".join(text.split())
    values: dict[str, str] = {}
    for entry in re.split(r",(?![^\[]*\])", compact.removesuffix(",")) if compact else []:
        key, colon, value = entry.partition(":")
        if key not in _MODELLED and key not in _IGNORED:
            raise UnknownNameError("allocator setting", key, (*_MODELLED, *_IGNORED))
        if not colon or not value:
            raise UsageError(f"the allocator setting {key} has no value.", hint="Write key:value.")
        if key in _IGNORED and not re.fullmatch(r"True|False|\d+", value):
            raise _bad(key, value, "True, False or a number")
        values[key] = value
    return values


def _bad(key: str, value: str, expected: str) -> UsageError:
    return UsageError(
        f"the allocator setting {key} cannot be {value!r}.", hint=f"Give {expected}."
    )


def _flag(values: dict[str, str], key: str) -> bool:
    value = values.get(key, "False")
    if value not in ("True", "False"):
        raise _bad(key, value, "True or False")
    return value == "True"


def _whole(values: dict[str, str], key: str, least: int) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]+", value) or int(value) < least:
        raise _bad(key, value, f"a whole number of MiB, {least} or more")
    return int(value)


def _share(values: dict[str, str], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    number = float(value) if re.fullmatch(r"[0-9]*\.?[0-9]+|[0-9]+\.", value) else -1.0
    # A fraction may be 1, which is the default; a threshold may be neither end.
    if not 0.0 < number <= 1.0 or (number == 1.0 and default == 0.0):
        raise _bad(key, value, "a share between 0 and 1")
    return number


def _divisions(value: str | None) -> tuple[int, ...]:
    """Return divisions for each interval, as parseRoundUpPower2Divisions fills them in.

    Intervals before the first that is named get its divisions, and ``>`` those after the last
    one. Intervals in between that are not named keep 0, as in PyTorch.
    """
    if value is None:
        return ()
    if not value.startswith("["):
        return (_power(value),) * NUM_INTERVALS
    found = [0] * NUM_INTERVALS
    first, last = True, 0
    if not value.endswith("]"):
        raise _bad("roundup_power2_divisions", value, "a list that ends with ]")
    for item in value[1:-1].removesuffix(",").split(",") if value != "[]" else []:
        bound, _, number = item.partition(":")
        divisions = 0 if number == "0" else _power(number)
        if bound == ">":
            found[last + 1 :] = [divisions] * (NUM_INTERVALS - last - 1)
            continue
        last = min(_power(bound).bit_length() - 1, NUM_INTERVALS - 1)
        if first:
            found[:last] = [divisions] * last
            first = False
        found[last] = divisions
    return tuple(found)


def _power(value: str) -> int:
    if not re.fullmatch(r"[0-9]+", value) or int(value).bit_count() != 1:
        raise _bad("roundup_power2_divisions", value, "powers of two: 4, or [256:4,>:8] by MiB")
    return int(value)
