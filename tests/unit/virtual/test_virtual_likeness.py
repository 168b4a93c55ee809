"""Which layers look alike from outside."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.virtual.likeness import Likeness, are_alike, traits

NUM_LAYERS = 12


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(number) for number in range(NUM_LAYERS))
        self.config: Any = None


# As if they came with a library.
for _kind in (Layer, Model):
    _kind.__module__ = "transformers.models.test"
    _kind.forward.__module__ = "transformers.models.test"


class Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


@pytest.fixture
def model() -> Model:
    return Model()


def is_allowed(model: Model, *, period: int = 1, edge: int = 3) -> bool:
    """Ask with the first and last four blocks kept, of which one each is an inner one."""
    kept = [*range((edge + 1) * period), *range(NUM_LAYERS - (edge + 1) * period, NUM_LAYERS)]
    inner = range(edge * period, NUM_LAYERS - edge * period)
    return Likeness(model, list(model.layers)).allows(kept, inner, period)


def test_layers_that_differ_by_their_number_alone_are_alike(model: Model) -> None:
    assert is_allowed(model)


MIDDLE = 5
DIFFERENT: dict[str, Any] = {
    "number": 3,
    "word": "other",
    "tuple": ("gelu", "exp"),
    "list in a mapping": {"default": [1]},
    "function": lambda x: x.exp(),
    "part of a function": partial(max, 2),
    "object": object(),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_an_attribute_that_differs_is_seen(kind: str, model: Model) -> None:
    for layer in model.layers:
        layer.extra = None
    assert is_allowed(model)
    model.layers[MIDDLE].extra = DIFFERENT[kind]
    assert not is_allowed(model)


def test_what_is_different_at_the_ends_is_run_anyway(model: Model) -> None:
    model.layers[0].extra = model.layers[NUM_LAYERS - 1].extra = 1
    assert is_allowed(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.linear.requires_grad_(False),
        lambda layer: layer.linear.half(),
        lambda layer: layer.linear.register_forward_hook(lambda *args: None),
        lambda layer: layer.linear.register_full_backward_hook(lambda *args: None),
        lambda layer: layer.eval(),
        lambda layer: setattr(layer, "linear", torch.nn.Linear(4, 4, bias=False)),
    ],
)
def test_what_a_layer_is_made_of_is_seen(change: Any, model: Model) -> None:
    change(model.layers[MIDDLE])
    assert not is_allowed(model)


def test_a_path_with_the_layers_number_is_no_difference(model: Model) -> None:
    for number, layer in enumerate(model.layers):
        layer.linear.path = {"target": f"model.layers.{number}.linear"}
    assert is_allowed(model)
    model.layers[MIDDLE].linear.path = {"target": "model.layers.5.other"}
    assert not is_allowed(model)


def test_two_in_turn_need_a_period_of_two(model: Model) -> None:
    for number, layer in enumerate(model.layers):
        layer.is_sliding = number % 2 == 0
    assert not is_allowed(model)
    assert is_allowed(model, period=2, edge=1)


def test_what_the_configuration_says_by_place_must_hold_for_the_places_of_few(
    model: Model,
) -> None:
    kinds = ["a", "b", "b"] * 4
    model.config = Config(text=Config(layer_types=kinds))
    # Of twelve, the eight that are kept have the last one in the place of the eighth.
    assert not is_allowed(model)
    model.config = Config(text=Config(layer_types=["a"] * NUM_LAYERS))
    assert is_allowed(model)


@pytest.mark.parametrize("name", ["output_router_logits", "output_hidden_states"])
def test_what_takes_something_of_every_layer_is_not_known(name: str, model: Model) -> None:
    model.config = Config(**{name: True})
    assert not Likeness(model, list(model.layers)).is_known


def test_parameters_of_two_layers_are_not_copied(model: Model) -> None:
    model.layers[1].linear.weight = model.layers[0].linear.weight
    assert not Likeness(model, list(model.layers)).is_known


def test_parameters_of_a_layer_and_of_another_module_are_not_copied(model: Model) -> None:
    model.head = torch.nn.Linear(4, 4)
    model.head.weight = model.layers[2].linear.weight
    assert not Likeness(model, list(model.layers)).is_known


def test_code_of_ones_own_is_not_known(model: Model) -> None:
    class Own(Layer):
        pass

    assert Own.__module__ == __name__
    model.layers[3] = Own(3)
    assert not Likeness(model, list(model.layers)).is_known


def test_a_forward_of_ones_own_is_not_known(model: Model) -> None:
    model.layers[3].forward = partial(lambda layer, x: x, model.layers[3])
    assert not Likeness(model, list(model.layers)).is_known


def test_only_the_layers_own_number_may_differ() -> None:
    one, other = Layer(1), Layer(2)
    assert are_alike(traits(1, one), 1, traits(2, other), 2)
    other.number = 3
    assert not are_alike(traits(1, one), 1, traits(2, other), 2)
