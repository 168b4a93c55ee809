from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual.errors import NotVirtual

DEVICE = "virtual"
pytestmark = pytest.mark.usefixtures("session")


def test_a_storage_counts_in_blocks_until_the_last_tensor_on_it_is_gone(grown) -> None:
    base = torch.zeros(100, device=DEVICE)
    assert grown() == 512
    view = base.view(10, 10)[2:].t()
    assert grown() == 512
    del base
    assert grown() == 512
    del view
    assert grown() == 0


def test_views_share_the_storage() -> None:
    base = torch.empty(4, 6, device=DEVICE)
    for view in (base[1:], base.t(), base.reshape(2, 12), base.unfold(0, 2, 1), base.detach()):
        assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
        assert view.data_ptr() >= base.data_ptr()


def test_storages_have_addresses_of_their_own() -> None:
    tensors = [torch.empty(3, device=DEVICE) for _ in range(50)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 50


def test_what_changes_in_place_allocates_nothing(grown) -> None:
    tensor = torch.ones(1000, device=DEVICE)
    before = grown()
    tensor.add_(1).mul_(tensor).clamp_(0).zero_()
    tensor[10:20] = 3
    tensor.copy_(torch.zeros(1000))
    assert grown() == before


def test_an_out_argument_takes_the_shape_of_the_result(grown) -> None:
    a = torch.ones(256, device=DEVICE)
    out = torch.empty(0, device=DEVICE)
    assert torch.add(a, a, out=out) is out
    assert out.shape == (256,)
    assert grown() == 2 * 1024
    torch.cat([a, a], out=out)
    assert out.shape == (512,)
    assert grown() == 1024 + 2048


def test_resizing_takes_another_block(grown) -> None:
    tensor = torch.empty(10, device=DEVICE)
    tensor.resize_(4096)
    assert tensor.shape == (4096,)
    assert grown() == 4096 * 4


def test_setting_data_replaces_the_storage(grown) -> None:
    parameter = torch.nn.Parameter(torch.empty(4096, device=DEVICE))
    parameter.data = torch.empty(128, device=DEVICE)
    assert grown() == 512
    tensor = torch.empty(0, device=DEVICE)
    tensor.set_(torch.empty(2, 64, device=DEVICE))
    assert tensor.shape == (2, 64)
    assert tensor.set_(tensor.untyped_storage()).shape == (128,)
    assert grown() == 1024


def test_copies_of_tensors_and_modules_are_counted(grown) -> None:
    linear = torch.nn.Linear(64, 64, bias=False, device=DEVICE)
    other = copy.deepcopy(linear)
    assert other.weight.device.type == DEVICE
    assert other.weight.shape == (64, 64)
    assert other.weight.data_ptr() != linear.weight.data_ptr()
    assert grown() == 2 * 64 * 64 * 4
    assert copy.deepcopy(linear.weight.detach()[1:]).shape == (63, 64)


def test_saving_writes_something_of_the_right_size() -> None:
    state = torch.nn.Linear(64, 64, device=DEVICE).state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    assert len(file.getvalue()) > 64 * 64 * 4
    assert len(pickle.dumps(state["bias"])) > 64 * 4


def test_it_prints(trace) -> None:
    assert "device='virtual:0'" in repr(torch.ones(2, device=DEVICE))


def test_the_module_tells_what_the_trace_counts(trace) -> None:
    module = torch.virtual
    tensor = torch.empty(1000, device=DEVICE)
    assert module.memory_allocated() == trace.allocated_bytes > 0
    peak = module.max_memory_allocated()
    del tensor
    assert module.max_memory_allocated() == peak > module.memory_allocated()
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated() == module.memory_allocated()
    free, total = module.mem_get_info()
    assert total - free == module.memory_allocated()
    assert torch.get_default_device().type == "cpu"


def test_gradients_flow_and_end() -> None:
    linear = torch.nn.Linear(8, 8, device=DEVICE)
    linear(torch.ones(4, 8, device=DEVICE)).sum().backward()
    assert linear.weight.grad.shape == (8, 8)
    linear.zero_grad()
    assert linear.weight.grad is None


def test_nothing_stays_after_a_step(grown) -> None:
    linear = torch.nn.Linear(8, 8, device=DEVICE)
    before = grown()
    for _ in range(3):
        linear(torch.ones(4, 8, device=DEVICE)).relu().sum().backward()
        linear.zero_grad()
        gc.collect()
        assert grown() == before


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 2

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")


def test_an_error_in_backward_arrives_as_it_is(grown) -> None:
    weight = torch.ones(1000, device=DEVICE, requires_grad=True)
    before = grown()
    with pytest.raises(ArithmeticError, match="in backward"):
        Failing.apply(weight).sum().backward()
    gc.collect()
    assert grown() == before
    (weight * 2).sum().backward()
    assert weight.grad is not None


def test_an_error_in_recomputation_arrives_as_it_is() -> None:
    calls = []

    def block(tensor):
        calls.append(1)
        if len(calls) > 1:
            raise ArithmeticError("computed again")
        return tensor.relu()

    weight = torch.ones(10, device=DEVICE, requires_grad=True)
    found = torch.utils.checkpoint.checkpoint(block, weight, use_reentrant=False)
    with pytest.raises(ArithmeticError, match="computed again"):
        found.sum().backward()


@pytest.mark.parametrize("kind", ["gradient", "parameter", "module"])
def test_an_error_in_a_hook_arrives_as_it_is(kind: str) -> None:
    def fail(*args: object) -> None:
        raise ArithmeticError("in a hook")

    linear = torch.nn.Linear(4, 4, device=DEVICE)
    found = linear(torch.ones(2, 4, device=DEVICE, requires_grad=True))
    if kind == "gradient":
        found.register_hook(fail)
    elif kind == "parameter":
        linear.weight.register_post_accumulate_grad_hook(fail)
    else:
        linear.register_full_backward_hook(fail)
        found = linear(torch.ones(2, 4, device=DEVICE, requires_grad=True))
    with pytest.raises(ArithmeticError, match="in a hook"):
        found.sum().backward()
    torch.ones(2, device=DEVICE, requires_grad=True).sum().backward()


def test_host_and_device_do_not_mix() -> None:
    with pytest.raises(TypeError, match="cpu"):
        torch.ones(3, device=DEVICE).numpy()


def test_wrong_shapes_are_refused_as_on_a_card() -> None:
    with pytest.raises(RuntimeError):
        torch.ones(3, 4, device=DEVICE) @ torch.ones(3, 4, device=DEVICE)


def test_an_operator_without_shapes_says_so() -> None:
    with pytest.raises(NotVirtual, match="no meta kernel"):
        torch.geqrf(torch.ones(4, 4, device=DEVICE))


def test_the_error_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(NotVirtual("torch.compile", "it needs a card")))
    assert isinstance(error, NotImplementedError)
    assert (error.what, error.reason) == ("torch.compile", "it needs a card")
    assert str(error) == "torch.compile cannot run on a virtual accelerator: it needs a card."


def test_backward_runs_though_the_process_ran_one_before() -> None:
    # Autograd has started its threads for the devices there were.
    torch.ones(2, requires_grad=True).sum().backward()
    torch.ones(2, device=DEVICE, requires_grad=True).sum().backward()
