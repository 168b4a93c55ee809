"""Making accelerate, transformers, TRL and bitsandbytes train on the pretend accelerator.

Everything here replaces a question that a library asks of a device type it knows by name. Each
patch is undone by :func:`placed`; each names why no option serves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

from autotune.virtual import autocast, device, flash, loss, quantised, scaler
from autotune.virtual.errors import NotOnCard, NotVirtual
from autotune.virtual.observe import observed
from autotune.virtual.session import Session

_LEFT_FREE_BYTES = int(1.2 * 2**30)


@contextlib.contextmanager
def placed(session: Session) -> Iterator[None]:
    """Let Trainers choose the pretend accelerator while the block runs."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE=device.DEVICE_TYPE)
        )
        _forget_device(stack)
        _allow_fp16(stack)
        # PyTorch keeps the cache of autocast's casts in C++, per device type that it knows;
        # leaving the outermost block is told to no one else.
        stack.enter_context(
            mock.patch.object(
                torch,
                "clear_autocast_cache",
                _both(torch.clear_autocast_cache, autocast.clear_cache),
            )
        )
        # Autograd's threads are started for the devices there are at the process's first backward
        # pass, which may be over. On the calling thread the order of the nodes is the same.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        # ``with torch.device(...)`` notes once which functions it applies to: the real ones.
        _device_constructors()
        # torch.empty(pin_memory=True) asks the accelerator for an allocator of pinned memory,
        # which a device made in Python can't offer. Pinned or not, the host's bytes are the same.
        stack.enter_context(mock.patch.object(torch, "empty", _unpinned(torch.empty)))
        stack.enter_context(
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *a, **k: tensor)
        )
        _refuse_compilers(stack)
        _patch_transformers(stack, session)
        quantised.install(stack)
        flash.install(stack, session)
        if session.has_triton:
            loss.install(stack, session, device.DEVICE_TYPE)
        stack.enter_context(observed(session.trace))
        session.until_end = stack
        yield


@contextlib.contextmanager
def without_initialisation() -> Iterator[None]:
    """Leave weights on the host as they happen to be while the block runs: nobody reads them.

    PEFT draws its matrices there, by the hundred million numbers, before it moves them to the
    device; its option against that (``low_cpu_mem_usage``) isn't one of TRL's. Not for loops of
    others (:func:`~autotune.virtual.api.accelerator`), who may keep what they make on the host.
    """
    with contextlib.ExitStack() as stack:
        for name in dir(torch.nn.init):
            usual = getattr(torch.nn.init, name)
            if name.endswith("_") and not name.startswith("_") and callable(usual):
                stack.enter_context(mock.patch.object(torch.nn.init, name, _not_on_host(usual)))
        yield


def _not_on_host(usual: Any) -> Any:
    @functools.wraps(usual)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.device.type == "cpu" else usual(tensor, *args, **kwargs)

    return initialise


def _forget_device(stack: contextlib.ExitStack) -> None:
    """Let accelerate ask for its device again, which it does once per process."""
    from accelerate import state

    for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
        stack.enter_context(mock.patch.dict(kind._shared_state, clear=True))


def _allow_fp16(stack: contextlib.ExitStack) -> None:
    """Let accelerate use float16 autocast, which it refuses on device types it has no name for.

    Its gradient scaler only refuses: it holds a few bytes, and whether it skips a step depends on
    the gradients' values.
    """
    from accelerate import Accelerator

    original = Accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
        if str(asked) != "fp16":
            original(self, *args, **kwargs)
            return
        original(self, *args, **{**kwargs, "mixed_precision": "no"})
        self.state._mixed_precision = "fp16"
        self.native_amp = True
        self.scaler = scaler.RefusingScaler()

    stack.enter_context(mock.patch.object(Accelerator, "__init__", init))


def _both(first: Any, second: Any) -> Any:
    def call() -> None:
        first()
        second()

    return call


def _unpinned(function: Any) -> Any:
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _refuse_compilers(stack: contextlib.ExitStack) -> None:
    """Raise where code would be generated for a card: the generator decides what it takes."""
    usual = torch.compile

    def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, torch.nn.Module) or isinstance(
            getattr(model, "__self__", None), torch.nn.Module
        ):
            raise NotVirtual("torch.compile", _GENERATED)
        if model is None:
            return lambda function: compile_(function, *args, **kwargs)
        compiled = usual(model, *args, **kwargs)
        name = getattr(model, "__qualname__", type(model).__name__)

        @functools.wraps(model)
        def call(*values: Any, **named: Any) -> Any:
            if any(_is_virtual(value) for value in (*values, *named.values())):
                raise NotVirtual(f"torch.compile of {name}", _GENERATED)
            return compiled(*values, **named)

        return call

    stack.enter_context(mock.patch.object(torch, "compile", compile_))
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found, unused-ignore]

    launch = JITFunction.run

    def run(kernel: Any, *values: Any, **named: Any) -> Any:
        if any(_is_virtual(value) for value in (*values, *named.values())):
            name = getattr(kernel, "__name__", "")
            raise NotVirtual(f"the Triton kernel {name}", "it reads and writes a card's memory")
        return launch(kernel, *values, **named)

    stack.enter_context(mock.patch.object(JITFunction, "run", run))


_GENERATED = "the code, and with it the memory, is generated for a real card"


def _is_virtual(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device.DEVICE_TYPE


def _patch_transformers(stack: contextlib.ExitStack, session: Session) -> None:
    import transformers.modeling_utils as loading
    import transformers.training_args as arguments

    # TrainingArguments, asked for bf16, refuses it unless a device type it knows by name has it,
    # and does not say which it asked.
    def has_bf16() -> bool:
        if not session.supports_bf16:
            raise NotOnCard(f"{session.name} does not support bfloat16")
        return True

    stack.enter_context(mock.patch.object(arguments, "is_torch_bf16_gpu_available", has_bf16))
    # The loader takes all of a model's bytes in one block first, on CUDA and XPU only; which
    # segments the weights lie in afterwards depends on it.
    original = loading.caching_allocator_warmup

    def warm_up(model: Any, device_map: Any, quantizer: Any) -> None:
        original(model, device_map, quantizer)
        devices = {
            name: place
            for name, place in device_map.items()
            if isinstance(place, torch.device) and place.type == device.DEVICE_TYPE
        }
        if devices:
            counts = loading.get_total_byte_count(model, devices, quantizer)
            for place, nbytes in counts.items():
                # The loader leaves 1.2 GiB free, so that a model that barely fits loads.
                most = max(session.total_bytes - _LEFT_FREE_BYTES, 0)
                torch.empty(min(int(nbytes), most), dtype=torch.uint8, device=place)

    stack.enter_context(mock.patch.object(loading, "caching_allocator_warmup", warm_up))
