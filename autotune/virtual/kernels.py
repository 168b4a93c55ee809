"""What the pretend accelerator does for each operator: shapes, no data.

Every operator that PyTorch implements for the CPU is registered for the device, so that it arrives
here as one operator, as on a card, and not decomposed. Its outputs' shapes come from PyTorch's own
meta kernels, once per distinct call; then the plan is reused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from autotune.virtual import scratch, values
from autotune.virtual.errors import NotVirtual
from autotune.virtual.state import current

aten = torch.ops.aten
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_new = torch._C._acc.create_empty_tensor
_Tensor = torch.Tensor


class _Constant(NamedTuple):
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
        moved_bytes: Bytes read and written.
        dtype: Of the first floating point argument; decides the card's rate.
        scratch_bytes: Memory the card's kernel takes while it runs.
        whole: Whether it only concerns whole-number tensors, whose values may be known.
        resized: Positions of ``out`` arguments that take another shape, and which.
    """

    name: str
    returns: tuple[Any, ...]
    single: bool
    flops: float
    moved_bytes: float
    dtype: torch.dtype | None
    scratch_bytes: tuple[int, ...]
    whole: bool
    resized: tuple[tuple[int, tuple[int, ...]], ...]


_plans: dict[Any, Plan] = {}


def clear_plans() -> None:
    """Forget all plans; another card's kernels may take other scratch memory."""
    _plans.clear()


def _key(values_: Iterable[Any]) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values_:
        if isinstance(value, _Tensor):
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_key(value))
        else:
            # 1, 1.0 and True are equal, but promote differently.
            parts.append(value.__class__)
            parts.append(value)
    return tuple(parts)


