"""Telling a trace what runs: modules, optimizers, and which tensors are parameters.

Uses PyTorch's global hooks, so that any training loop is seen as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.trace.tag(parameters, "parameters")
        self.trace.tag((p.grad for p in parameters if p.grad is not None), "gradients")
        self.trace.in_optimizer = True

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.trace.in_optimizer = False
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else ()
            self.trace.tag((v for v in values if isinstance(v, torch.Tensor)), "optimizer_states")


def belongings(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a model's parameters and buffers, and what its quantised weights keep beside them."""
    for parameter in root.parameters():
        yield parameter
        yield from _attached(getattr(parameter, "quant_state", None))
        yield from _attached(parameter)
    yield from root.buffers()


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
