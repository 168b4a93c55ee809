from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual import cards
from autotune.virtual.api import session_for
from autotune.virtual.plans import Plan, make_plan
from autotune.virtual.session import Session
from autotune.virtual.trace import Trace

aten = torch.ops.aten
WORKSPACE = 8_519_680


class Fixed:
    """Stands for a roofline: every kind of work has its own price."""

    def op_seconds(self, plan: Any, flops: float) -> float:
        return flops

    def matmul_seconds(self, flops: float, moved_bytes: float, dtype: Any) -> float:
        return 100.0

    def move_seconds(self, moved_bytes: float) -> float:
        return 10.0

    def link_seconds(self, nbytes: float) -> float:
        return 1.0


@pytest.fixture
def phase(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list whose last item is the phase that the trace tells."""
    phases = ["load"]
    monkeypatch.setattr(Trace, "phase", lambda trace: phases[-1])
    return phases


def product(size: int = 64) -> Plan:
    pair = [torch.empty(size, size, device="meta") for _ in range(2)]
    return make_plan(aten.mm.default, tuple(pair), {})


def workspaces(session: Session) -> list[str]:
    found = [item for item in session.trace.storages if item.kind == "workspaces"]
    assert all(item.nbytes == WORKSPACE for item in found)
    return [item.phase for item in found]


def test_each_direction_takes_one_workspace(phase: list[str]) -> None:
    session = Session(workspace_bytes=WORKSPACE)
    tensor = torch.empty(8, device="meta")
    session.charge(make_plan(aten.add.Tensor, (tensor, tensor), {}))
    assert workspaces(session) == []
    for name in ("forward", "forward", "backward", "backward", "optimizer", "forward"):
        phase.append(name)
        session.charge(product())
    assert workspaces(session) == ["forward", "backward"]
    assert session.trace.allocated_bytes == 2 * WORKSPACE


def test_a_library_without_workspaces_takes_none(phase: list[str]) -> None:
    session = Session()
    session.charge(product())
    assert session.trace.storages == []


def test_a_training_step_holds_two_workspaces(session: Any) -> None:
    session._workspace_bytes = WORKSPACE
    linear = torch.nn.Linear(64, 64, device="virtual")
    for _ in range(2):
        linear(torch.ones(8, 64, device="virtual")).sum().backward()
    assert workspaces(session) == ["forward", "backward"]


def test_costs_are_kept_by_phase(phase: list[str]) -> None:
    session = Session(roofline=Fixed())
    plan = product()
    session.charge(plan)
    phase.append("forward")
    session.charge(plan)
    session.charge(plan)
    session.charge_move("copy", 50.0)
    session.charge_link(70.0)
    phase.append("backward")
    session.charge_matmul(1000.0, 30.0, torch.int8)
    costs = session.trace.costs
    assert set(costs) == {"load", "forward", "backward"}
    assert costs["load"].flops == plan.flops
    forward = costs["forward"]
    assert (forward.num_ops, forward.flops) == (4, 2 * plan.flops)
    assert forward.moved_bytes == 2 * plan.moved_bytes + 50.0
    assert forward.link_bytes == 70.0
    assert forward.seconds == pytest.approx(2 * plan.flops + 11.0)
    backward = costs["backward"]
    assert (backward.num_ops, backward.flops, backward.seconds) == (1, 1000.0, 100.0)


def test_work_is_counted_without_a_card(phase: list[str]) -> None:
    session = Session()
    session.charge(product())
    session.charge_move("copy", 1.0)
    session.charge_link(1.0)
    session.charge_matmul(1.0, 1.0, torch.int8)
    (cost,) = session.trace.costs.values()
    assert cost.num_ops == 4
    assert cost.seconds == 0.0


def test_scratch_is_taken_beside_the_results_and_given_back(phase: list[str]) -> None:
    plan = product()._replace(scratch_bytes=(1024, 512))
    for takes in (True, False):
        session = Session(scratch=takes)
        session.charge_scratch(plan)
        assert session.trace.peak_bytes == (1536 if takes else 0)
        assert session.trace.allocated_bytes == 0


def test_a_session_has_the_cards_facts() -> None:
    card = cards.find("t4")
    session = session_for(card)
    assert session.capability == (7, 5)
    assert not session.supports_bf16
    assert (session.name, session.total_bytes) == ("Tesla T4", card.memory_bytes)
    assert session.multiprocessors == 40
    session.charge(product())
    (storage,) = session.trace.storages
    assert storage.nbytes == card.cublas_workspace_bytes
