"""What reading, comparing and overwriting gives where the device holds no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def made(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(shape, dtype=dtype, device="virtual")


def test_unknown_numbers_are_finite(session: Any) -> None:
    for value in (made(), made(16, 3), made(8, dtype=torch.bfloat16)):
        assert torch.isfinite(value).all()
        assert not torch.isinf(value).any()
        assert not torch.isnan(value).any()
        assert bool((value == value).all())


def test_a_gradient_scaler_steps(session: Any) -> None:
    model = torch.nn.Linear(64, 64, device="virtual")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("virtual")
    for _ in range(2):
        loss = model(torch.randn(8, 64, device="virtual")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(optimizer.state) == 2


def _greater_into(mask: Any, values: Any) -> None:
    torch.gt(values, 0.5, out=mask)


def _or_with_floats(mask: Any, values: Any) -> None:
    mask.logical_or_(values)


def _any_of_a_large_mask(mask: Any, values: Any) -> None:
    large = made(1025, mask.numel(), dtype=torch.bool)
    torch.any(large, dim=0, out=mask)


@pytest.mark.parametrize("write", [_greater_into, _or_with_floats, _any_of_a_large_mask])
def test_what_floats_or_large_tensors_write_is_unknown(
    session: Any, write: Callable[[Any, Any], None]
) -> None:
    mask = torch.zeros(1024, dtype=torch.bool, device="virtual")
    assert made(1024)[mask].shape == (0,)
    write(mask, made(1024))
    # Unknown masks select everything: memory is never understated.
    assert made(1024)[mask].shape == (1024,)


@pytest.mark.parametrize(
    "write",
    [
        lambda counts, ids: counts.scatter_add_(0, ids, torch.ones_like(ids)),
        lambda counts, ids: counts.index_add_(0, ids, torch.ones_like(ids)),
        lambda counts, ids: counts.index_put_((ids,), torch.ones_like(ids), accumulate=True),
        lambda counts, ids: torch._foreach_copy_([counts], [made(8)]),
    ],
)
def test_counts_of_what_is_unknown_are_unknown(
    session: Any, write: Callable[[Any, Any], object]
) -> None:
    from autotune.virtual import values

    counts = torch.zeros(8, dtype=torch.int64, device="virtual")
    write(counts, made((1 << 20) + 1, dtype=torch.int64))
    assert values.value_of(counts) is None


def test_the_hosts_random_numbers_are_left_alone(session: Any) -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    torch.randn(100, device="virtual")
    torch.randperm(64, device="virtual")
    torch.randint(0, 10, (32,), device="virtual")
    torch.nn.functional.dropout(made(64), 0.5)
    made(16).uniform_()
    torch.bernoulli(torch.zeros(8, dtype=torch.int64, device="virtual") + 0.5)
    assert torch.equal(torch.rand(4), expected)
