from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual import values

DEVICE = "virtual"
pytestmark = pytest.mark.usefixtures("session")


def numbers(*items: int) -> torch.Tensor:
    return torch.tensor(items, device=DEVICE)


def unknown(count: int) -> torch.Tensor:
    return torch.randn(count, device=DEVICE).argsort()


def test_counting_is_known() -> None:
    assert torch.arange(5, device=DEVICE).tolist() == [0, 1, 2, 3, 4]
    assert torch.arange(2, 9, 3, device=DEVICE).tolist() == [2, 5, 8]
    assert torch.full((2,), 7, device=DEVICE).tolist() == [7, 7]
    assert torch.eye(2, dtype=torch.long, device=DEVICE).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "compute",
    [
        lambda t: t[t > 2],
        lambda t: t % 3,
        lambda t: (t > 1).nonzero(),
        lambda t: torch.where(t > 2)[0],
        lambda t: torch.where(t > 2, t, 0),
        lambda t: t.masked_fill(t > 2, -1),
        lambda t: t.masked_select(t > 2),
        lambda t: t.cumsum(0).flip(0),
        lambda t: torch.cat([t, t]).view(2, -1).t().contiguous(),
        lambda t: t.repeat_interleave(2),
        lambda t: torch.diff(t, prepend=t[:1]),
        lambda t: (t == 3).cumsum(-1),
        lambda t: t.unique(),
        lambda t: t.sort().values,
        lambda t: torch.bincount(t),
        lambda t: torch.nn.functional.pad(t, (1, 2), value=9),
        lambda t: t.roll(1)[1::2],
        lambda t: t.split([2, 4])[1],
        lambda t: torch.searchsorted(t, t + 1),
        lambda t: t.to(torch.int32).max(),
        lambda t: t.scatter(0, t[:1], 8),
        lambda t: t.new_zeros(3).index_put((t[:2],), t[2:4]),
    ],
)
def test_whole_numbers_are_computed_as_on_the_host(compute) -> None:
    host = torch.arange(6)
    wanted = compute(host)
    found = compute(host.to(DEVICE))
    assert found.device.type == DEVICE
    assert found.dtype == wanted.dtype
    assert torch.equal(found.cpu(), wanted)


def test_masks_decide_shapes() -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]]).to(DEVICE)
    hidden = torch.randn(2, 3, 8, device=DEVICE)
    assert hidden[mask].shape == (4, 8)
    assert hidden[mask.nonzero(as_tuple=True)].shape == (4, 8)
    assert hidden[torch.tensor([[True, True, True], [False, False, False]])].shape == (3, 8)
    assert hidden.masked_select(mask[..., None]).shape == (32,)
    back = torch.zeros(2, 3, device=DEVICE).masked_scatter(mask, hidden[mask][:, 0])
    assert back.shape == (2, 3)


def test_writing_counts() -> None:
    tensor = torch.arange(10, device=DEVICE)
    tensor[tensor > 5] = 0
    tensor[0] = 7
    tensor[1:3].fill_(5)
    row = tensor[3:5]
    row += 10
    assert tensor.tolist() == [7, 5, 5, 13, 14, 5, 0, 0, 0, 0]


def test_a_copy_is_independent() -> None:
    first = numbers(1, 2)
    second = first.clone()
    second[0] = 9
    assert first.tolist() == [1, 2]
    assert second.tolist() == [9, 2]


def test_the_device_keeps_what_the_host_had_when_it_was_copied() -> None:
    host = torch.tensor([5, 6])
    there = host.to(DEVICE)
    host[0] = 1
    assert there.tolist() == [5, 6]


def test_results_in_an_out_argument_are_known() -> None:
    out = torch.empty(0, dtype=torch.long, device=DEVICE)
    torch.add(numbers(1, 2), numbers(3, 4), out=out)
    assert out.tolist() == [4, 6]


def test_unknown_values_make_the_rest_unknown() -> None:
    tensor = torch.arange(4, device=DEVICE)
    tensor[:2] = unknown(2)
    assert values.value_of(tensor) is None
    other = numbers(1, 2, 3)
    other.copy_(torch.randn(3, device=DEVICE))
    assert values.value_of(other) is None


def test_a_part_of_unknown_values_is_not_taken_for_the_whole() -> None:
    tensor = unknown(12).view(3, 4)
    tensor[:, 0] = 1
    assert values.value_of(tensor) is None
    assert values.value_of(tensor[0, :2]) is None


def test_what_was_never_written_is_the_same_in_every_run() -> None:
    assert torch.empty(3, dtype=torch.long, device=DEVICE).tolist() == [0, 0, 0]


def test_unknown_results_have_the_longest_shape() -> None:
    mask = torch.randn(3, 4, device=DEVICE) > 0
    assert mask.nonzero().shape == (12, 2)
    assert unknown(5).unique().shape == (5,)


def test_unknown_numbers_are_finite_and_unknown_answers_false() -> None:
    assert torch.randn(1, device=DEVICE).item() == 1.0
    assert not bool((torch.randn(3, device=DEVICE) > 0).all())
    assert torch.randn(2, 2, device=DEVICE).cpu().isfinite().all()


def test_known_answers_are_right() -> None:
    assert bool((numbers(1, 1) == 1).all())
    assert torch.equal(numbers(1, 2), numbers(1, 2))
    assert not torch.equal(numbers(1, 2), numbers(1, 3))
    assert int(numbers(3, 4).sum()) == 7


def test_values_end_with_their_storage() -> None:
    tensor = numbers(1, 2)
    known = len(values._shadows)
    del tensor
    assert len(values._shadows) == known - 1


def test_copies_to_the_host_are_held_there(trace) -> None:
    host = torch.randn(1000, device=DEVICE).cpu()
    assert trace.host_bytes == 4000
    del host
    assert trace.host_bytes == 0
    assert trace.host_peak_bytes == 4000


def test_copying_counts_as_traffic_over_the_link(trace) -> None:
    before = sum(cost.link_bytes for cost in trace.costs.values())
    there = torch.ones(1000).to(DEVICE)
    there.to("cpu")
    assert sum(cost.link_bytes for cost in trace.costs.values()) - before == 8000


def test_convolutions_have_gradients() -> None:
    layer = torch.nn.Conv1d(3, 4, 3, device=DEVICE)
    layer(torch.ones(2, 3, 8, device=DEVICE)).sum().backward()
    assert layer.weight.grad.shape == (4, 3, 3)
    assert layer.bias.grad.shape == (4,)
    turned = torch.nn.ConvTranspose1d(4, 6, 3, groups=2, device=DEVICE)
    turned(torch.ones(1, 4, 8, device=DEVICE)).sum().backward()
    assert turned.bias.grad.shape == (6,)
