"""Blocks of memory and the pools of free ones, of :mod:`autotune.virtual.allocator`.

A pool with expandable segments has one segment, whose blocks are mapped or not. Docstrings name
the functions of ``c10/cuda/CUDACachingAllocator.cpp`` that do the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from autotune.virtual.allocator_settings import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)

NO_LIMIT = 1 << 62
_SPACE_PAGES = 1 << 22
"""Pages of address space of an expandable segment. PyTorch reserves 9/8 of the card's memory and
starts another segment when that is used up; this one is never used up."""


class Block:
    """A piece of a segment; ``prev`` and ``next`` are its neighbours in the same segment."""

    __slots__ = ("address", "allocated", "born", "mapped", "next", "prev", "requested", "size")

    def __init__(self, address: int, size: int, prev: Block | None, next_: Block | None) -> None:
        self.address = address
        self.size = size
        self.prev = prev
        self.next = next_
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.born = 0


class Pool:
    """The free blocks for small or for large requests (BlockPool).

    Attributes:
        free: ``(size, address, block)``, sorted; addresses differ, so blocks are not compared.
        unmapped: ``(address, block)`` of ranges of the expandable segment without memory, sorted.
        split_from: A block is split if at least this much would remain (should_split),
        split_below: and the request is smaller than this.
        page: What the expandable segment grows by; 0 if segments are fixed.
        searches: How often a free block was looked for, which is a block's age in collection.
    """

    __slots__ = (
        "free",
        "page",
        "searches",
        "small",
        "split_below",
        "split_from",
        "unmapped",
    )

    def __init__(self, small: bool, settings: AllocatorSettings) -> None:
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.small = small
        self.searches = 0
        self.page = 0
        if settings.expandable_segments:
            self.page = SMALL_SEGMENT_BYTES if small else settings.large_segment_size_bytes
            start = self.page * (1 if small else _SPACE_PAGES)  # the two must not overlap
            whole = Block(start, self.page * _SPACE_PAGES, None, None)
            whole.mapped = False
            self.unmapped.append((start, whole))
        fine = small or settings.expandable_segments
        self.split_from = MIN_BLOCK_BYTES if fine else SMALL_BYTES + 1
        self.split_below = NO_LIMIT if fine else settings.max_split_size_bytes or NO_LIMIT

    def add(self, block: Block) -> None:
        """Put a block among the free ones (insert_into_blocks)."""
        block.born = self.searches
        insort(self.free, (block.size, block.address, block))

    def drop(self, block: Block) -> None:
        """Take a block from the free ones."""
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def best(self, size: int) -> int:
        """Return the place in ``free`` of the best fit for ``size``, or past the end.

        A block that can grow counts as large as it can become, so that the end of an expandable
        segment is used last. The search stops at the first block that is not followed by a
        better one, as in get_free_block.
        """
        free = self.free
        index = bisect_left(free, (size,))
        if self.page:
            while index + 1 < len(free) and _reach(free[index + 1][2]) < _reach(free[index][2]):
                index += 1
        return index

    def room(self, size: int) -> Block:
        """Return the first of free neighbours with room for ``size``, mapped or not.

        This is find_expandable_block: the lowest address that will do.
        """
        for _, first in self.unmapped:
            if first.prev is not None and not first.prev.allocated:
                first = first.prev
            found = 0
            part: Block | None = first
            while found < size and part is not None and not part.allocated:
                found += part.size
                part = part.next
            if found >= size:
                return first
        raise AssertionError("the address space of an expandable segment is used up")

    def map(self, block: Block, size: int) -> None:
        """Back the first ``size`` bytes, whole pages, of an unmapped block (map_block)."""
        self._drop_unmapped(block)
        block.mapped = True
        if size < block.size:
            rest = Block(block.address + size, block.size - size, block, block.next)
            rest.mapped = False
            if block.next is not None:
                block.next.prev = rest
            block.next = rest
            block.size = size
            insort(self.unmapped, (rest.address, rest))
        self._merge(block)
        self.add(block)

    def unmap(self, block: Block) -> int:
        """Give up the whole pages inside a free block; return their bytes (unmap_block)."""
        begin = -(-block.address // self.page) * self.page
        end = (block.address + block.size) // self.page * self.page
        if begin >= end:
            return 0
        self.drop(block)
        if begin > block.address:
            head = Block(block.address, begin - block.address, block.prev, block)
            if block.prev is not None:
                block.prev.next = head
            block.prev = head
            self.add(head)
        if end < block.address + block.size:
            tail = Block(end, block.address + block.size - end, block, block.next)
            if block.next is not None:
                block.next.prev = tail
            block.next = tail
            self.add(tail)
        block.address, block.size, block.mapped = begin, end - begin, False
        self._merge(block)
        insort(self.unmapped, (block.address, block))
        return end - begin

    def _drop_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def _merge(self, block: Block) -> None:
        """Merge a block, which is in no list, with neighbours of its kind (try_merge_blocks)."""
        for other in (block.prev, block.next):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            if other.mapped:
                self.drop(other)
            else:
                self._drop_unmapped(other)
            block.size += other.size
            if other is block.prev:
                block.address = other.address
                block.prev = other.prev
                if other.prev is not None:
                    other.prev.next = block
            else:
                block.next = other.next
                if other.next is not None:
                    other.next.prev = block


def _reach(block: Block) -> int:
    """Return the size that a block can grow to."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
