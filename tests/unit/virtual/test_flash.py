"""FlashAttention's own functions, told apart from the libraries that call them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual.flash import flash_attn_func, flash_attn_varlen_func

DEVICE = "virtual"
HEADS, SIZE = 2, 32


def qkv(*shape: int) -> list[torch.Tensor]:
    made = [
        torch.empty(*shape, HEADS, SIZE, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)
    ]
    return [tensor.requires_grad_() for tensor in made]


def flops(session: Any) -> float:
    return sum(cost.flops for cost in session.trace.costs.values())


def attend(session: Any, lengths: list[int]) -> torch.Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = ends.to(DEVICE)
    longest = max(lengths)
    return flash_attn_varlen_func(*qkv(sum(lengths)), ends, ends, longest, longest, causal=True)


def work(lengths: list[int]) -> float:
    """Return the arithmetic of causal attention within documents: two products, half of each."""
    return sum(2 * (2 * length**2 * SIZE * HEADS) / 2 for length in lengths)


@pytest.mark.parametrize(
    ("lengths", "share"),
    [
        ([64], 1.0),
        ([64] * 8, 1.0),
        ([60, 20], (60**2 + 20**2) / (2 * 60**2)),
        ([100, 1, 1, 2], (100**2 + 6) / (4 * 100**2)),
    ],
)
def test_documents_take_the_sum_of_their_squares(
    lengths: list[int], share: float, session: Any
) -> None:
    found = attend(session, lengths)
    assert found.shape == (sum(lengths), HEADS, SIZE)
    assert session.attention_share == pytest.approx(share)
    assert flops(session) == pytest.approx(work(lengths))
    found.sum().backward()
    assert session.attention_share == pytest.approx(share)
    # The backward pass has five products to the forward pass's two.
    assert flops(session) == pytest.approx(3.5 * work(lengths))


def test_the_padded_layout_computes_the_whole_square(session: Any) -> None:
    attend(session, [60, 20])
    before = flops(session)
    found = flash_attn_func(*qkv(2, 64), causal=True)
    assert found.shape == (2, 64, HEADS, SIZE)
    assert session.attention_share == 1.0
    assert flops(session) - before == pytest.approx(work([64, 64]))
    found.sum().backward()
    assert flops(session) - before == pytest.approx(3.5 * work([64, 64]))


def test_unknown_lengths_leave_the_share_alone(session: Any) -> None:
    ends = torch.rand(3, device=DEVICE).int()
    flash_attn_varlen_func(*qkv(80), ends, ends, 60, 60, causal=True)
    assert session.attention_share == 1.0


def test_queries_keep_what_the_backward_pass_needs(session: Any) -> None:
    trace = session.trace
    inputs = qkv(1024)
    ends = torch.tensor([0, 512, 1024], dtype=torch.int32).to(DEVICE)
    before = trace.allocated_bytes
    found = flash_attn_varlen_func(*inputs, ends, ends, 512, 512, causal=True)
    output = 1024 * HEADS * SIZE * 2
    log_sums = 1024 * HEADS * 4
    assert output + log_sums <= trace.allocated_bytes - before <= output + log_sums + 4096
    assert found.requires_grad
