"""bitsandbytes on the pretend accelerator: what its CUDA kernels allocate, one level down.

Most of its operators have fake kernels and arrive in :mod:`autotune.virtual.kernels` like any
other. Here are those whose CUDA side calls further operators, whose results depend on data, or
whose memory is not the device's (paged optimizer states). Read in bitsandbytes 0.50,
``backends/cuda/ops.py`` and ``functional.py``.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable
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
        outliers = torch.empty(0, dtype=torch.int64, device=a.device)
    stats = torch.empty(a.numel() // a.shape[-1], dtype=torch.float32, device=a.device)
    rows = torch.empty(a.shape, dtype=torch.int8, device=a.device)
    return rows, stats, outliers


def int8_linear_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply int8 (..., K) by (N, K) into int32 (..., N)."""
    session = current()
    if session is not None:
        session.charge_matmul(2.0 * a.numel() * b.shape[0], a.numel() + b.numel(), torch.int8)
    return torch.empty((*a.shape[:-1], b.shape[0]), dtype=torch.int32, device=a.device)


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
    result = torch.empty_like(product, dtype=torch.float16)
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
    return result, torch.empty(0, dtype=a.dtype, device=a.device)


SPECIAL: dict[str, Callable[..., Any]] = {
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
    tensor.is_paged = True
    tensor.page_deviceid = 0
    return tensor


def _no_prefetch(*args: Any, **kwargs: Any) -> None:
    session = current()
    if session is not None and args:
        session.charge_link(args[0].numel() * args[0].element_size())


def _quantise_int8(self: Any, device: torch.device) -> Any:
    """Quantise a weight of the host on the device, as another parameter."""
    weight = self.data.contiguous().to(device=device, dtype=torch.float16)
    rows, stats, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(weight)
    return type(self)(rows, requires_grad=self.requires_grad, CB=rows, SCB=stats)


def _settings(parameter: Any) -> dict[str, Any]:
    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "module")
    return {
        "requires_grad": parameter.requires_grad,
        **{name: getattr(parameter, name) for name in names},
    }


def _moved(self: Any, device: torch.device) -> Any:
    """Return a 4-bit weight that is yet to be quantised, on the device, as another parameter."""
    return type(self)(self.data.contiguous().to(device), **_settings(self))


def _deepcopy_4bit(self: Any, memo: dict[int, Any]) -> Any:
    """Copy a 4-bit weight without giving a parameter of the host data of the device."""
    return type(self)(
        copy.deepcopy(self.data, memo),
        quant_state=copy.deepcopy(self.quant_state),
        bnb_quantized=self.bnb_quantized,
        **_settings(self),
    )


def _patch_parameters(stack: contextlib.ExitStack) -> None:
    """Make new parameters where bitsandbytes assigns ``data`` across devices.

    PyTorch allows that between the dense devices that it knows by name only
    (TensorImpl::has_compatible_shallow_copy_type).
    """
    from bitsandbytes.nn import Int8Params, Params4bit

    usual_int8, usual_4bit = Int8Params._quantize, Params4bit._quantize

    def int8(self: Any, device: Any) -> Any:
        place = torch.device(device)
        if place.type != DEVICE_TYPE or self.has_fp16_weights:
            return usual_int8(self, device)
        return _quantise_int8(self, place)

    def four_bit(self: Any, device: Any) -> Any:
        place = torch.device(device)
        if place.type == DEVICE_TYPE and self.data.device.type != DEVICE_TYPE:
            self = _moved(self, place)
        return usual_4bit(self, device)

    stack.enter_context(mock.patch.object(Int8Params, "_quantize", int8))
    stack.enter_context(mock.patch.object(Params4bit, "_quantize", four_bit))
    stack.enter_context(mock.patch.object(Params4bit, "__deepcopy__", _deepcopy_4bit))


def install(stack: contextlib.ExitStack) -> None:
    """Register bitsandbytes' operators, if it is installed, and patch what asks the driver."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    import bitsandbytes.functional as functional

    kernels.register_package("bitsandbytes", SPECIAL)
    # Managed memory comes from the CUDA driver through ctypes, whatever the device type.
    stack.enter_context(mock.patch.object(functional, "get_paged", get_paged))
    stack.enter_context(mock.patch.object(functional, "prefetch_tensor", _no_prefetch))
    stack.enter_context(mock.patch.object(functional, "fill", return_value=None))
    _patch_parameters(stack)
    # It knows its devices by name.
    names = getattr(__import__("bitsandbytes"), "supported_torch_devices", None)
    if isinstance(names, set) and DEVICE_TYPE not in names:
        names.add(DEVICE_TYPE)
        stack.callback(names.discard, DEVICE_TYPE)
