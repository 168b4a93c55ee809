"""Operators that need more than shapes: copies between devices, results that depend on data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from autotune.virtual import hostmemory, layers, scaler, values
from autotune.virtual.kernels import generic, new
from autotune.virtual.state import current
from autotune.virtual.trace import Cost

aten = torch.ops.aten
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _is_virtual(tensor: torch.Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    """Copy between host and device, or on the device; only known values are really copied."""
    session = current()
    nbytes = target.numel() * target.element_size()
    if not _is_virtual(source):
        if session is not None:
            session.charge_link(nbytes)
        if source.dtype in values.KNOWN_DTYPES and target.dtype in values.KNOWN_DTYPES:
            _write(target, source)
        else:
            values.forget(target)
        return target
    known = values.value_of(source)
    if _is_virtual(target):
        if session is not None:
            session.charge_move("copy_", 2.0 * nbytes)
        if known is None:
            values.forget(target)
        else:
            _write(target, known)
        return target
    if session is not None:
        session.charge_link(nbytes)
        session.trace.hold_on_host(target.untyped_storage(), target.untyped_storage().nbytes())
    if known is not None:
        target.copy_(known)
    elif nbytes <= hostmemory.SMALL_BYTES:
        # Losses and norms are read on the host; any finite number will do.
        target.fill_(1)
    return target


def _write(target: torch.Tensor, value: torch.Tensor) -> None:
    held = values.value_of(target)
    if held is not None:
        held.copy_(value)
    elif target.untyped_storage()._cdata and target.numel() == _elements(target):
        values.know(target, value.expand(target.shape).to(target.dtype))


def _elements(tensor: torch.Tensor) -> int:
    """Return the elements that the strides span; more than there are, for a part of a tensor."""
    if not tensor.numel():
        return 0
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    return int(sum((size - 1) * stride for size, stride in spans) + 1 + tensor.storage_offset())


def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> Any:
    """Copy to a target of any size; PyTorch's C++ side calls it for small scalars."""
    return copy_from(source, target)


