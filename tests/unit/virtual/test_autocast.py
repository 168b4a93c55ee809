from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual import autocast

DEVICE = "virtual"
pytestmark = pytest.mark.usefixtures("session")


def half():
    return torch.autocast(DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x @ x,
        lambda x: torch.nn.functional.linear(x, x),
        lambda x: torch.addmm(x[0], x, x),
        lambda x: torch.einsum("ij,jk->ik", x, x),
        lambda x: torch.bmm(x[None], x[None]),
    ],
)
def test_products_are_computed_in_the_lower_precision(call) -> None:
    x = torch.ones(8, 8, device=DEVICE)
    with half():
        assert call(x).dtype == torch.bfloat16
    assert call(x).dtype == torch.float32


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.exp(),
        lambda x: x.pow(2),
        lambda x: x.rsqrt(),
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(-1),
        lambda x: x.sum(),
        lambda x: x.cumsum(0),
        lambda x: torch.nn.functional.layer_norm(x, (8,)),
        lambda x: torch.nn.functional.cross_entropy(
            x, torch.zeros(8, dtype=torch.long, device=DEVICE)
        ),
        lambda x: torch.nn.functional.mse_loss(x, x),
    ],
)
def test_sums_and_powers_are_computed_in_float32(call) -> None:
    x = torch.ones(8, 8, device=DEVICE, dtype=torch.bfloat16)
    with half():
        assert call(x).dtype == torch.float32


def test_the_rest_keeps_its_dtype() -> None:
    x = torch.ones(8, 8, device=DEVICE)
    with half():
        for call in (torch.relu, torch.neg, torch.sigmoid, lambda t: t * 2):
            assert call(x).dtype == torch.float32
            assert call(x.bfloat16()).dtype == torch.bfloat16


def test_whole_numbers_double_precision_and_the_host_are_left_alone() -> None:
    with half():
        double = torch.ones(8, 8, dtype=torch.float64, device=DEVICE)
        assert (double @ double).dtype == torch.float64
        assert (torch.ones(8, 8) @ torch.ones(8, 8)).dtype == torch.float32


def test_it_can_be_switched_off_inside() -> None:
    x = torch.ones(8, 8, device=DEVICE)
    with half(), torch.autocast(DEVICE, enabled=False):
        assert (x @ x).dtype == torch.float32


def test_casts_of_trained_weights_are_kept_until_the_outermost_block_ends(grown) -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64, device=DEVICE))
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=DEVICE)
    before = grown()
    with half():
        with half(), torch.no_grad():
            torch.nn.functional.linear(x, weight)
        held = grown() - before
        assert held == 64 * 64 * 2
        torch.nn.functional.linear(x, weight)
        assert grown() - before == held
    assert grown() == before


def test_casts_of_frozen_weights_and_activations_are_not_kept(grown) -> None:
    frozen = torch.ones(64, 64, device=DEVICE)
    activation = torch.nn.Parameter(torch.ones(64, 64, device=DEVICE)) * 1
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=DEVICE)
    before = grown()
    with half(), torch.no_grad():
        torch.nn.functional.linear(x, frozen)
        torch.nn.functional.linear(x, activation)
        assert grown() == before


def test_the_cache_can_be_switched_off(grown) -> None:
    weight = torch.nn.Parameter(torch.ones(64, 64, device=DEVICE))
    before = grown()
    with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False), torch.no_grad():
        torch.nn.functional.linear(torch.ones(1, 64, device=DEVICE), weight)
        assert grown() == before
    assert not autocast._cache


def test_gradients_have_the_weights_dtype() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8, device=DEVICE))
    with half():
        loss = torch.nn.functional.linear(torch.ones(2, 8, device=DEVICE), weight).float().sum()
    loss.backward()
    assert weight.grad.dtype == torch.float32
