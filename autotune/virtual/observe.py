"""Telling a trace what runs: modules, optimizers, and which tensors are parameters.

Uses PyTorch's global hooks, so that any training loop is seen as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from autotune.virtual.trace import Trace


class _Observer:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.names: dict[int, str] = {}
        self.stack: list[int] = []
        self.known: set[int] = set()

    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        trace = self.trace
        if not trace.module_depth:
            self._meet(module)
            trace.in_optimizer = False  # a step that raised tells no one that it is over
        trace.module_depth += 1
        trace.modules.append(self.names.get(id(module)) or type(module).__name__)

    def after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        trace = self.trace
        if trace.module_depth:
            trace.module_depth -= 1
            trace.modules.pop()

    def _meet(self, root: torch.nn.Module) -> None:
        if id(root) in self.known:
            return
        if torch._C._current_graph_task_id() != -1:
            return  # a part of the model that is computed again
        self.known.add(id(root))
        self.names.update({id(part): name for name, part in root.named_modules() if name})
        buffers = list(root.buffers())
        self.trace.tag(buffers, "buffers")
        self.trace.tag(belongings(root), "parameters")
        for part in root.modules():
            name = self.names.get(id(part)) or type(part).__name__
            self._name(belongings(part, recurse=False), name)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.trace.tag(parameters, "parameters")
        self.trace.tag((p.grad for p in parameters if p.grad is not None), "gradients")
        for parameter in parameters:
            if parameter.grad is not None:
                self._name([parameter.grad], self._holder(parameter))
        self.trace.in_optimizer = True

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.trace.in_optimizer = False
        for parameter, state in optimizer.state.items():
            values = state.values() if isinstance(state, dict) else ()
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            self.trace.tag(tensors, "optimizer_states")
            if isinstance(parameter, torch.Tensor):
                self._name(tensors, self._holder(parameter))

    def _name(self, tensors: Iterable[torch.Tensor], module: str) -> None:
        """Say whose these tensors are, where they were made outside of any module."""
        for tensor in tensors:
            number = self.trace.number_of(tensor)
            if number is not None and not self.trace.storages[number].module:
                self.trace.storages[number].module = module

    def _holder(self, parameter: torch.Tensor) -> str:
        number = self.trace.number_of(parameter)
        return "" if number is None else self.trace.storages[number].module


def belongings(root: torch.nn.Module, *, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Yield a model's parameters and buffers, and what its quantised weights keep beside them.

    Args:
        root: The model, or a part of it.
        recurse: Whether those of the modules in it are yielded as well.
    """
    for parameter in root.parameters(recurse):
        yield parameter
        yield from _attached(getattr(parameter, "quant_state", None))
        yield from _attached(parameter)
    yield from root.buffers(recurse)


def _attached(holder: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    """Yield the tensors among the attributes of ``holder``, such as statistics of quantisation."""
    for value in list(getattr(holder, "__dict__", {}).values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and hasattr(value, "__dict__"):
            yield from _attached(value, depth - 1)


@contextlib.contextmanager
def observed(trace: Trace) -> Iterator[None]:
    """Let ``trace`` see modules and optimizers while the block runs."""
    observer = _Observer(trace)
    handles = [
        modules.register_module_forward_pre_hook(observer.before_forward),
        modules.register_module_forward_hook(observer.after_forward, always_call=True),
        optimizers.register_optimizer_step_pre_hook(observer.before_step),
        optimizers.register_optimizer_step_post_hook(observer.after_step),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
