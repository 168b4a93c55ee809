"""PyTorch's CUDA caching allocator without a GPU, to replay what a run allocates and frees.

The mechanism is that of ``c10/cuda/CUDACachingAllocator.cpp`` as of PyTorch 2.13: two pools of
free blocks, each ordered by size and then address, best fit, splitting, merging of neighbours,
segments from the driver, and what is tried before it gives up. Docstrings name the functions
there.

One device, one stream, events in order: a freed block can be used at once. Not here: blocks that
wait for other streams (record_stream), how private pools (CUDA graphs, MemPool) divide what they
hold, a change of settings in mid-run, and where the driver puts segments. New segments lie above
all earlier ones, which matters only where two free blocks have the same size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from autotune.virtual.allocator_pool import NO_LIMIT, Block, Pool
from autotune.virtual.allocator_settings import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)
from autotune.virtual.errors import OutOfMemory

BESIDE_BYTES = SMALL_SEGMENT_BYTES
"""What pools of their own are rounded up to: the driver's pages of 2 MiB."""

__all__ = ["AllocatorSettings", "CachingAllocator", "OutOfMemory", "Segment", "SegmentBlock"]


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """A part of a segment."""

    address: int
    size_bytes: int
    requested_bytes: int
    allocated: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory from the driver; of an expandable segment, one unbroken mapped range.

    Attributes:
        address: Where it begins.
        total_bytes: Its size.
        small: Whether the pool of small blocks owns it.
        expandable: Whether it can grow.
        blocks: All of it, in order.
    """

    address: int
    total_bytes: int
    small: bool
    expandable: bool
    blocks: tuple[SegmentBlock, ...]


class CachingAllocator:
    """The allocator of one device.

    Args:
        settings: As in PYTORCH_ALLOC_CONF.
        limit_bytes: What the driver can give: more than this is never reserved. None is no end.
        allowed_bytes: What set_per_process_memory_fraction allows (allowed_memory_maximum); None
            where it was not called. Only with it does the garbage collection run. Pages are
            compared with it by the size of a segment, so expandable ones may pass it by a little.

    Attributes:
        allocated_bytes: In blocks in use, after rounding and splitting: memory_allocated().
        reserved_bytes: In segments, or in mapped pages: memory_reserved().
        requested_bytes: As asked for, of the blocks in use.
        peak_allocated_bytes: The most of it since :meth:`reset_peaks`.
        peak_reserved_bytes: The most of it since :meth:`reset_peaks`.
        num_alloc_retries: How often the whole cache was given back to serve a request.
        num_ooms: How often that did not help.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        limit_bytes: int | None = None,
        *,
        allowed_bytes: int | None = None,
    ) -> None:
        self.settings = settings
        self.limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.requested_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self._limit = NO_LIMIT if limit_bytes is None else limit_bytes
        self._allowed = NO_LIMIT if allowed_bytes is None else allowed_bytes
        self._collects = allowed_bytes is not None and settings.garbage_collection_threshold > 0
        self._max_split = settings.max_split_size_bytes or NO_LIMIT
        self._plain = not settings.expandable_segments and self._max_split == NO_LIMIT
        self._plain = self._plain and not self._collects
        self._small = Pool(True, settings)
        self._large = Pool(False, settings)
        self._live: dict[int, Block | None] = {}
        self._beside: dict[int, tuple[int, int]] = {}
        self._rounded: dict[int, int] = {}
        self._next_address = SMALL_SEGMENT_BYTES

    def malloc(self, key: int, nbytes: int) -> None:
        """Serve a request; nothing is allocated for 0 bytes.

        Args:
            key: What :meth:`free` will be told; any number that is not in use.
            nbytes: As asked for.

        Raises:
            OutOfMemory: If neither the cache nor the driver can serve it. All that was in use
                still is, but the cache has been given back.
        """
        if key in self._live:
            raise ValueError(f"block {key} is in use")
        if nbytes <= 0:
            self._live[key] = None
            return
        size = self._rounded.get(nbytes, 0)
        if not size:
            size = self._rounded[nbytes] = self.settings.round_size(nbytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        found: Block | None = None
        if self._plain:
            free = pool.free
            index = bisect_left(free, (size,))
            if index < len(free):
                found = free.pop(index)[2]
        else:
            found = self._search(pool, size)
        block = found or self._grow(pool, size, nbytes)
        rest = block.size - size
        if rest >= pool.split_from and size < pool.split_below:
            after = block.next
            spare = Block(block.address + size, rest, block, after)
            if after is not None:
                after.prev = spare
            block.next = spare
            block.size = size
            spare.born = pool.searches
            insort(pool.free, (rest, spare.address, spare))
        block.allocated = True
        block.requested = nbytes
        self._live[key] = block
        self.requested_bytes += nbytes
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes

    def free(self, key: int) -> None:
        """Take a block back and merge it with free neighbours (free_block, try_merge_blocks).

        Raises:
            KeyError: If no such block is in use.
        """
        if key in self._beside:
            self._give_beside(key)
            return
        block = self._live.pop(key)
        if block is None:
            return
        size = block.size
        self.allocated_bytes -= size
        self.requested_bytes -= block.requested
        block.allocated = False
        block.requested = 0
        # A block in use is larger than kSmallSize exactly if the pool for large requests owns it:
        # in the other one, all that was not asked for is split off.
        pool = self._small if size <= SMALL_BYTES else self._large
        free = pool.free
        before = block.prev
        if before is not None and not before.allocated and before.mapped:
            del free[bisect_left(free, (before.size, before.address))]
            block.address = before.address
            block.size += before.size
            block.prev = before.prev
            if before.prev is not None:
                before.prev.next = block
        after = block.next
        if after is not None and not after.allocated and after.mapped:
            del free[bisect_left(free, (after.size, after.address))]
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.prev = block
        block.born = pool.searches
        insort(free, (block.size, block.address, block))

    def take_beside(self, key: int, nbytes: int) -> None:
        """Take memory for a pool of its own, whose blocks are used for nothing else.

        It is in use as a whole until :meth:`free`, which gives it back to the driver at once.

        Args:
            key: What :meth:`free` will be told; any number that is not in use.
            nbytes: How much.

        Raises:
            OutOfMemory: If the driver has not so much once the cache has been given back.
        """
        size = -(-nbytes // BESIDE_BYTES) * BESIDE_BYTES
        if self.reserved_bytes + size > min(self._limit, self._allowed):
            self.empty_cache()
        if self.reserved_bytes + size > min(self._limit, self._allowed):
            self.num_ooms += 1
            limit = min(self._limit, self._allowed)
            raise OutOfMemory(nbytes, self.allocated_bytes, self.reserved_bytes, limit, size)
        self._beside[key] = (size, nbytes)
        self._reserve(size)
        self.allocated_bytes += size
        self.requested_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def _give_beside(self, key: int) -> None:
        size, nbytes = self._beside.pop(key)
        self.reserved_bytes -= size
        self.allocated_bytes -= size
        self.requested_bytes -= nbytes

    def empty_cache(self) -> None:
        """Give back all segments, or pages, that hold no block in use (release_cached_blocks)."""
        self._release(self._large)
        self._release(self._small)

    def reset_peaks(self) -> None:
        """Start new peaks from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    @property
    def fragmentation_ratio(self) -> float:
        """The share of the reserved bytes that no block uses now."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    @property
    def inactive_split_bytes(self) -> int:
        """Free bytes of fixed segments that are partly in use, which cannot be given back."""
        return sum(
            size
            for pool in (self._small, self._large)
            for size, _, block in pool.free
            if not pool.page and (block.prev or block.next)
        )

    def segments(self) -> list[Segment]:
        """Return all segments and their blocks by address, as snapshot() does."""
        found = self._segments_of(self._small) + self._segments_of(self._large)
        return sorted(found, key=lambda segment: segment.address)

    def _segments_of(self, pool: Pool) -> list[Segment]:
        blocks = [entry[2] for entry in pool.free]
        blocks += [b for b in self._live.values() if b and (b.size <= SMALL_BYTES) == pool.small]
        found = []
        for head in sorted(blocks, key=lambda block: block.address):
            if head.prev is not None and head.prev.mapped:
                continue
            parts: list[SegmentBlock] = []
            part: Block | None = head
            while part is not None and part.mapped:
                parts.append(SegmentBlock(part.address, part.size, part.requested, part.allocated))
                part = part.next
            total = sum(item.size_bytes for item in parts)
            found.append(Segment(head.address, total, pool.small, bool(pool.page), tuple(parts)))
        return found

    def _search(self, pool: Pool, size: int) -> Block | None:
        """Return the best free block, taken from its pool (get_free_block)."""
        if self._collects:
            pool.searches += 1
        index = pool.best(size)
        if index == len(pool.free):
            return None
        found = pool.free[index][0]
        if size < self._max_split <= found:
            return None
        if size >= self._max_split and found >= size + self.settings.max_non_split_rounding_bytes:
            return None
        return pool.free.pop(index)[2]

    def _grow(self, pool: Pool, size: int, nbytes: int) -> Block:
        """Get memory from the driver, giving back more and more of the cache (malloc)."""
        if self._collects:
            self._collect_garbage()
        block = self._take(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._take(pool, size)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._take(pool, size)
        if block is None:
            self.num_ooms += 1
            limit = min(self._limit, self._allowed)
            raise OutOfMemory(
                nbytes,
                self.allocated_bytes,
                self.reserved_bytes,
                limit,
                self.settings.segment_size(size),
            )
        return block

    def _take(self, pool: Pool, size: int) -> Block | None:
        """Return a block of new memory, or None (alloc_block)."""
        segment = self.settings.segment_size(size)
        if self.reserved_bytes + segment > self._allowed:
            return None
        if pool.page:
            return self._expand(pool, size)
        if self.reserved_bytes + segment > self._limit:
            return None
        address = self._next_address
        self._next_address += -(-segment // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        self._reserve(segment)
        return Block(address, segment, None, None)

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest address with room enough (try_allocate_expandable_block).

        What was mapped before the driver had no more stays mapped, and free.
        """
        block = pool.room(size)
        if not block.mapped and not self._map(pool, block, min(block.size, size)):
            return None
        while block.size < size:
            beyond = block.next
            assert beyond is not None
            if not self._map(pool, beyond, min(size - block.size, beyond.size)):
                return None
            block = beyond  # it has been merged with the block before it
        pool.drop(block)
        return block

    def _map(self, pool: Pool, block: Block, nbytes: int) -> bool:
        size = -(-nbytes // pool.page) * pool.page
        if self.reserved_bytes + size > self._limit:
            return False
        pool.map(block, size)
        self._reserve(size)
        return True

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _release(self, pool: Pool) -> None:
        """Give back what no block in use needs (release_blocks)."""
        for _, _, block in list(pool.free):
            if pool.page:
                self.reserved_bytes -= pool.unmap(block)
            elif block.prev is None and block.next is None:
                self._release_segment(pool, block)

    def _release_segment(self, pool: Pool, block: Block) -> None:
        pool.drop(block)
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Free one large enough block that is not to be split, or the largest of several.

        This is release_available_cached_blocks. It does nothing without max_split_size, or where
        segments are expandable.
        """
        if self._max_split == NO_LIMIT or pool.page:
            return False
        wanted = max(size, self._max_split)
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release_segment(pool, pool.free[index][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split:
            block = pool.free[-1][2]
            released += block.size
            self._release_segment(pool, block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Free whole segments not used for long (garbage_collect_cached_blocks)."""
        pool = self._large
        start = int(self.settings.garbage_collection_threshold * self._allowed)
        wanted = self.reserved_bytes - start
        if wanted <= 0 or pool.page:
            return
        whole = [block for _, _, block in pool.free if not (block.prev or block.next)]
        age = sum(pool.searches - block.born for block in whole)
        reclaimed, freed = 0, True
        while reclaimed < wanted and freed and whole:
            threshold = age / len(whole)
            old = [block for block in whole if pool.searches - block.born >= threshold]
            freed = bool(old)
            for block in old:
                reclaimed += block.size
                age -= pool.searches - block.born
                self._release_segment(pool, block)
            whole = [block for block in whole if pool.searches - block.born < threshold]
