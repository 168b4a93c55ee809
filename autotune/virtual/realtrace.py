"""The same trace from real tensors on the CPU, to hold the pretend accelerator against.

Every operator passes :class:`_Watcher`, which counts the storages that it made; a storage ends
when Python and C++ have let go of it. Only what differs between a CPU and a card by design is made
equal, each in its own named patch of :func:`_like_a_card`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import module as modules
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

from autotune.virtual import loss
from autotune.virtual.observe import belongings, observed
from autotune.virtual.trace import Trace

aten = torch.ops.aten
_FROM_NUMBERS = frozenset({aten.lift_fresh.default, aten.lift.default})


def _tensors(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


class _Watcher(TorchDispatchMode):  # type: ignore[misc]
    """Counts new storages of operators; views and in-place results have an argument's storage."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self._num_pauses = 0
        self.composites = _composites()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._num_pauses:
            return func(*args, **kwargs)
        composite = self.composites.get(func)
        if composite is not None:
            with self:
                return composite(*args, **kwargs)
        found = func(*args, **kwargs)
        if func in _FROM_NUMBERS:
            # torch.tensor(0.0) is made on the host, whatever the device.
            return found
        given = {t.untyped_storage()._cdata for t in _tensors((*args, *kwargs.values()))}
        results = found if isinstance(found, (list, tuple)) else (found,)
        for result in _tensors(results):
            self.meet(result, func, given)
        return found

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing while the block runs."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    def meet(self, tensor: torch.Tensor, func: Any, given: Iterable[int] = ()) -> None:
        """Count the storage behind ``tensor``, unless it is known or an argument's."""
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        number = self.trace.number_of(tensor)
        if number is not None:
            if self.trace.storages[number].nbytes == nbytes:
                return
            self.trace.end(tensor)  # resized: a card takes another block
        elif storage._cdata in given:
            return
        if nbytes:
            name = func if isinstance(func, str) else func._schema.name.partition("::")[2]
            self.trace.allocate(storage, nbytes, name)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made out of sight, such as by a loader's threads."""
        for tensor in tensors:
            self.meet(tensor, "adopted")

    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Adopt what a model holds when it first runs."""
        if not self.trace.module_depth and torch._C._current_graph_task_id() == -1:
            adopt(self.trace, module)


def _composites() -> dict[Any, Any]:
    """Return bitsandbytes' operators whose CUDA side calls further ones, and what it calls."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {}
    import bitsandbytes  # noqa: F401 - registers the operators

    from autotune.virtual import quantised

    space = torch.ops.bitsandbytes
    return {getattr(space, name).default: quantised.SPECIAL[name] for name in quantised.SPECIAL}


_watchers: dict[int, _Watcher] = {}


def adopt(trace: Trace, model: torch.nn.Module) -> None:
    """Count a model's parameters, buffers and statistics of quantisation that are not yet."""
    watcher = _watchers[id(trace)]
    watcher.adopt(belongings(model))


@contextlib.contextmanager
def traced_on_host(*, like_a_card: bool = True) -> Iterator[Trace]:
    """Trace real tensors on the CPU while the block runs; yield the trace.

    Bytes are those that each storage was asked for; what kernels take inside is not seen. What
    data loaders collate is the host's; a batch counts from when it is sent to the device.

    Args:
        like_a_card: Choose what PyTorch and bitsandbytes choose for a card where the CPU has
            another way: see :func:`_like_a_card`.
    """
    trace = Trace()
    watcher = _watchers[id(trace)] = _Watcher(trace)
    with contextlib.ExitStack() as stack:
        stack.callback(_watchers.pop, id(trace))
        stack.callback(trace.close)
        # Before observed(), whose hooks tag what is known.
        handle = modules.register_module_forward_pre_hook(watcher.before_forward)
        stack.callback(handle.remove)
        _leave_out_numbers(stack, watcher)
        _leave_out_loaders(stack, watcher)
        if like_a_card:
            _like_a_card(stack, watcher)
        stack.enter_context(observed(trace))
        stack.enter_context(watcher)
        yield trace


