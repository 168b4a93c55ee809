"""A model's list of layers: found, given in part, and heard of when its layers begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.virtual.sections import NUM_INNER, Mark
from autotune.virtual.trace import Trace


class Marked(torch.nn.Module):  # type: ignore[misc]
    """A layer that tells when its forward pass is over and when its backward pass begins."""

    def __init__(self, layer: torch.nn.Module, marks: Marks) -> None:
        super().__init__()
        self.layer = layer
        self.marks = marks

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; its result is a tensor (B, L, D), or a tuple that begins with it."""
        self.marks.before_first()
        result = self.layer(*args, **kwargs)
        self.marks.after_forward()
        hidden = result if isinstance(result, torch.Tensor) else result[0]
        if hidden.requires_grad:
            # Called when its whole gradient is there: all later layers are done.
            hidden.register_hook(self.marks.before_backward)
        return result


class Layers(torch.nn.ModuleList):  # type: ignore[misc]
    """A list of layers that holds them all, and gives a few to those that go through it.

    Whoever asks the model for its modules, to name them, hook into them or find parameters, sees
    them all: such things are done once.

    Args:
        layers: All of them.
        few: Those to run, in order.
    """

    _few: Sequence[torch.nn.Module] = ()

    def __init__(self, layers: Sequence[torch.nn.Module], few: Sequence[torch.nn.Module]) -> None:
        super().__init__(layers)
        self._few = list(few)

    def __len__(self) -> int:
        return len(self._few)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._few)

    def __getitem__(self, index: Any) -> Any:
        return self._few[index]


class Marks:
    """The marks of one micro-batch.

    Attributes:
        forward: One before the first layer's forward pass, and one after each layer's.
        backward: One before each layer's backward pass, from the last layer to the first.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.forward: list[Mark] = []
        self.backward: list[Mark] = []

    def before_first(self) -> None:
        """Take a mark if none was taken."""
        if not self.forward:
            self.forward.append(self._mark())

    def after_forward(self) -> None:
        """Take a mark after a layer's forward pass."""
        self.forward.append(self._mark())

    def before_backward(self, grad: torch.Tensor) -> None:
        """Take a mark before a layer's backward pass."""
        self.backward.append(self._mark())

    def _mark(self) -> Mark:
        return take_mark(self._trace)


def take_mark(trace: Trace) -> Mark:
    """Return the state of ``trace`` now."""
    return Mark(
        len(trace.events),
        len(trace.storages),
        {phase: replace(cost) for phase, cost in trace.costs.items()},
        replace(trace.sums_cost),
        trace.host_bytes,
    )


def find_layers(model: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
    """Return where a model keeps its layers: the module and the name in it; None if unclear."""
    found: list[tuple[torch.nn.Module, str]] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for name, child in module.named_children():
            if not isinstance(child, torch.nn.ModuleList):
                waiting.append(child)
            elif len(child) > NUM_INNER and len({type(item) for item in child}) == 1:
                found.append((module, name))
    return found[0] if len(found) == 1 else None


def traits(layer: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Return what a layer is made of: modules, plain attributes, parameters, buffers and hooks."""
    found: list[tuple[Any, ...]] = []
    for name, module in layer.named_modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        found.append((name, type(module), hooks))
        found += [item for item in vars(module).items() if isinstance(item[1], _PLAIN)]
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                found.append((key, value.shape, value.dtype, value.requires_grad))
    return found


_PLAIN = (bool, int, float, str, type(None))


def are_alike(
    one: Sequence[tuple[Any, ...]], a: int, other: Sequence[tuple[Any, ...]], b: int
) -> bool:
    """Whether traits are the same, but for those that say which layer it is: ``a`` or ``b``."""
    return len(one) == len(other) and all(
        x == y or (x[0] == y[0] and x[1:] == (a,) and y[1:] == (b,))
        for x, y in zip(one, other, strict=True)
    )