def to_copy(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Convert dtype or device."""
    device = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    non_blocking = bool(kwargs.pop("non_blocking", False))
    if device is None or device.type == tensor.device.type:
        return generic(aten._to_copy.default, tensor, **kwargs)
    dtype = kwargs.get("dtype") or tensor.dtype
    if device.type == "cpu":
        target = _on_host(tensor, dtype)
    else:
        target = torch.empty_like(tensor, dtype=dtype, device=device)
    copy_from(tensor, target, non_blocking)
    return target


def _on_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the host that a copy of ``tensor`` fits into."""
    kept = aten.empty_like.default(_meta(tensor))
    if values.value_of(tensor) is not None:
        return torch.empty_strided(kept.shape, kept.stride(), dtype=dtype)
    return hostmemory.empty(kept.shape, kept.stride(), dtype)


def empty_like(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Make a tensor of the same shape here or on the host, where no memory is pinned."""
    kwargs.pop("pin_memory", None)
    device = kwargs.get("device")
    if device is None or device.type == tensor.device.type:
        return generic(aten.empty_like.default, tensor, **kwargs)
    dtype = kwargs.get("dtype") or tensor.dtype
    if device.type == "cpu":
        return _on_host(tensor, dtype)
    kept = aten.empty_like.default(_meta(tensor))
    return torch.empty_strided(kept.shape, kept.stride(), dtype=dtype, device=device)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def clone(tensor: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    """Copy a tensor on the device."""
    return generic(aten.clone.default, tensor, memory_format=memory_format)


def local_scalar_dense(tensor: torch.Tensor) -> Any:
    """Return a value to the host: the known one, or 1, which stands for any finite number."""
    known = values.value_of(tensor)
    if known is None:
        known = values.flag_of(tensor)
    if known is not None:
        return known.item()
    session = current()
    if session is not None:
        session.charge_link(tensor.element_size())
    if tensor.dtype == torch.bool:
        # Unknown masks only decide short cuts ("is all of it kept?"); the long way is safe.
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


def nonzero(tensor: torch.Tensor) -> torch.Tensor:
    """Return the indices of non-zero elements (N, D): the known ones, or all of them."""
    known = values.value_of(tensor)
    count = int(torch.count_nonzero(known)) if known is not None else tensor.numel()
    result = new((count, tensor.dim()), torch.int64, "nonzero")
    if known is not None:
        values.know(result, known.nonzero())
    return result


def masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the elements where ``mask`` is true, in one dimension."""
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    known = values.value_of(mask)
    count = int(torch.count_nonzero(known.expand(shape))) if known is not None else shape.numel()
    result = new((count,), tensor.dtype, "masked_select")
    held = values.value_of(tensor)
    if held is not None and known is not None:
        values.know(result, held.masked_select(known))
    return result


def _expand_masks(tensor: torch.Tensor, indices: Any) -> list[Any]:
    """Replace each boolean index by the indices it selects, as CUDA's kernel does."""
    expanded: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            where = nonzero(index) if _is_virtual(index) else index.nonzero().to(tensor.device)
            expanded.extend(where.select(1, column) for column in range(index.dim()))
        else:
            expanded.append(index)
    return expanded


def index(tensor: torch.Tensor, indices: Any) -> torch.Tensor:
    """Index by tensors, boolean ones included."""
    return generic(aten.index.Tensor, tensor, _expand_masks(tensor, indices))


def index_put_(tensor: torch.Tensor, indices: Any, value: Any, accumulate: bool = False) -> Any:
    """Write at indices, boolean ones included."""
    return generic(
        aten._index_put_impl_.default, tensor, _expand_masks(tensor, indices), value, accumulate
    )


def index_put_impl_(
    tensor: torch.Tensor, indices: Any, value: Any, accumulate: bool = False, unsafe: bool = False
) -> Any:
    """Write at indices, boolean ones included."""
    return index_put_(tensor, indices, value, accumulate)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two tensors; those without known values are taken to differ, but not from itself."""
    if a.dtype == b.dtype and a.device == b.device and _same(a, b):
        return True
    left = values.value_of(a) if _is_virtual(a) else a
    right = values.value_of(b) if _is_virtual(b) else b
    return left is not None and right is not None and torch.equal(left, right)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same part of the same storage."""
    layouts = [
        (t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()) for t in (a, b)
    ]
    return layouts[0] == layouts[1]


def _against_itself(op: Any, answer: bool) -> Any:
    """Return a kernel that compares tensors: a number without a value is not a NaN."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = generic(op, a, b)
        if a.dtype.is_floating_point and _same(a, b):
            values.know(result, torch.tensor(answer).expand(result.shape))
        return result

    return kernel


def _against_infinity(op: Any, answer: bool) -> Any:
    """Return a kernel that compares with a number: one without a value is finite."""

    def kernel(a: torch.Tensor, b: Any) -> torch.Tensor:
        result = generic(op, a, b)
        if a.dtype.is_floating_point and isinstance(b, float) and math.isinf(b):
            values.know(result, torch.tensor(answer).expand(result.shape))
        return result

    return kernel


def add_(target: torch.Tensor, other: Any, **kwargs: Any) -> Any:
    """Add in place; where a trace asks, say what is added to which gradient."""
    session = current()
    if session is None or not session.trace.sums or not isinstance(other, torch.Tensor):
        return generic(aten.add_.Tensor, target, other, **kwargs)
    trace = session.trace
    number = trace.number_of(target)
    if number not in trace.sums:
        return generic(aten.add_.Tensor, target, other, **kwargs)
    trace.sums[number] = trace.number_of(other)
    before = replace(trace.costs.setdefault(trace.phase(), Cost()))
    result = generic(aten.add_.Tensor, target, other, **kwargs)
    trace.sums_cost.add(trace.costs[trace.phase()])
    trace.sums_cost.add(before, -1)
    return result


def isnan(tensor: torch.Tensor) -> torch.Tensor:
    """Return false for every number: those without a value are finite."""
    result = generic(aten.isnan.default, tensor)
    values.know(result, torch.tensor(False).expand(result.shape))
    return result


def unscale_(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Take a gradient scaler's factor off the gradients, which are finite.

    Raises:
        NoKernel: If a card has none for their dtype.
    """
    scaler.check_kernel(grads)
    generic(aten._amp_foreach_non_finite_check_and_unscale_.default, grads, found_inf, inv_scale)
    values.know_flag(found_inf, 0.0)


def _dependent(name: str, op: Any) -> Any:
    """Return a kernel for an operator whose result's length depends on data.

    With values known the host tells; without, the longest result is taken.
    """

    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        known = values.value_of(tensor)
        if known is None:
            known = torch.arange(tensor.numel(), dtype=torch.int64).reshape(tensor.shape)
            known = known.to(tensor.dtype)
        found = op(known, *args, **kwargs)
        single = isinstance(found, torch.Tensor)
        results = []
        for host in (found,) if single else found:
            result = new(tuple(host.shape), host.dtype, name)
            values.know(result, host)
            results.append(result)
        return results[0] if single else tuple(results)

    return kernel


def _counting(name: str, op: Any) -> Any:
    """Return a kernel for a range of numbers: whole ones are known."""

    def kernel(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        host = op(*args, device="meta", **kwargs)
        result = new(tuple(host.shape), host.dtype, name)
        if host.dtype in values.KNOWN_DTYPES and host.numel() <= values.MAX_ELEMENTS:
            values.know(result, op(*args, device="cpu", **kwargs))
        return result

    return kernel


def resize_(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Change a tensor's size; a larger one takes a new block."""
    if tuple(size) == tuple(tensor.shape):
        return tensor
    # A storage of the device has no bytes to grow, so the tensor takes a new one.
    tensor.data = new(tuple(size), tensor.dtype, "resize_")
    return tensor


def _place(
    tensor: torch.Tensor, storage: Any, offset: int, size: Any, stride: Any
) -> torch.Tensor:
    # The CPU's kernel only changes where the tensor looks.
    aten.set_.source_Storage_storage_offset.redispatch(_CPU, tensor, storage, offset, size, stride)
    return tensor


def set_storage(tensor: torch.Tensor, source: Any) -> torch.Tensor:
    """Let ``tensor`` be all of a storage, in one dimension."""
    return _place(tensor, source, 0, (source.nbytes() // tensor.element_size(),), (1,))


def set_storage_offset(
    tensor: torch.Tensor, source: Any, offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    """Let ``tensor`` be a part of a storage."""
    if not stride and size:
        stride = torch.empty(tuple(size), device="meta").stride()
    return _place(tensor, source, offset, size, stride)


def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Let ``tensor`` be what ``source`` is."""
    storage, offset = source.untyped_storage(), source.storage_offset()
    return _place(tensor, storage, offset, source.shape, source.stride())


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Do nothing: there is one stream, in order."""


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Return False: nothing of the device lies in host memory."""
    return False


SPECIAL = {
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_to_copy": to_copy,
    "clone": clone,
    "empty_like": empty_like,
    "_local_scalar_dense": local_scalar_dense,
    "nonzero": nonzero,
    "masked_select": masked_select,
    "index.Tensor": index,
    "index_put_": index_put_,
    "_index_put_impl_": index_put_impl_,
    "equal": equal,
    "eq.Tensor": _against_itself(aten.eq.Tensor, answer=True),
    "ne.Tensor": _against_itself(aten.ne.Tensor, answer=False),
    "eq.Scalar": _against_infinity(aten.eq.Scalar, answer=False),
    "ne.Scalar": _against_infinity(aten.ne.Scalar, answer=True),
    "isnan": isnan,
    "add_.Tensor": add_,
    "_amp_foreach_non_finite_check_and_unscale_": unscale_,
    "_unique2": _dependent("_unique2", aten._unique2.default),
    "unique_dim": _dependent("unique_dim", aten.unique_dim.default),
    "unique_consecutive": _dependent("unique_consecutive", aten.unique_consecutive.default),
    "repeat_interleave.Tensor": _dependent("repeat_interleave", aten.repeat_interleave.Tensor),
    "arange": _counting("arange", aten.arange.default),
    "arange.start": _counting("arange", aten.arange.start),
    "arange.start_step": _counting("arange", aten.arange.start_step),
    "bincount": _dependent("bincount", aten.bincount.default),
    "resize_": resize_,
    "set_.source_Storage": set_storage,
    "set_.source_Storage_storage_offset": set_storage_offset,
    "set_.source_Tensor": set_tensor,
    **layers.SPECIAL,
    "record_stream": record_stream,
    "is_pinned": is_pinned,
}
