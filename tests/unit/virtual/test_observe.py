from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

DEVICE = "virtual"
pytestmark = pytest.mark.usefixtures("session")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 64, device=DEVICE)
        self.down = torch.nn.Linear(64, 16, device=DEVICE)
        self.register_buffer("scale", torch.ones(16, device=DEVICE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * self.scale


class Net(torch.nn.Module):
    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointing:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(8, 16, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sizes(trace, kind: str) -> int:
    return sum(s.nbytes for s in trace.storages if trace.kind_of(s) == kind)


@pytest.fixture
def trained(trace):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    step(net, optimizer)
    return net


def test_kinds(trained, trace) -> None:
    nbytes = sum(p.numel() * 4 for p in trained.parameters())
    assert sizes(trace, "parameters") == nbytes
    assert sizes(trace, "buffers") == 2 * 16 * 4
    assert sizes(trace, "gradients") == 2 * nbytes
    assert sizes(trace, "optimizer_states") == 2 * nbytes
    assert sizes(trace, "activations") > 0
    assert sizes(trace, "workspaces") == 0


def test_phases(trained, trace) -> None:
    by_op = {(s.op, s.phase) for s in trace.storages}
    phases = {phase for _, phase in by_op}
    assert {"load", "forward", "backward", "optimizer"} <= phases
    assert ("addmm", "forward") in by_op
    assert ("mm", "backward") in by_op
    kinds = {s.phase for s in trace.storages if trace.kind_of(s) == "gradients"}
    assert kinds == {"backward"}


@pytest.mark.parametrize("kind", ["parameters", "buffers", "gradients", "optimizer_states"])
def test_what_belongs_to_parameters_knows_its_module(trained, trace, kind) -> None:
    names = {s.module for s in trace.storages if trace.kind_of(s) == kind}
    parts = [f"blocks.{number}" for number in (0, 1)]
    if kind != "buffers":
        parts = [f"{part}.{name}" for part in parts for name in ("up", "down")]
    assert names == set(parts)


def test_storages_know_the_module_that_made_them(trained, trace) -> None:
    names = {s.module for s in trace.storages if s.op == "addmm"}
    assert names == {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}
    assert {s.module for s in trace.storages if s.op == "relu"} == {"blocks.0", "blocks.1"}


def test_parts_that_are_computed_again_keep_their_names(trace) -> None:
    net = Net(checkpointing=True)
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    again = {s.module for s in trace.storages if s.op == "addmm" and s.phase == "backward"}
    assert again == {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}
    assert trace.module_depth == 0
    assert not trace.modules


def test_what_is_computed_again_is_no_activation(trace) -> None:
    net = Net(checkpointing=True)
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    kept = [s for s in trace.storages if trace.kind_of(s) == "activations"]
    assert {s.phase for s in kept} == {"forward"}
    # The inputs of the blocks, which checkpoints keep, and the result.
    assert sum(s.nbytes for s in kept) <= 3 * 8 * 16 * 4 + 4


class Failing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4, device=DEVICE)
        self.fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.fails:
            raise ArithmeticError
        return x


def test_an_error_in_a_module_leaves_the_depth_right(trace) -> None:
    net = torch.nn.Sequential(Failing())
    with pytest.raises(ArithmeticError):
        net(torch.ones(2, 4, device=DEVICE))
    assert trace.module_depth == 0
    assert not trace.modules
    net[0].fails = False
    net(torch.ones(2, 4, device=DEVICE))
    assert trace.storages[-1].module == "0.inner"


def test_an_error_in_a_step_leaves_the_phase_right(trace) -> None:
    weight = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    torch.nn.Linear(4, 4, device=DEVICE)(torch.ones(1, 4, device=DEVICE))
    assert trace.storages[-1].phase == "forward"


def test_hooks_are_gone_after_the_block() -> None:
    from autotune.virtual.observe import observed
    from autotune.virtual.trace import Trace

    other = Trace()
    with observed(other):
        pass
    torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert other.module_depth == 0
    assert not other.storages
