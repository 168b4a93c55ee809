"""Layers that take ways of their own on a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

LAST = torch.channels_last


@pytest.mark.parametrize("which", ["both", "input", "weight"])
def test_convolutions_keep_channels_last(session: Any, which: str) -> None:
    layer = torch.nn.Conv2d(8, 16, 3, device="virtual")
    images = torch.randn(2, 8, 32, 32, device="virtual", requires_grad=True)
    if which != "weight":
        images = images.detach().to(memory_format=LAST).requires_grad_()
    if which != "input":
        layer = layer.to(memory_format=LAST)
    found = layer(images)
    assert found.is_contiguous(memory_format=LAST)
    found.sum().backward()
    # PyTorch copies a gradient that is laid out otherwise than its tensor.
    assert images.grad.stride() == images.stride()
    assert layer.weight.grad.shape == layer.weight.shape


def test_other_convolutions_stay_as_they_were(session: Any) -> None:
    images = torch.randn(2, 8, 32, 32, device="virtual")
    found = torch.nn.Conv2d(8, 16, 3, device="virtual")(images)
    assert found.is_contiguous()
    assert torch.nn.Conv1d(8, 16, 3, device="virtual")(images[..., 0]).is_contiguous()


def test_a_network_in_channels_last_takes_no_copies(session: Any) -> None:
    def peak(layout: Any) -> int:
        net = torch.nn.Sequential(
            torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
        )
        net = net.to("virtual").to(memory_format=layout)
        images = torch.randn(4, 8, 64, 64, device="virtual").to(memory_format=layout)
        session.trace.reset_peak()
        before = session.trace.allocated_bytes
        net(images).sum().backward()
        return int(session.trace.peak_bytes - before)

    assert peak(LAST) == peak(torch.contiguous_format)


def test_a_sparse_gradient_is_refused_not_counted_as_a_dense_one(session: Any) -> None:
    from autotune.virtual.errors import NotVirtual

    for kind in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        table = kind(1000, 8, sparse=True, device="virtual")
        ids = torch.arange(6, device="virtual").reshape(2, 3)
        with pytest.raises(NotVirtual, match="sparse"):
            table(ids).sum().backward()
    table = torch.nn.EmbeddingBag(1000, 8, mode="mean", device="virtual")
    table(ids).sum().backward()
    assert table.weight.grad.shape == (1000, 8)


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_recurrent_layers_train(session: Any, kind: str) -> None:
    layer = getattr(torch.nn, kind)(16, 32, batch_first=True, device="virtual")
    found, _ = layer(torch.randn(2, 5, 16, device="virtual"))
    assert found.shape == (2, 5, 32)
    found.sum().backward()
    assert all(p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: b @ a,
        lambda a, b: torch.nn.functional.linear(a, b),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: b.add_(a),
        lambda a, b: torch.nn.functional.embedding(b.long()[0], a),
    ],
)
def test_tensors_of_two_devices_do_not_mix(session: Any, mix: Callable[[Any, Any], Any]) -> None:
    here, there = torch.zeros(4, 4), torch.zeros(4, 4, device="virtual")
    mix(there, there.clone())  # the same shapes have been seen before
    with pytest.raises(RuntimeError, match="same device"):
        mix(there, here)


def test_what_a_card_takes_from_the_host(session: Any) -> None:
    there = torch.zeros(4, 4, device="virtual")
    assert (there * torch.tensor(2.0)).shape == (4, 4)
    assert there[torch.tensor([0, 1])].shape == (2, 4)
    there[torch.tensor([0, 1])] = 1.0
    there.copy_(torch.ones(4, 4))
    assert torch.where(there > 0, torch.tensor(1.0), there).shape == (4, 4)


def test_transforms_of_functions(session: Any) -> None:
    layer = torch.nn.Linear(4, 4, device="virtual")
    images = torch.randn(3, 4, device="virtual")

    def loss(weight: Any) -> Any:
        return torch.func.functional_call(layer, {"weight": weight}, (images,)).sum()

    assert torch.func.grad(loss)(layer.weight.detach()).shape == (4, 4)
