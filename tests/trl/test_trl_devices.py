"""The CPU's memory limit: how much more than its budget a process may reserve."""

from __future__ import annotations

import resource

import pytest

from autotune.devices import cpu, host
from autotune.units import GIB, MIB

pytestmark = pytest.mark.trl

RESIDENT, RESERVED = 500 * MIB, 900 * MIB


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return what the process's limit would be set to; it is left alone."""
    found: list[tuple[int, int]] = []
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(cpu, "_start_threads", lambda: None)
    memory = {"VmRSS": RESIDENT, "VmData": RESERVED}
    monkeypatch.setattr(host, "process_memory", lambda: memory)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (infinity, infinity))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: found.append(values))
    return found


def test_the_limit_leaves_room_for_what_is_reserved_and_never_resident(
    limits: list[tuple[int, int]],
) -> None:
    cpu.CpuDevice().limit_memory(RESIDENT + GIB)
    ((soft, _),) = limits
    growth = soft - RESERVED - host.MALLOC_PAD_BYTES
    # A candidate that fits was seen to reserve up to 1.4 times what became resident.
    assert 1.4 * GIB < growth < 2 * GIB
    assert growth == int(GIB * cpu._RESERVED_PER_RESIDENT)


def test_the_slack_grows_with_the_budget_s_growth_alone(limits: list[tuple[int, int]]) -> None:
    device = cpu.CpuDevice()
    for mebibytes in (1, 101, 201):
        device.limit_memory(RESIDENT + mebibytes * MIB)
    steps = [limits[index + 1][0] - limits[index][0] for index in range(2)]
    assert steps == pytest.approx([160 * MIB, 160 * MIB], abs=2)


def test_a_lower_limit_of_the_system_stays(
    limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (GIB, GIB))
    cpu.CpuDevice().limit_memory(RESIDENT + 8 * GIB)
    assert limits == [(GIB, GIB)]


@pytest.mark.parametrize("budget", [RESIDENT, RESIDENT - 1, 50 * MIB])
def test_a_budget_that_is_used_up_sets_no_limit(
    budget: int, limits: list[tuple[int, int]]
) -> None:
    with pytest.raises(MemoryError, match="before a model is loaded"):
        cpu.CpuDevice().limit_memory(budget)
    assert limits == []
