"""bitsandbytes on the pretend accelerator: what its CUDA kernels allocate, one level down.

Most of its operators have fake kernels and arrive in :mod:`autotune.virtual.kernels` like any
other. Here are those whose CUDA side calls further operators, whose results depend on data, or
whose memory is not the device's (paged optimizer states). Read in bitsandbytes 0.50,
``backends/cuda/ops.py`` and ``functional.py``.
"""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any
from unittest import mock

import torch

from autotune.virtual import kernels
from autotune.virtual.device import DEVICE_TYPE
from autotune.virtual.state import current

NESTED_BLOCK = 256
"""Block size of nested statistics; bitsandbytes accepts no other."""


def gemm_4bit(
    a: torch.Tensor,
    b: torch.Tensor,
    shape: Any,
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply (..., K) by a packed weight (N, K): dequantise, then a plain product.

    Its own kernel for few rows (at most 1,536, fewer on most cards) takes no memory beyond the
    result; training batches have more rows, so that way is not modelled.
    """
    operators = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        absmax = operators.dequantize_blockwise.default(
            absmax_8bit, absmax, absmax_code, NESTED_BLOCK, torch.float32
        )
        absmax = absmax + absmax_offset
    weight = operators.dequantize_4bit.default(b, absmax, blocksize, quant_type, shape, a.dtype)
    return torch.nn.functional.linear(a, weight, bias)


def int8_vectorwise_quant(a: torch.Tensor, threshold: float = 0.0) -> Any:
    """Quantise rows of (R, C) to int8; no column is taken for an outlier.

    Which columns hold outliers depends on the activations; a trained model has few (LLM.int8(),
    arXiv:2208.07339: about 0.1 % of the features), so that their copies are left out.
    """
    outliers = None
    if threshold > 0.0:
        _ = a.abs() >= threshold
        outliers = kernels.new((0,), torch.int64, "argwhere")
    stats = kernels.new((a.numel() // a.shape[-1],), torch.float32, "int8_vectorwise_quant")
    rows = kernels.new(tuple(a.shape), torch.int8, "int8_vectorwise_quant")
    return rows, stats, outliers


def int8_linear_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply int8 (..., K) by (N, K) into int32 (..., N)."""
    session = current()
    if session is not None:
        session.charge_matmul(2.0 * a.numel() * b.shape[0], a.numel() + b.numel(), torch.int8)
    return kernels.new((*a.shape[:-1], b.shape[0]), torch.int32, "int8_linear_matmul")


def int8_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply and scale: an int32 product, a float16 result, a cast where another is wanted."""
    product = int8_linear_matmul(a, b)
    result = kernels.new(tuple(product.shape), torch.float16, "int8_mm_dequant")
    if bias is not None and bias.dtype != torch.float16:
        result = result.add_(bias)
    return result.to(dtype or torch.float16)


def int8_mixed_scaled_mm(
    a: torch.Tensor,
    quantised: torch.Tensor,
    weight: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Any:
    """Multiply with no outliers: an int8 product in the activations' dtype."""
    result = int8_scaled_mm(quantised, weight, row_stats, col_stats, bias, a.dtype)
    return result, kernels.new((0,), a.dtype, "empty")


SPECIAL = {
    "gemm_4bit": gemm_4bit,
    "int8_vectorwise_quant": int8_vectorwise_quant,
    "int8_linear_matmul": int8_linear_matmul,
    "int8_scaled_mm": int8_scaled_mm,
    "int8_mixed_scaled_mm": int8_mixed_scaled_mm,
}


def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
    """Return a state that lives in managed memory: counted on the host, not on the device.

    While a step uses it, its pages are on the device too; how many depends on what is free there.
    """
    tensor = kernels.uncounted(shape, dtype)
    session = current()
    if session is not None:
        session.trace.hold_on_host(tensor.untyped_storage(), tensor.numel() * dtype.itemsize)
    tensor.is_paged = True  # type: ignore[attr-defined]
    tensor.page_deviceid = 0  # type: ignore[attr-defined]
    return tensor


def _no_prefetch(*args: Any, **kwargs: Any) -> None:
    session = current()
    if session is not None and args:
        session.charge_link(args[0].numel() * args[0].element_size())


def install(stack: contextlib.ExitStack) -> None:
    """Register bitsandbytes' operators, if it is installed, and patch what asks the driver."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    import bitsandbytes.functional as functional

    kernels.register_package("bitsandbytes", SPECIAL)
    # Managed memory comes from the CUDA driver through ctypes; there is no device type to register.
    stack.enter_context(mock.patch.object(functional, "get_paged", get_paged))
    stack.enter_context(mock.patch.object(functional, "prefetch_tensor", _no_prefetch))
    stack.enter_context(mock.patch.object(functional, "fill", lambda *args, **kwargs: None))
    # It knows its devices by name.
    names = getattr(__import__("bitsandbytes"), "supported_torch_devices", None)
    if isinstance(names, set) and DEVICE_TYPE not in names:
        names.add(DEVICE_TYPE)
        stack.callback(names.discard, DEVICE_TYPE)
