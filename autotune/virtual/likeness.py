"""Which layers of a model are alike, as far as it can be told before they run.

A model is looked at from outside: whose code it is, what its layers are made of, and what its
configuration says of each one. Code may hang on more than that, such as on a layer's number; so
models with code of their own are never taken to have layers that are alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

LIBRARIES = frozenset({"accelerate", "bitsandbytes", "peft", "torch", "transformers", "trl"})
"""Packages whose modules are known to treat layers with the same attributes alike: of the models
in transformers, what a layer does hangs on its attributes, on lists in the configuration or on
slices of the list of layers. ``transformers_modules``, code from a model's repository, is none."""

_GATHERS = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Settings with which a model takes something of every layer together."""

_PLAIN = (bool, int, float, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BOOKKEEPING = frozenset(vars(torch.nn.Module())) - {"training"}


class Likeness:
    """What tells layers of one model apart.

    Args:
        model: The model.
        layers: Its layers, in order.

    Attributes:
        is_known: Whether layers that look alike can be taken to be alike.
    """

    def __init__(self, model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
        configs = list(_configs(model))
        self.is_known = (
            all(is_of_libraries(module) for module in model.modules())
            and not any(getattr(config, name, False) for config in configs for name in _GATHERS)
            and not _shares(model, layers)
        )
        self._layers = layers
        self._traits: list[list[tuple[Any, ...]]] = []
        self._lists = [
            value
            for config in configs
            for value in vars(config).values()
            if isinstance(value, (list, tuple)) and len(value) == len(layers)
        ]

    def allows(self, kept: Sequence[int], inner: range, period: int) -> bool:
        """Whether a model with few layers can be taken for the whole one.

        Args:
            kept: Numbers of the layers that it would have, in order.
            inner: Numbers of those layers of the whole one that must be alike.
            period: After how many layers they repeat themselves.
        """
        if not self.is_known:
            return False
        # A model asks its lists by place, and with few layers the last ones have another place.
        if any(
            each[place] != each[layer] for each in self._lists for place, layer in enumerate(kept)
        ):
            return False
        self._traits = self._traits or [traits(*item) for item in enumerate(self._layers)]
        found = self._traits
        return all(
            are_alike(found[a], a, found[a + period], a + period)
            for a in range(inner.start, inner.stop - period)
        )


def _configs(model: torch.nn.Module) -> Iterator[Any]:
    """Yield a model's configuration and those within it."""
    waiting = [getattr(model, "config", None)]
    while waiting:
        config = waiting.pop()
        if not hasattr(config, "to_dict"):
            continue
        yield config
        waiting += [value for value in vars(config).values() if hasattr(value, "to_dict")]


def is_of_libraries(module: torch.nn.Module) -> bool:
    """Whether a module, and what runs in the place of its ``forward``, is a library's."""
    forward = vars(module).get("forward", type(module).forward)
    while isinstance(forward, partial):
        forward = forward.func
    places = (type(module).__module__, getattr(forward, "__module__", None) or "")
    return all(place.partition(".")[0] in LIBRARIES for place in places)


def _shares(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> bool:
    """Whether a parameter is of more than one layer, or of one and of what is none."""
    of_layers = [id(parameter) for layer in layers for parameter in layer.parameters()]
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module._parameters.values()
    }
    return len(set(of_layers)) != len(of_layers) or not outside.isdisjoint(of_layers)


def traits(number: int, layer: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Return what a layer is made of: modules, attributes, parameters, buffers and hooks.

    Args:
        number: The layer's.
        layer: The layer.
    """
    # PEFT's layers know their paths.
    in_path = re.compile(rf"(?<=\.){number}(?=\.)")

    def comparable(value: Any) -> Any:
        """Return what tells a value from another one; of an object, only its type."""
        if isinstance(value, str):
            return in_path.sub("*", value)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, (list, tuple, set, frozenset)):
            return type(value), [comparable(item) for item in value]
        if isinstance(value, dict):
            return [(key, comparable(item)) for key, item in value.items()]
        if isinstance(value, partial):
            return comparable(value.func), comparable(value.args), comparable(value.keywords)
        function = getattr(value, "__func__", value)  # of a method, without its object
        return function if hasattr(function, "__code__") else type(value)

    found: list[tuple[Any, ...]] = []
    for name, module in layer.named_modules():
        attributes = vars(module)
        found.append((name, type(module), *(len(attributes[hooks]) for hooks in _HOOKS)))
        found += [
            (key, comparable(value))
            for key, value in attributes.items()
            if key not in _BOOKKEEPING
        ]
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                found.append((key, value.shape, value.dtype, value.requires_grad))
    return found


def are_alike(
    one: Sequence[tuple[Any, ...]], a: int, other: Sequence[tuple[Any, ...]], b: int
) -> bool:
    """Whether traits are the same, but for those that say which layer it is: ``a`` or ``b``."""
    return len(one) == len(other) and all(
        x == y or (x[0] == y[0] and x[1:] == (a,) and y[1:] == (b,))
        for x, y in zip(one, other, strict=True)
    )