def generic(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` without data: return new tensors of the right shapes, counted by the trace."""
    key = (op, _key(args), _key(kwargs.values()), tuple(kwargs)) if kwargs else (op, _key(args))
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make_plan(op, args, kwargs)
    session = current()
    if session is not None:
        session.charge(plan)
    if plan.whole:
        known = _with_values(op, plan, args, kwargs)
        if known is not None:
            return known
    for position, shape in plan.resized:
        _argument(args, kwargs, position).resize_(shape)
    results = [
        _output(item, plan.name)
        if item.__class__ is tuple
        else _argument(args, kwargs, item)
        if item.__class__ is int
        else item.value
        for item in plan.returns
    ]
    if plan.single:
        return results[0]
    return tuple(results) if results else None


def _argument(args: Any, kwargs: Any, position: int) -> Any:
    return args[position] if position < len(args) else list(kwargs.values())[position - len(args)]


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_set = aten.set_.source_Storage_storage_offset.redispatch
_storage = torch._C._construct_storage_from_data_pointer
_FIRST_ADDRESS = 1 << 46
_next_address = itertools.count(_FIRST_ADDRESS, 1 << 12)
_place: list[torch.device] = []


def _output(item: tuple[Any, ...], name: str, *, counted: bool = True) -> torch.Tensor:
    shape, strides, dtype, nbytes = item
    # An address of its own, of which nothing is ever read: libraries tell storages apart by it.
    storage = _storage(next(_next_address), _device(), nbytes)
    tensor: torch.Tensor = _new((0,), dtype)
    _set(_CPU, tensor, storage, 0, shape, strides)
    session = current()
    if counted and session is not None and nbytes:
        session.trace.allocate(storage, nbytes, name)
    return tensor


def _device() -> torch.device:
    if not _place:
        _place.append(torch.device(torch._C._get_privateuse1_backend_name(), 0))
    return _place[0]


def new(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return a new contiguous tensor of the device."""
    return _output(_contiguous(shape, dtype), name)


def uncounted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor that takes no memory of the device."""
    return _output(_contiguous(shape, dtype), "", counted=False)


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    numel = math.prod(shape)
    return tuple(shape), tuple(reversed(strides)), dtype, numel * dtype.itemsize


def to_meta(value: Any) -> Any:
    """Return ``value`` with every tensor in it replaced by one without a device."""
    if isinstance(value, _Tensor):
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device="meta"
        )
    if isinstance(value, (list, tuple)):
        return [to_meta(item) for item in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value


def _typed(value: Any, kind: str) -> Any:
    """Return a number as the tensor that the operator takes; PyTorch unwraps it on the way here."""
    if kind == "Tensor" and isinstance(value, (bool, int, float)):
        return torch.tensor(value, device="meta")
    return value


def _tensors(items: Iterable[Any]) -> Iterable[torch.Tensor]:
    for item in items:
        if isinstance(item, _Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense tensor with these strides."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _make_plan(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
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
    inputs = list(_tensors((*args, *kwargs.values())))
    all_in_place = bool(written) and all(
        item.alias_info is not None and item.alias_info.is_write for item in schema.returns
    )
    found: Any = None
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    meta_args = [_typed(to_meta(a), kinds[name]) for a, name in zip(args, names, strict=False)]
    meta_kwargs = {name: _typed(to_meta(a), kinds[name]) for name, a in kwargs.items()}
    outs = {
        given[argument.name]: value
        for argument in schema.arguments
        if argument.kwarg_only and argument.alias_info is not None and argument.name in given
        for value in (kwargs[argument.name],)
        if isinstance(value, _Tensor)
    }
    if not all_in_place or outs:
        with torch.no_grad():
            found = _on_meta(op, meta_args, meta_kwargs)
    resized = tuple(
        (position, tuple(_argument(meta_args, meta_kwargs, position).shape))
        for position, value in outs.items()
        if _argument(meta_args, meta_kwargs, position).shape != value.shape
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
    floating = next((d for d in dtypes if d.is_floating_point), None)
    return Plan(
        name=op._schema.name.partition("::")[2],
        returns=tuple(returns),
        single=single,
        flops=_flops(op, meta_args, meta_kwargs, found),
        moved_bytes=float(sum(_nbytes(t) for t in (*inputs, *outputs))),
        dtype=floating,
        scratch_bytes=scratch.scratch_bytes(op, meta_args, meta_kwargs, outputs),
        whole=all(dtype in values.KNOWN_DTYPES for dtype in dtypes)
        and all(t.numel() <= values.MAX_ELEMENTS for t in (*inputs, *outputs)),
        resized=resized,
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
            described.append(_Constant(result))
        else:
            shape = tuple(result.shape)
            strides = tuple(result.stride())
            described.append((shape, strides, result.dtype, _nbytes(result)))
    return described


def _flops(op: Any, args: list[Any], kwargs: Mapping[str, Any], found: Any) -> float:
    formula = flop_registry.get(op._overloadpacket)
    if formula is None:
        return 0.0
    count = float(formula(*args, **kwargs, out_val=found))
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # The formulas count the whole square; causal kernels skip the half that is masked.
    return count / 2 if given.get("is_causal") is True else count


def _with_values(op: Any, plan: Plan, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Compute on the host too, if all that goes in is known; else what is written is unknown."""
    in_place = [item for item in plan.returns if item.__class__ is int]
    inputs = list(_tensors((*args, *kwargs.values())))
    known: list[Any] = []

    def on_host(value: Any) -> Any:
        if isinstance(value, _Tensor):
            found = value if value.device.type == "cpu" else values.value_of(value)
            known.append(found)
            return found
        if isinstance(value, (list, tuple)):
            return [on_host(item) for item in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    host_args = [on_host(value) for value in args]
    host_kwargs = {name: on_host(value) for name, value in kwargs.items()}
    overwrites = plan.name in ("fill_", "zero_") and bool(inputs)
    if overwrites and known[0] is None:
        blank = torch.empty_strided(inputs[0].shape, inputs[0].stride(), dtype=inputs[0].dtype)
        values.know(inputs[0], blank)
        host_args[0] = known[0] = values.value_of(inputs[0])
    if any(value is None for value in known) or (not inputs and not plan.returns):
        for position in in_place:
            values.forget(_argument(args, kwargs, position))
        return None
    with torch.no_grad():
        found = op(*host_args, **host_kwargs)
    if in_place and len(plan.returns) == 1:
        return _argument(args, kwargs, plan.returns[0])
    hosts = [found] if plan.single else list(found)
    results = []
    for item, host in zip(plan.returns, hosts, strict=True):
        if item.__class__ is int:
            results.append(_argument(args, kwargs, item))
            continue
        result = _output(item, plan.name)
        values.know(result, host)
        results.append(result)
    return results[0] if plan.single else tuple(results)


def view(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a view: PyTorch's meta kernel keeps storage and device."""
    return op.redispatch(_META, *args, **kwargs)


VIEWS = ("view", "as_strided", "_reshape_alias", "unfold", "view_as_real", "view_as_complex")


def register(library: Any, special: Mapping[str, Callable[..., Any]]) -> None:
    """Register every operator of PyTorch's CPU for the device, and ``special`` ones on top."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    for qualified in sorted({*names, *_FUSED}):
        if not qualified.startswith("aten::"):
            continue
        base, _, overload = qualified[len("aten::") :].partition(".")
        packet = getattr(aten, base, None)
        op = getattr(packet, overload or "default", None)
        if op is None or qualified[len("aten::") :] in special:
            continue
        kernel = view if base in VIEWS else generic
        library.impl(qualified[len("aten::") :], partial(kernel, op), "PrivateUse1")
    for name, function in special.items():
        library.impl(name, function, "PrivateUse1")


def register_package(namespace: str, special: Mapping[str, Callable[..., Any]]) -> None:
    """Register every operator of a library, such as ``bitsandbytes``, as one that has a kernel.

    Its own fallback would be taken for a kernel of any device and compute with data.
    """
    if namespace in _packages:
        return
    library = _packages[namespace] = torch.library.Library(namespace, "IMPL")
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        if space != namespace:
            continue
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base)
        op = getattr(packet, overload or "default")
        library.impl(rest, special.get(rest) or partial(generic, op), "PrivateUse1")


_packages: dict[str, Any] = {}


def _foreach_names() -> tuple[str, ...]:
    return tuple(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_foreach_") and not name.endswith("out")
    )


# CUDA has kernels of its own for these; the generic ones would loop over single tensors.
_FUSED = _foreach_names()


def install_fallback(library: Any) -> None:
    """Send operators that have no other kernel (bitsandbytes' and other libraries') here."""
    library.fallback(generic, "PrivateUse1")
