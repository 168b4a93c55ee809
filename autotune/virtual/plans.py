"""What one distinct call of an operator does, worked out once on tensors without a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from autotune.virtual import scratch, values
from autotune.virtual.errors import NotVirtual

_Tensor = torch.Tensor


class Constant(NamedTuple):
    """A result that is no tensor: a length, a seed, or nothing."""

    value: Any


class Plan(NamedTuple):
    """What one distinct call does.

    Attributes:
        name: The operator's.
        returns: Per result: an index into the arguments that it is (in-place), or the shape,
            strides, dtype and bytes of a new tensor, or a constant.
        single: Whether the operator returns one tensor, not a tuple.
        flops: Floating point operations, by PyTorch's own formulas.
        tiling: Arithmetic of the whole tiles that a matrix product computes, over the useful part.
        moved_bytes: Bytes read and written.
        dtype: Of the first floating point argument; decides the card's rate.
        scratch_bytes: Memory the card's kernel takes while it runs.
        whole: Whether it only concerns whole-number tensors, whose values may be known.
        resized: Positions of ``out`` arguments that take another shape, and which.
        forgets: Positions of arguments that are written, of which something may have been known
            that no longer holds.
    """

    name: str
    returns: tuple[Any, ...]
    single: bool
    flops: float
    tiling: float
    moved_bytes: float
    dtype: torch.dtype | None
    scratch_bytes: tuple[int, ...]
    whole: bool
    resized: tuple[tuple[int, tuple[int, ...]], ...]
    forgets: tuple[int, ...]


def to_meta(value: Any) -> Any:
    """Return ``value`` with every tensor in it replaced by one without a device."""
    if isinstance(value, _Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [to_meta(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value


def typed(value: Any, kind: str, device: str = "meta") -> Any:
    """Return a number as the tensor that the operator takes; PyTorch unwraps it on its way."""
    if kind == "Tensor" and isinstance(value, (bool, int, float)):
        return torch.tensor(value, device=device)
    return value


def tensors_in(items: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield the tensors among the items and in lists of them."""
    for item in items:
        if isinstance(item, _Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)


def dense_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense tensor with these strides."""
    if not tensor.numel():
        return 0
    last: int = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * int(tensor.element_size())


def make_plan(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
    """Return what ``op`` does with such arguments.

    Raises:
        NotVirtual: If PyTorch can't tell the shapes of its results without data.
        RuntimeError: If it would fail on a card, since tensors of the host are among its inputs.
    """
    schema = op._schema
    written = {
        alias: position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    names = [argument.name for argument in schema.arguments]
    given = {**{name: i for i, name in enumerate(names[: len(args)])}}
    given.update({name: len(args) + i for i, name in enumerate(kwargs)})
    inputs = list(tensors_in((*args, *kwargs.values())))
    _check_devices(op, inputs)
    all_in_place = bool(written) and all(
        item.alias_info is not None and item.alias_info.is_write for item in schema.returns
    )
    found: Any = None
    outs = {
        given[argument.name]: value
        for argument in schema.arguments
        if argument.kwarg_only and argument.alias_info is not None and argument.name in given
        for value in (kwargs[argument.name],)
        if isinstance(value, _Tensor)
    }
    name = schema.name.partition("::")[2]
    meta_args, meta_kwargs = list(args), dict(kwargs)
    if not all_in_place or outs or has_flops(op) or scratch.is_known(name):
        # What writes to its arguments alone, such as an optimizer's step, needs no shapes.
        kinds = {argument.name: str(argument.type) for argument in schema.arguments}
        meta_args = [typed(to_meta(a), kinds[n]) for a, n in zip(args, names, strict=False)]
        meta_kwargs = {n: typed(to_meta(a), kinds[n]) for n, a in kwargs.items()}
    if not all_in_place or outs:
        with torch.no_grad():
            found = _on_meta(op, meta_args, meta_kwargs)
    resized = tuple(
        (position, tuple(argument(meta_args, meta_kwargs, position).shape))
        for position, value in outs.items()
        if argument(meta_args, meta_kwargs, position).shape != value.shape
    )
    results = [found] if len(schema.returns) == 1 else list(found or ())
    single = len(schema.returns) == 1
    if single and isinstance(found, (list, tuple)):
        results, single = list(found), False
    returns: list[Any] = []
    outputs: list[torch.Tensor] = []
    for position, item in enumerate(schema.returns):
        if item.alias_info is not None and item.alias_info.is_write:
            alias = next(iter(item.alias_info.before_set))
            returns.append(given[names[written[alias]]])
        elif position < len(results) and isinstance(results[position], _Tensor):
            outputs.append(results[position])
            returns.append(None)
    if all_in_place:
        outputs = []
    else:
        returns = _describe(schema, results, returns)
        outputs = [item for item in results if isinstance(item, _Tensor)]
    dtypes = [t.dtype for t in (*inputs, *outputs)]
    whole = all(dtype in values.KNOWN_DTYPES for dtype in dtypes) and all(
        t.numel() <= values.MAX_ELEMENTS for t in (*inputs, *outputs)
    )
    floating = next((d for d in dtypes if d.is_floating_point), None)
    return Plan(
        name=name,
        returns=tuple(returns),
        single=single,
        tiling=_tiling(name, meta_args),
        flops=_flops(op, meta_args, meta_kwargs, found),
        moved_bytes=float(sum(dense_bytes(t) for t in (*inputs, *outputs))),
        dtype=floating,
        scratch_bytes=scratch.scratch_bytes(op, meta_args, meta_kwargs, outputs),
        whole=whole,
        resized=resized,
        forgets=() if whole else _forgets(schema, given, args, kwargs),
    )


def _forgets(
    schema: Any, given: Mapping[str, int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return where tensors are written that could have known values."""
    return tuple(
        given[item.name]
        for item in schema.arguments
        if item.alias_info is not None and item.alias_info.is_write and item.name in given
        for found in (argument(args, kwargs, given[item.name]),)
        if any(t.dtype in values.KNOWN_DTYPES or t.numel() == 1 for t in tensors_in((found,)))
    )