def _leave_out_numbers(stack: contextlib.ExitStack, watcher: _Watcher) -> None:
    """Count single numbers only where they are asked for on the device.

    Without a device they are the host's, where optimizers keep their step counts. Larger tensors
    made there are on their way to the device, for which a CPU needs no second copy.
    """
    # It notes the functions that a block's device applies to once; they must be the real ones.
    _device_constructors()
    zeros, numbers = torch.zeros, torch.tensor

    def make_zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        is_number = args == ((),) and kwargs.get("device") is None
        with watcher.pause() if is_number else contextlib.nullcontext():
            return zeros(*args, **kwargs)

    def make_numbers(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = numbers(*args, **kwargs)
        # Code that means the host, whatever the model's device, says "cpu"; code that means the
        # model's device hands that on. What kernels make inside is not seen.
        if isinstance(kwargs.get("device"), torch.device) and watcher in modes():
            watcher.adopt((made,))
        return made

    stack.enter_context(mock.patch.object(torch, "zeros", make_zeros))
    stack.enter_context(mock.patch.object(torch, "tensor", make_numbers))


def _leave_out_loaders(stack: contextlib.ExitStack, watcher: _Watcher) -> None:
    """Count a batch, and states of an optimizer, from when they are sent to the device."""
    from torch.utils.data import dataloader

    inner = dataloader._BaseDataLoaderIter.__next__

    def fetch(loader: Any) -> Any:
        with watcher.pause():
            return inner(loader)

    stack.enter_context(mock.patch.object(dataloader._BaseDataLoaderIter, "__next__", fetch))
    if importlib.util.find_spec("accelerate") is None:
        return
    import accelerate.data_loader as loading
    import accelerate.optimizer as states

    def send(values: Any, *args: Any, **kwargs: Any) -> Any:
        # On a card this is a copy, whatever the tensor.
        if isinstance(values, torch.Tensor):
            return values.clone()
        if isinstance(values, Mapping):
            return type(values)({key: send(item) for key, item in values.items()})  # type: ignore[call-arg]
        if isinstance(values, (list, tuple)):
            return type(values)(send(item) for item in values)
        return values

    stack.enter_context(mock.patch.object(loading, "send_to_device", send))
    stack.enter_context(mock.patch.object(states, "move_to_device", send))


def _like_a_card(stack: contextlib.ExitStack, watcher: _Watcher) -> None:
    """Make PyTorch and bitsandbytes go the way that they go on a card.

    - Optimizers and clipping work on lists of tensors (``foreach``), not on one after another.
    - Dropout is one operator that keeps a mask of a byte per element.
    - bitsandbytes multiplies 8-bit weights as integers, and does not dequantise them.
    - TRL's loss runs in Triton kernels, which take no memory; what stands for them is not counted.
    """
    from torch.optim import optimizer as optimizers
    from torch.utils import _foreach_utils

    def devices() -> list[str]:
        return ["cpu", "cuda", "xpu", "mtia", torch._C._get_privateuse1_backend_name()]

    for place in (_foreach_utils, optimizers):
        stack.enter_context(
            mock.patch.object(place, "_get_foreach_kernels_supported_devices", devices)
        )
    usual = torch.nn.functional.dropout

    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or inplace or not 0.0 < p < 1.0:
            return usual(input, p, training, inplace)
        return torch.native_dropout(input, p, training)[0]

    stack.enter_context(mock.patch.object(torch.nn.functional, "dropout", dropout))
    if importlib.util.find_spec("bitsandbytes") is not None:
        import bitsandbytes.autograd._functions as functions

        stack.enter_context(mock.patch.object(functions, "MatMul8bitFp", functions.MatMul8bitLt))

    def unseen(usual: Callable[..., None]) -> Callable[..., None]:
        def kernel(*args: Any, **kwargs: Any) -> None:
            with watcher.pause():
                usual(*args, **kwargs)

        return kernel

    loss.patch(stack, "cpu", fold=unseen, accumulate=unseen)
