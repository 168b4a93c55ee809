"""Memory that a card's kernels take while they run, beyond their outputs.

Only kernels whose scratch grows with the input are listed; each names its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_backward(args: list[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return FlashAttention-2's accumulators.

    ``dq_accum`` (B, H, Sq rounded to 128, D rounded to 32) and ``softmax_d`` (B, H, Sq rounded) in
    float32; with fewer key than query heads also expanded ``dk`` and ``dv``. Source: mha_bwd in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    rounded = _up(length, 128)
    accumulators = (
        batch * heads * rounded * _up(size, 32) * 4,
        batch * heads * rounded * 4,
    )
    if key.shape[1] == heads:
        return accumulators
    expanded = batch * key.shape[2] * heads * size * key.element_size()
    return (*accumulators, expanded, expanded)


def _embedding_backward(args: list[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the sorted indices and their origins, int64 each, that more than 3072 indices need.

    Source: embedding_dense_backward_cuda in aten/src/ATen/native/cuda/Embedding.cu.
    """
    count = args[1].numel()
    return (count * 8,) * 4 if count > 3072 else ()


_TABLE = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "embedding_dense_backward": _embedding_backward,
}


def is_known(name: str) -> bool:
    """Whether the operator's kernel takes memory beyond its results."""
    return name in _TABLE


def scratch_bytes(
    op: Any, args: list[Any], kwargs: Mapping[str, Any], outputs: list[torch.Tensor]
) -> tuple[int, ...]:
    """Return the bytes of each block that the card's kernel for ``op`` takes and gives back."""
    formula = _TABLE.get(op._schema.name.partition("::")[2])
    return formula(args, kwargs) if formula is not None else ()
