"""FlashAttention 2 and 3 on the pretend accelerator: PyTorch's own flash operator in their place.

The packages are built for CUDA and can't be had on a laptop. Their operators keep what PyTorch's
keeps for the backward pass (query, key, value, output, log-sum-exp), so that one stands for the
other; the models call it through transformers' own code for these packages.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch

from autotune.virtual import values
from autotune.virtual.cards import FLASH_CAPABILITY
from autotune.virtual.errors import NotOnCard
from autotune.virtual.session import Session
from autotune.virtual.state import current

aten = torch.ops.aten
_HOPPER = 9


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attend over (B, L, H, D) in the padded layout."""
    session = current()
    if session is not None:
        session.attention_share = 1.0
    return aten._flash_attention_forward.default(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False, scale=softmax_scale
    )[0]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attend over (T, H, D) in the flattened layout, within documents (cu_seqlens (N + 1,))."""
    lengths = values.value_of(cu_seqlens_q)
    session = current()
    if session is not None and lengths is not None:
        # The sum of the documents' squares, over what the formula takes for them: N x longest.
        # The backward pass of the same batch has the same share, so it stays set.
        parts = lengths.diff().double()
        longest = float(parts.max()) or 1.0
        session.attention_share = float((parts**2).sum()) / (len(parts) * longest**2)
    return aten._flash_attention_forward.default(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        dropout_p,
        causal,
        False,
        scale=softmax_scale,
    )[0]


def install(stack: contextlib.ExitStack, session: Session) -> None:
    """Let transformers find FlashAttention on cards that have it."""
    import transformers.modeling_flash_attention_utils as flash
    from transformers import PreTrainedModel

    def check(model: Any, flash_attn_version: int, **kwargs: Any) -> None:
        capability = session.capability
        shown = ".".join(str(part) for part in capability)
        if capability < FLASH_CAPABILITY:
            raise NotOnCard(
                f"FlashAttention needs compute capability 8.0, and {session.name} has {shown}"
            )
        if flash_attn_version == 3 and capability[0] != _HOPPER:
            raise NotOnCard(
                f"FlashAttention 3 is built for compute capability 9.0; {session.name} has {shown}"
            )

    def functions(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input

    # Both ask for an installed package built for CUDA.
    stack.enter_context(mock.patch.object(PreTrainedModel, "_flash_attn_import_error", check))
    stack.enter_context(mock.patch.object(flash, "_lazy_imports", functions))
    # What was loaded stays loaded, in a variable of the module.
    stack.enter_context(mock.patch.object(flash, "_loaded_implementation", None))
