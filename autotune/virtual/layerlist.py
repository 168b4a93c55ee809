"""A model's list of layers: found, given in part, and heard of when its layers begin and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.virtual.sections import NUM_INNER, Mark, UnevenError
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
        self.marks.after_forward(self.layer)
        hidden = result[0] if isinstance(result, tuple) and result else result
        # Without a mark in the backward pass, the layer can't be told from the next one.
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
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
        """Return a layer, or all.

        Raises:
            UnevenError: If a part of them is asked for: which layers it has hangs on their number.
        """
        if isinstance(index, slice):
            num_all = len(self._modules)
            if range(*index.indices(num_all)) != range(num_all):
                raise UnevenError
            return list(self._few)
        return self._few[index]


class Marks:
    """The marks of one micro-batch.

    Attributes:
        forward: One before the first layer's forward pass, and one after each layer's.
        backward: One before each layer's backward pass, from the last layer to the first.
        called: The layers, as often as they were called, in order.

    Args:
        trace: Of the device.
        most: Calls of layers that are allowed; None for any number.
    """

    def __init__(self, trace: Trace, *, most: int | None = None) -> None:
        self.called: list[torch.nn.Module] = []
        self._most = most
        self._trace = trace
        self.forward: list[Mark] = []
        self.backward: list[Mark] = []

    def before_first(self) -> None:
        """Take a mark if none was taken.

        Raises:
            UnevenError: If layers are called once more than they may be.
        """
        if self._most is not None and len(self.called) >= self._most:
            raise UnevenError
        if not self.forward:
            self.forward.append(self._mark())

    def after_forward(self, layer: torch.nn.Module) -> None:
        """Take a mark after a layer's forward pass."""
        self.called.append(layer)
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
