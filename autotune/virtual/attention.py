"""Which attention kernel the card would choose for ``scaled_dot_product_attention``.

PyTorch chooses by a table compiled for each device; an unknown one gets plain math, whose memory
grows with the square of the length. The rules below are those of CUDA (source:
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and ../attention.cpp of PyTorch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.virtual.cards import FLASH_CAPABILITY
from autotune.virtual.state import current

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
FLASH_MAX_HEAD = 256
EFFICIENT_CAPABILITY = (5, 0)
MASK_ALIGNMENT = 8
"""Elements that the memory-efficient kernel wants a mask's rows aligned to (mem_eff_alignment)."""


def choose(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, capability: Any
) -> str:
    """Return ``flash``, ``efficient`` or ``math`` for shapes (B, H, L, D)."""
    if query.dim() != 4:
        return "math"
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
        # check_batch_size_and_num_heads_dense<false>: fewer key than query heads are refused.
        and key.shape[-3] == query.shape[-3]
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
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if session is not None and session.host_kernels:
        return _on_host(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
    kernel = choose(query, key, attn_mask, capability=capability)
    if kernel == "math":
        return _math(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
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
    bias = _additive(attn_mask, query.dtype)
    if bias is not None:
        bias = _aligned(bias).expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what is added to the scores for a boolean mask (convert_boolean_attn_mask_)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    lowest = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype, device=mask.device), lowest)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Return the bias with rows that start at multiples of 8 elements (preprocess_mask)."""
    strides = bias.stride()
    if strides[-1] == 1 and not any(stride % MASK_ALIGNMENT for stride in strides[:-1]):
        return bias
    length = bias.shape[-1]
    padding = MASK_ALIGNMENT - length % MASK_ALIGNMENT
    return torch.nn.functional.pad(bias, (0, padding))[..., :length]


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    return aten._scaled_dot_product_attention_math.default(
        query,
        key,
        value,
        _additive(mask, query.dtype),
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]


def _on_host(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attend as PyTorch's CPU kernels would, by its own choice for such tensors on the CPU."""

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return host.requires_grad_(tensor.requires_grad)

    choice = torch._fused_sdp_choice(
        stand_in(query),
        stand_in(key),
        stand_in(value),
        None if mask is None else stand_in(mask),
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if choice != torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        return _math(
            query,
            key,
            value,
            mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        query,
        key,
        value,
        dropout_p,
        is_causal,
        attn_mask=_additive(mask, query.dtype),
        scale=scale,
    )[0]


def register(library: Any) -> None:
    """Register the choice for the device, above and below autograd."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", scaled_dot_product_attention, key)
