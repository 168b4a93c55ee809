"""Host memory for copies of the device's tensors: address space, not pages.

What is offloaded to the host holds no data either, and may be more than this machine has. A
private anonymous mapping costs nothing until it is written to, and reads as zeros.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch

SMALL_BYTES = 1 << 16
"""Up to here, tensors lie in ordinary memory."""

# mmap(2) on Linux; Python names it from 3.13 on. Without it the kernel refuses, in its usual
# mode, a mapping that is larger than what it could ever back with pages.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the host whose pages exist once they are written to.

    Args:
        shape: Of the tensor.
        strides: In elements, without gaps, as ``torch.empty_like`` chooses them.
        dtype: Of the tensor.
    """
    numel = 1
    for size in shape:
        numel *= size
    nbytes = numel * dtype.itemsize
    if nbytes <= SMALL_BYTES or not sys.platform.startswith("linux"):
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    flat = torch.frombuffer(pages, dtype=dtype, count=numel)
    return flat.as_strided(tuple(shape), tuple(strides))
