"""Layers whose operators PyTorch's meta kernels do not describe as a card runs them."""

from __future__ import annotations

from typing import Any

import torch

from autotune.virtual import values
from autotune.virtual.errors import NoSuchRow, NotVirtual
from autotune.virtual.kernels import generic, new
from autotune.virtual.state import current

aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

_GRU_WORKSPACE = 5
"""Source: GRU_WORKSPACE_MULTIPLIER in PyTorch's aten/src/ATen/native/cuda/RNN.cu."""


def _is_last(*tensors: Any) -> bool:
    """Whether cuDNN would choose channels_last: one of its inputs has it, and no plain layout."""
    for tensor in tensors:
        layout = _LAST.get(tensor.dim())
        if layout is None:
            return False
        if tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            return True
    return False


def _laid_out(tensor: Any) -> Any:
    """Change a fresh tensor's strides to channels_last; the bytes are the same."""
    layout = _LAST.get(tensor.dim()) if tensor is not None else None
    if layout is None:
        return tensor
    strides = torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
    aten.set_.source_Storage_storage_offset.redispatch(
        _CPU, tensor, tensor.untyped_storage(), 0, tensor.shape, strides
    )
    return tensor


def convolution(tensor: Any, weight: Any, *args: Any) -> Any:
    """Convolve: PyTorch asks other devices than its own under this name."""
    found = generic(aten.convolution.default, tensor, weight, *args)
    return _laid_out(found) if _is_last(tensor, weight) else found


def convolution_backward(grad: Any, tensor: Any, weight: Any, *args: Any) -> Any:
    """Return the gradients of a convolution's input, weight and bias."""
    bias = [weight.shape[1] * args[-2] if args[3] else weight.shape[0]]
    found = generic(aten.convolution_backward.default, grad, tensor, weight, bias, *args)
    if not _is_last(tensor, weight):
        return found
    return _laid_out(found[0]), _laid_out(found[1]), found[2]


def gru_cell(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> Any:
    """Return a GRU's next state (B, H) and its workspace, from gates (B, 3 H)."""
    batch, hidden = hx.shape
    state = new((batch, hidden), hx.dtype, "_thnn_fused_gru_cell")
    workspace = new((batch, _GRU_WORKSPACE * hidden), hx.dtype, "_thnn_fused_gru_cell")
    _charge((input_gates, hidden_gates, hx, state, workspace))
    return state, workspace


def gru_cell_backward(grad_hy: Any, workspace: Any, has_bias: bool) -> Any:
    """Return the gradients of gates (B, 3 H), state (B, H) and biases (3 H,)."""
    batch, hidden = grad_hy.shape
    name = "_thnn_fused_gru_cell_backward"
    gates = [new((batch, 3 * hidden), grad_hy.dtype, name) for _ in range(2)]
    state = new((batch, hidden), grad_hy.dtype, name)
    biases = [new((3 * hidden,), grad_hy.dtype, name) if has_bias else None for _ in range(2)]
    _charge((grad_hy, workspace, *gates, state))
    return (*gates, state, *biases)


def _charge(tensors: Any) -> None:
    session = current()
    if session is not None:
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        session.charge_move("gru", float(moved))


def embedding(weight: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    """Return rows of a table (V, D) for indices (B, L).

    Raises:
        NoSuchRow: If it is known that an index has no row.
    """
    known = values.value_of(indices)
    if known is not None and known.numel():
        least, most = (int(bound) for bound in known.aminmax())
        if least < 0 or most >= weight.shape[0]:
            raise NoSuchRow(least if least < 0 else most, weight.shape[0])
    return generic(aten.embedding.default, weight, indices, *args, **kwargs)


def multinomial(weights: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw from V weights (B, V): always the one in the middle, for what is drawn is known.

    Where tokens are generated, that is an ordinary one, which ends no text.
    """
    found = generic(aten.multinomial.default, weights, *args, **kwargs)
    middle = torch.full(found.shape, weights.shape[-1] // 2, dtype=found.dtype)
    values.know(found, middle)
    return found


def argmax(scores: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return where the largest of V values (B, V) is: in the middle, as :func:`multinomial` draws.

    Of any other shape the answer is not known. Where tokens are generated, it is the next one.
    """
    found = generic(aten.argmax.default, scores, dim, keepdim)
    if scores.ndim == 2 and dim in (1, -1) and scores.is_floating_point():
        values.know(found, torch.full(found.shape, scores.shape[-1] // 2, dtype=found.dtype))
    return found


def sparse_backward(*args: Any, **kwargs: Any) -> Any:
    """Refuse a gradient that holds the rows that were looked up alone."""
    raise NotVirtual("a sparse gradient", "how many rows it holds depends on the data")


_SPARSE = [item.name for item in aten._embedding_bag_backward.default._schema.arguments].index(
    "sparse"
)


def embedding_bag_backward(*args: Any) -> Any:
    """Return the dense gradient of a table's rows."""
    if args[_SPARSE]:
        return sparse_backward()
    return generic(aten._embedding_bag_backward.default, *args)


SPECIAL = {
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "embedding": embedding,
    "argmax": argmax,
    "multinomial": multinomial,
    "_embedding_bag_backward": embedding_bag_backward,
    "embedding_sparse_backward": sparse_backward,
}
