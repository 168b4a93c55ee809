"""TRL's loss on a card: Triton kernels, where other devices get the same in PyTorch operators.

TRL never makes the logits of a whole batch: it computes a tile, folds it into running sums and
reuses its memory. On CUDA the folding is a Triton kernel that takes no memory of its own; its
stand-in in PyTorch operators makes several float32 copies of the tile (4,096 tokens by 32,768
words, 512 MiB each). TRL also scores only the tokens with a label where it has Triton. Read in
TRL 1.16, ``trl/kernels/chunked_logprob.py`` and ``trl/trainer/utils.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from autotune.virtual.session import Session

_HALF = (torch.float16, torch.bfloat16)
_KERNELS = "trl.kernels.chunked_logprob"


class _Launcher:
    """Stands for a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run


def patch(
    stack: contextlib.ExitStack,
    device_type: str,
    *,
    fold: Callable[[Callable[..., None]], Callable[..., None]],
    accumulate: Callable[[Callable[..., None]], Callable[..., None]],
) -> None:
    """Let TRL take its Triton path on ``device_type``, if TRL has it.

    Args:
        stack: Undoes the patches.
        device_type: Such as ``virtual``.
        fold: Returns what runs in place of a kernel; is given its stand-in in operators.
        accumulate: Returns what adds a product of half-precision matrices to a float32 one.
    """
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec(_KERNELS) is None:
        return
    kernels = importlib.import_module(_KERNELS)
    users = (kernels, importlib.import_module("trl.trainer.utils"))
    usual = kernels._use_triton

    def use_triton(device: torch.device) -> bool:
        return device.type == device_type or bool(usual(device))

    for module in users:
        stack.enter_context(mock.patch.object(module, "_use_triton", use_triton))
    if not hasattr(kernels, "triton"):
        triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
        stack.enter_context(mock.patch.object(kernels, "triton", triton, create=True))
    for kernel, stand_in in (
        ("_forward_kernel", "_forward_tile"),
        ("_backward_kernel", "_backward_tile"),
    ):
        launcher = _Launcher(fold(getattr(kernels, stand_in)))
        stack.enter_context(mock.patch.object(kernels, kernel, launcher))
    changed = accumulate(kernels._addmm_fp32)
    stack.enter_context(mock.patch.object(kernels, "_addmm_fp32", changed))


def install(stack: contextlib.ExitStack, session: Session, device_type: str) -> None:
    """Count what TRL's kernels read, write and multiply on the pretend accelerator."""

    def fold(stand_in: Callable[..., None]) -> Callable[..., None]:
        def kernel(tile: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            writes = "HAS_LOGPROB_GRAD" in kwargs
            passes = 2.0 if writes else 1.0
            session.charge_move("chunked_logprob", passes * tile.numel() * tile.element_size())

        return kernel

    def accumulate(usual: Callable[..., None]) -> Callable[..., None]:
        def add(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
            if a.dtype not in _HALF:
                usual(total, a, b)
                return
            # torch.addmm(out_dtype=torch.float32, out=total): nothing is made.
            moved = a.numel() * a.element_size() + b.numel() * b.element_size()
            moved += 2 * total.numel() * total.element_size()
            session.charge_matmul(2.0 * a.numel() * b.shape[-1], moved, a.dtype)

        return add

    patch(stack, device_type, fold=fold, accumulate=accumulate)
