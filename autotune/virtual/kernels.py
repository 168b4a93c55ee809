"""What the pretend accelerator does for each operator: shapes, no data.

Every operator that PyTorch implements for the CPU is registered for the device, so that it arrives
here as one operator, as on a card, and not decomposed. Its outputs' shapes come from PyTorch's own
meta kernels, once per distinct call; then the plan is reused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from autotune.virtual import values
from autotune.virtual.plans import Plan, argument, call_key, make_plan, tensors_in, typed
from autotune.virtual.session import Session
from autotune.virtual.state import current

aten = torch.ops.aten
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_new = torch._C._acc.create_empty_tensor
_Tensor = torch.Tensor


_plans: dict[Any, Plan] = {}


def clear_plans() -> None:
    """Forget all plans; another card's kernels may take other scratch memory."""
    _plans.clear()


def generic(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` without data: return new tensors of the right shapes, counted by the trace."""
    key = (
        (op, call_key(args), call_key(kwargs.values()), tuple(kwargs))
        if kwargs
        else (op, call_key(args))
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = make_plan(op, args, kwargs)
    session = current()
    phase = None if session is None else session.charge(plan)
    for position, shape in plan.resized:
        argument(args, kwargs, position).resize_(shape)
    for position in plan.forgets:
        values.forget_all(argument(args, kwargs, position))
    if plan.whole:
        known = _with_values(op, plan, args, kwargs)
        if known is not None:
            return known
    results = [
        _output(item, plan.name, session, phase)
        if item.__class__ is tuple
        else argument(args, kwargs, item)
        if item.__class__ is int
        else item.value
        for item in plan.returns
    ]
    if plan.scratch_bytes and session is not None:
        session.charge_scratch(plan)
    if plan.single:
        return results[0]
    return tuple(results) if results else None


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_set = aten.set_.source_Storage_storage_offset.redispatch
_storage = torch._C._construct_storage_from_data_pointer
_FIRST_ADDRESS = 1 << 46
_PAGE = 1 << 12
_address = [_FIRST_ADDRESS]
_place: list[torch.device] = []


def _output(
    item: tuple[Any, ...], name: str, session: Session | None, phase: str | None = None
) -> torch.Tensor:
    shape, strides, dtype, nbytes = item
    # Addresses of its own, of which nothing is ever read: libraries tell storages apart by them.
    address = _address[0]
    _address[0] = address + nbytes + _PAGE - nbytes % _PAGE
    storage = _storage(address, _place[0], nbytes)
    tensor: torch.Tensor = _new((0,), dtype)
    _set(_CPU, tensor, storage, 0, shape, strides)
    if session is not None and nbytes:
        session.trace.allocate(storage, nbytes, name, phase=phase)
    return tensor


def new(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return a new contiguous tensor of the device."""
    return _output(contiguous(shape, dtype), name, current())


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what :func:`like` makes another one of: shape, strides, dtype and bytes."""
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.numel() * tensor.element_size(),
    )


def like(form: tuple[Any, ...], name: str, phase: str) -> torch.Tensor:
    """Return a new tensor of the device, as the operator ``name`` made one in ``phase``."""
    return _output(form, name, current(), phase)


def uncounted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor that takes no memory of the device."""
    return _output(contiguous(shape, dtype), "", None)


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the form, as of :func:`form`, of a tensor whose elements lie in order."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    numel = math.prod(shape)
    return tuple(shape), tuple(reversed(strides)), dtype, numel * dtype.itemsize


def _with_values(op: Any, plan: Plan, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Compute on the host too, if all that goes in is known; else what is written is unknown."""
    in_place = [item for item in plan.returns if item.__class__ is int]
    inputs = list(tensors_in((*args, *kwargs.values())))
    known: list[Any] = []

    # All of these is written, so that it does not matter what they held.
    blank = [argument(args, kwargs, position) for position, _ in plan.resized]
    if plan.name in ("fill_", "zero_"):
        blank.append(args[0])
    for tensor in blank:
        if values.value_of(tensor) is None:
            values.know(tensor, torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))

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

    kinds = {argument.name: str(argument.type) for argument in op._schema.arguments}
    host_args = [
        typed(on_host(value), kind, "cpu")
        for value, kind in zip(args, kinds.values(), strict=False)
    ]
    host_kwargs = {
        name: typed(on_host(value), kinds[name], "cpu") for name, value in kwargs.items()
    }
    if any(value is None for value in known) or (not inputs and not plan.returns):
        for position in in_place:
            values.forget(argument(args, kwargs, position))
        return None
    with torch.no_grad(), _own_generator(op):
        found = op(*host_args, **host_kwargs)
    if plan.name in _BLANK:
        # Anything is right for what was never written, but the same in every run.
        found.zero_()
    if in_place and len(plan.returns) == 1:
        return argument(args, kwargs, plan.returns[0])
    hosts = [found] if plan.single else list(found)
    results = []
    for item, host in zip(plan.returns, hosts, strict=True):
        if item.__class__ is int:
            results.append(argument(args, kwargs, item))
            continue
        result = _output(item, plan.name, current())
        values.know(result, host)
        results.append(result)
    return results[0] if plan.single else tuple(results)


def _own_generator(op: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which numbers are drawn as by a card's generator: not the host's."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return torch.random.fork_rng(devices=[])  # type: ignore[no-any-return]
    return contextlib.nullcontext()


_BLANK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def view(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a view: PyTorch's meta kernel keeps storage and device."""
    return op.redispatch(_META, *args, **kwargs)


VIEWS = ("view", "as_strided", "_reshape_alias", "unfold", "view_as_real", "view_as_complex")


def register(library: Any, special: Mapping[str, Callable[..., Any]]) -> None:
    """Register every operator of PyTorch's CPU for the device, and ``special`` ones on top."""
    _place[:] = [torch.device(torch._C._get_privateuse1_backend_name(), 0)]
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
