"""What the tests of the modelled allocator share."""

from __future__ import annotations

from autotune.virtual.allocator import AllocatorSettings, CachingAllocator

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def make(conf: str = "", limit: int | None = None, **options) -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.parse(conf), limit, **options)


def fill(allocator: CachingAllocator, *sizes: int, first: int = 1) -> list[int]:
    keys = list(range(first, first + len(sizes)))
    for key, size in zip(keys, sizes, strict=True):
        allocator.malloc(key, size)
    return keys


def layout(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    return [
        [(block.size_bytes, block.allocated) for block in segment.blocks]
        for segment in allocator.segments()
    ]
