"""Automatic mixed precision on the pretend accelerator, by CUDA's lists and with its cast cache.

PyTorch compiles the casts for each device type it knows; a device made in Python has none. The
lists are those of aten/src/ATen/autocast_mode.h (PyTorch 2.13), restricted to operators with
a public dispatcher entry.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten

_LOWER = (
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "scaled_dot_product_attention",
)
_FP32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "cdist",
    "renorm",
    "logsumexp",
)
_FP32_OUT = (
    "prod",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
)

_cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
_KEY = "AutocastPrivateUse1"


def clear_cache() -> None:
    """Drop the cached casts of weights, as leaving the outermost autocast block does."""
    _cache.clear()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        if (
            not value.is_floating_point()
            or value.dtype in (dtype, torch.float64)
            or value.device.type in ("cpu", "meta")
        ):
            return value
        # cached_cast: only casts of float32 leaves that are trained are kept.
        keep = (
            dtype != torch.float32
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
            and value._base is None
            and torch.is_autocast_cache_enabled()
        )
        if not keep:
            return value.to(dtype)
        found = _cache.get(id(value))
        if found is None or found[0] is not value:
            found = _cache[id(value)] = (value, value.to(dtype))
        return found[1]
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _device_type() -> str:
    return str(torch._C._get_privateuse1_backend_name())


def _lower(op: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(_device_type())
    with _without_autocast():
        return op(
            *(_cast(a, dtype) for a in args), **{k: _cast(v, dtype) for k, v in kwargs.items()}
        )


def _fp32(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _without_autocast():
        return op(
            *(_cast(a, torch.float32) for a in args),
            **{k: _cast(v, torch.float32) for k, v in kwargs.items()},
        )


def _fp32_out(op: Any, *args: Any, **kwargs: Any) -> Any:
    first = args[0]
    with _without_autocast():
        if first.is_floating_point() and first.dtype != torch.float64 and not kwargs.get("dtype"):
            names = [argument.name for argument in op._schema.arguments]
            if "dtype" in names[len(args) :]:
                kwargs["dtype"] = torch.float32
        return op(*args, **kwargs)


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
    )


def register(library: Any, fallback: Any) -> None:
    """Register the casts on ``library`` (aten) and let all else through on ``fallback``."""
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    rules: tuple[tuple[tuple[str, ...], Callable[..., Any]], ...] = (
        (_LOWER, _lower),
        (_FP32, _fp32),
        (_FP32_OUT, _fp32_out),
    )
    for names, rule in rules:
        for name in names:
            base, _, overload = name.partition(".")
            packet = getattr(aten, base, None)
            op = getattr(packet, overload or "default", None)
            if op is not None:
                library.impl(name, partial(rule, op), _KEY)