_FROM_HOST = frozenset({"index", "index_put_", "_index_put_impl_", "_unsafe_index"})
"""Operators that take indices of the host to the device themselves."""


def _check_devices(op: Any, inputs: list[torch.Tensor]) -> None:
    """Raise as PyTorch's kernels for cards do; single numbers may come from the host."""
    space, _, name = op._schema.name.partition("::")
    if space != "aten" or name in _FROM_HOST:
        return
    places = {str(tensor.device) for tensor in inputs if not tensor.is_cpu or tensor.dim()}
    if len(places) > 1:
        raise RuntimeError(
            "Expected all tensors on the same device, but found at least two devices, "
            f"{' and '.join(sorted(places))}! (in {name})"
        )


def _on_meta(op: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return op(*args, **kwargs)
    except NotImplementedError as error:
        raise NotVirtual(
            f"the operator {op}", "it has no meta kernel, which tells the shapes of its results"
        ) from error


def _describe(schema: Any, results: list[Any], returns: list[Any]) -> list[Any]:
    described: list[Any] = []
    for position, result in enumerate(results):
        known = returns[position] if position < len(returns) else None
        if known is not None:
            described.append(known)
        elif not isinstance(result, _Tensor):
            described.append(Constant(result))
        else:
            shape = tuple(result.shape)
            strides = tuple(result.stride())
            described.append((shape, strides, result.dtype, dense_bytes(result)))
    return described


TILE = 64
"""Rows and columns of the smallest output tile that cuBLAS' large kernels compute. Source: NVIDIA,
"Matrix Multiplication Background User's Guide", on tile quantization, from general knowledge."""

_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Operators that multiply (..., M, K) by (..., K, N), and the position of the first factor."""


_LENGTH_FIRST = frozenset({"aten::_flash_attention_forward", "aten::_flash_attention_backward"})
"""Operators that take (B, L, H, D), for which PyTorch's formulas expect (B, H, L, D)."""


def _tiling(name: str, args: list[Any]) -> float:
    """Return how much more than the useful products a matrix product's tiles compute.

    Thin ones, such as LoRA's of rank 16, compute mostly padding.
    """
    first = _PRODUCTS.get(name.partition(".")[0])
    if first is None:
        return 1.0
    rows, columns = args[first].shape[-2], args[first + 1].shape[-1]
    if not rows or not columns:
        return 1.0
    return float((-(-rows // TILE) * TILE / rows) * (-(-columns // TILE) * TILE / columns))


def has_flops(op: Any) -> bool:
    """Whether PyTorch counts the operator's arithmetic."""
    return op._overloadpacket in flop_registry


def _flops(op: Any, args: list[Any], kwargs: Mapping[str, Any], found: Any) -> float:
    formula = flop_registry.get(op._overloadpacket)
    if formula is None:
        return 0.0
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if op._schema.name in _LENGTH_FIRST and given["cum_seq_q"] is None:
        args = [a.transpose(1, 2) if isinstance(a, _Tensor) and a.dim() == 4 else a for a in args]
    count = float(formula(*args, **kwargs, out_val=found))
    # The formulas count the whole square; causal kernels skip the half that is masked.
    return count / 2 if given.get("is_causal") is True else count


def argument(args: Any, kwargs: Any, position: int) -> Any:
    """Return the argument at ``position``; named ones follow those by position."""
    return args[position] if position < len(args) else list(kwargs.values())[position - len(args)]


def call_key(values_: Iterable[Any]) -> tuple[Any, ...]:
    """Return what distinguishes a call: tensors by shape, strides and dtype, all else by value."""
    parts: list[Any] = []
    for value in values_:
        if isinstance(value, _Tensor):
            parts.append((value.shape, value.stride(), value.dtype, value.is_cpu))
        elif isinstance(value, (list, tuple)):
            parts.append(call_key(value))
        else:
            # 1, 1.0 and True are equal, but promote differently.
            parts.append(value.__class__)
            parts.append(value)
    return tuple(parts)
