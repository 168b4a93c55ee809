"""Which attention kernel the card would choose for ``scaled_dot_product_attention``.

PyTorch chooses by a table compiled for each device; an unknown one gets plain math, whose memory
grows with the square of the length. The rules below are those of CUDA (source:
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.virtual.state import current

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
FLASH_MAX_HEAD = 256
FLASH_CAPABILITY = (8, 0)
EFFICIENT_CAPABILITY = (5, 0)


def choose(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, capability: Any
) -> str:
    """Return ``flash``, ``efficient`` or ``math`` for shapes (B, H, L, D)."""
    if torch.backends.cuda.flash_sdp_enabled() and (
        mask is None
        and query.dtype in _HALF
        and query.shape[-1] <= FLASH_MAX_HEAD
        and capability >= FLASH_CAPABILITY
    ):
        return "flash"
    bf16_fits = query.dtype != torch.bfloat16 or capability >= FLASH_CAPABILITY
    if torch.backends.cuda.mem_efficient_sdp_enabled() and (
        capability >= EFFICIENT_CAPABILITY
        and bf16_fits
        and query.dtype in (*_HALF, torch.float32)
        and (mask is None or mask.dtype in (torch.bool, query.dtype))
    ):
        return "efficient"
    return "math"


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attend as the card's kernel would: (B, H, Lq, D), (B, Hk, Lk, D) -> (B, H, Lq, D)."""
    session = current()
    capability = session.capability if session is not None else FLASH_CAPABILITY
    kernel = choose(query, key, attn_mask, capability=capability)
    if kernel == "math":
        return aten._scaled_dot_product_attention_math.default(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, None,
            scale=scale, enable_gqa=enable_gqa,
        )[0]
    if kernel == "flash":
        size = query.shape[-1]
        if size % 8:
            pad = 8 - size % 8
            query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
            scale = scale if scale is not None else size**-0.5
        found = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return found[..., :size] if size % 8 else found
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            # The kernel adds a bias of the query's dtype; convert_boolean_attn_mask does this.
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(
                bias.logical_not(), float("-inf")
            )
        if bias.shape[-1] % 16:
            # pad_bias<16>: rows are aligned for the kernel.
            padding = 16 - bias.shape[-1] % 16
            bias = torch.nn.functional.pad(bias, (0, padding))[..., : attn_mask.shape[-1]]
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(
        t.requires_grad for t in (query, key, value)
    )
    return aten._scaled_dot_product_efficient_attention.default(  # type: ignore[no-any-return]
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


def register(library: Any) -> None:
    """Register the choice for the device, above and below autograd."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", scaled_dot_product_attention, key)
