from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual import kernels

DEVICE = "virtual"
pytestmark = pytest.mark.usefixtures("session")


def ops(trace, since: int = 0) -> list[str]:
    return [storage.op for storage in trace.storages[since:]]


CALLS = [
    lambda x: x @ x,
    lambda x: torch.addmm(x[0], x, x),
    lambda x: torch.bmm(x.expand(3, 6, 6), x.expand(3, 6, 6)),
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.mean(),
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(-1),
    lambda x: x.topk(2).values,
    lambda x: x.sort(dim=0).indices,
    lambda x: x.max(dim=1).indices,
    lambda x: torch.nn.functional.layer_norm(x, (6,)),
    lambda x: torch.nn.functional.gelu(x),
    lambda x: torch.nn.functional.silu(x),
    lambda x: torch.nn.functional.pad(x, (1, 1)),
    lambda x: torch.nn.functional.embedding(torch.arange(3, device=x.device), x),
    lambda x: torch.cat([x, x.half()], 0),
    lambda x: torch.stack([x, x]),
    lambda x: x.to(torch.bfloat16) * 2.5,
    lambda x: (x > 0).float(),
    lambda x: x + 1,
    lambda x: x.int() / 2,
    lambda x: x.half() + x.double(),
    lambda x: x.transpose(0, 1).contiguous(),
    lambda x: x.new_zeros(3, 2),
    lambda x: torch.zeros_like(x, dtype=torch.int8),
    lambda x: torch.linalg.vector_norm(x),
    lambda x: torch.einsum("ij,kj->ik", x, x),
    lambda x: x.cumsum(0),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.gather(1, torch.zeros(6, 1, dtype=torch.long, device=x.device)),
    lambda x: x.repeat(2, 1),
    lambda x: x.masked_fill(x > 0, 0.0),
    lambda x: torch.outer(x[0], x[1]),
    lambda x: x.tril(),
    lambda x: torch.nn.functional.cross_entropy(
        x, torch.zeros(6, dtype=torch.long, device=x.device)
    ),
    lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: torch.fft.rfft(x),
    lambda x: torch.cdist(x, x),
]


@pytest.mark.parametrize("call", CALLS)
def test_results_are_as_the_cpu_makes_them(call) -> None:
    wanted = call(torch.rand(6, 6))
    found = call(torch.rand(6, 6).to(DEVICE))
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.stride() == wanted.stride()
    assert found.device.type == DEVICE


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_as_the_cpu_makes_them(call) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor | None:
        x.requires_grad_()
        found = call(x)
        if found.requires_grad:
            found.abs().sum().backward()
        return x.grad

    wanted, found = gradient(torch.rand(6, 6)), gradient(torch.rand(6, 6).to(DEVICE))
    assert (found is None) == (wanted is None)
    if wanted is not None:
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)


def test_a_call_is_planned_once(monkeypatch) -> None:
    made = []
    make = kernels.make_plan
    monkeypatch.setattr(kernels, "make_plan", lambda *args: made.append(1) or make(*args))
    x = torch.ones(7, 13, device=DEVICE)
    kernels.clear_plans()
    made.clear()
    for _ in range(3):
        x.exp()
    assert len(made) == 1
    x.t().exp()
    assert len(made) == 2


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    x = torch.ones(3, dtype=torch.long, device=DEVICE)
    assert (x + 1).dtype == torch.long
    assert (x + 1.0).dtype == torch.float32
    assert (x + True).dtype == torch.long


def test_work_is_counted(session) -> None:
    a = torch.ones(16, 32, device=DEVICE)
    session.trace.costs.clear()
    a @ a.t()
    (cost,) = session.trace.costs.values()
    assert cost.flops == 2 * 16 * 32 * 16
    assert cost.moved_bytes == 4 * (16 * 32 * 2 + 16 * 16)
    assert cost.num_ops == 1


@pytest.mark.parametrize(
    "name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "Adafactor"]
)
def test_optimizers_take_their_default_way_for_accelerators(name: str, trace) -> None:
    weights = [torch.nn.Parameter(torch.ones(40, 50, device=DEVICE)) for _ in range(3)]
    optimizer = getattr(torch.optim, name)(weights, lr=0.1)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() == 2000
    ]
    assert all(value.device.type == DEVICE for value in states)
    # One list, not one weight after another, is what takes the memory of temporaries.
    if name not in ("Adafactor",):
        assert any(op.startswith("_foreach") for op in ops(trace)) or name == "SGD"


def test_fused_optimizers_allocate_only_their_states(grown) -> None:
    weight = torch.nn.Parameter(torch.ones(1000, device=DEVICE))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    before = grown()
    optimizer.step()
    assert grown() - before == 2 * 4096 + 512  # and the count of steps


def test_clipping_returns_a_norm_on_the_device() -> None:
    weights = [torch.nn.Parameter(torch.ones(10, device=DEVICE)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
    assert norm.device.type == DEVICE
    assert norm.item() == 1.0


def test_scratch_memory_is_flashed_and_can_be_left_out(session) -> None:
    def peak() -> int:
        q = torch.ones(1, 4, 256, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        found = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        session.trace.reset_peak()
        found.sum().backward()
        return session.trace.peak_bytes - session.trace.allocated_bytes

    with_scratch = peak()
    session.scratch = False
    assert peak() < with_scratch
