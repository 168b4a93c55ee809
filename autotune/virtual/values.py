"""Small whole-number tensors whose values are known, although the device holds no data.

Token ids, position ids, masks and lengths decide shapes (``nonzero``, boolean indexing) and
branches (``if mask.all()``). They come from the host, where they are known; this module keeps a
copy on the host per storage and computes along. Everything else on the device has no values.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

MAX_ELEMENTS = 1 << 20
"""Larger tensors are not followed: computing them on the host would take longer than it tells."""

KNOWN_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)

_shadows: dict[int, tuple[Any, torch.Tensor]] = {}
_flags: dict[int, tuple[Any, float]] = {}


def know(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Note that the device's ``tensor`` holds ``value`` (on the host, same shape).

    Of a part of a storage that is not known as a whole, nothing is noted.
    """
    if value.dtype not in KNOWN_DTYPES or tensor.numel() > MAX_ELEMENTS:
        forget(tensor)
        return
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        _shadows.pop(storage._cdata, None)
        return
    flat = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    flat.copy_(value.detach())
    key = storage._cdata
    _shadows[key] = (weakref.ref(storage, partial(_drop, key)), flat)


def _drop(key: int, _: object) -> None:
    _shadows.pop(key, None)
    _flags.pop(key, None)


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of the device's ``tensor``, on the host; None if they are not known.

    The result shares memory with what is known of the storage, so that writing to it counts.
    """
    if tensor.dtype not in KNOWN_DTYPES:
        return None
    found = _shadows.get(tensor.untyped_storage()._cdata)
    if found is None or found[1].dtype != tensor.dtype:
        return None
    flat = found[1]
    end = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if tensor.numel() and (end + 1) * flat.element_size() > flat.untyped_storage().nbytes():
        return None
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def bytes_of(storage: Any) -> torch.Tensor | None:
    """Return a copy of a storage's bytes, on the host; None if they are not known. Shape (N,)."""
    found = _shadows.get(storage._cdata)
    if found is None:
        return None
    return torch.empty(0, dtype=torch.uint8).set_(found[1].untyped_storage().clone())


def know_flag(tensor: torch.Tensor, value: float) -> None:
    """Note a floating point number that only says yes or no, until it is written to again."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    _flags[key] = (weakref.ref(storage, partial(_drop, key)), value)


def flag_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what :func:`know_flag` noted."""
    found = _flags.get(tensor.untyped_storage()._cdata) if _flags else None
    return None if found is None else torch.tensor(found[1], dtype=tensor.dtype)


def forget(tensor: torch.Tensor) -> None:
    """Drop what was known of the storage behind ``tensor``: something else was written to it."""
    if _shadows or _flags:
        _drop(tensor.untyped_storage()._cdata, None)


def forget_all(items: Any) -> None:
    """Drop what was known of a tensor, or of each in a list."""
    for item in items if isinstance(items, (list, tuple)) else (items,):
        if isinstance(item, torch.Tensor):
            forget(item)


def clear() -> None:
    """Drop everything that is known."""
    _shadows.clear()
    _flags.clear()
