"""Every way a run can end, on every executor: each cell names one outcome."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.errors import AutotuneError, ExecutorError, PrerequisiteError
from autotune.executors.base import Executor
from autotune.executors.inprocess import InProcessExecutor
from autotune.executors.subprocess import SubprocessExecutor
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.testing import faults, processes

pytest.importorskip("torch")

MIB = 1 << 20
EXECUTORS: dict[str, Callable[[], Executor]] = {
    "fork": lambda: SubprocessExecutor(launch="fork", preload=("torch", "autotune.devices.cpu")),
    "spawn": lambda: SubprocessExecutor(("cpu", "cpu"), launch="spawn", preload=()),
    "inprocess": InProcessExecutor,
}
# A forked probe is at its first step at once; a fresh interpreter imports PyTorch first.
HANG_S = {"fork": 1.0, "spawn": 5.0}


@dataclass(frozen=True)
class Fault:
    """One row: the adapter, its cell (outcome or error), and where it can be survived."""

    adapter: type[faults.Finishes]
    ending: Outcome | type[AutotuneError]
    survivable: bool = False
    budget_bytes: int | None = None
    hangs: bool = False
    phase: str | None = "first_step"
    says: str = ""


FAULTS = (
    Fault(faults.Finishes, Outcome.OK, survivable=True, phase="later_steps"),
    Fault(faults.FillsMemory, Outcome.DEVICE_OOM, budget_bytes=450 * MIB),
    Fault(faults.RaisesOutOfMemory, Outcome.DEVICE_OOM, survivable=True),
    Fault(
        faults.AbortsOutOfMemory,
        Outcome.DEVICE_OOM,
        budget_bytes=2048 * MIB,
        says="std::bad_alloc",
    ),
    Fault(faults.KilledWhenFull, Outcome.HOST_OOM, budget_bytes=450 * MIB, says="SIGKILL"),
    Fault(faults.Hangs, Outcome.TIMEOUT, hangs=True, says="in the first step"),
    Fault(faults.HangsDeaf, Outcome.TIMEOUT, hangs=True, says="in the first step"),
    Fault(faults.LosesItself, Outcome.DIVERGED, survivable=True),
    Fault(faults.RefusesConfig, Outcome.UNSUPPORTED, survivable=True, phase="load"),
    Fault(faults.Raises, Outcome.CRASHED, survivable=True, says="shapes do not match"),
    Fault(faults.Segfaults, Outcome.CRASHED, says="SIGSEGV"),
    Fault(faults.Aborts, Outcome.CRASHED, says="SIGABRT"),
    Fault(faults.ExitsWithError, Outcome.CRASHED, says="exit code 3"),
    Fault(faults.LeavesEarly, Outcome.CRASHED, survivable=True, says="no result"),
    Fault(faults.LeavesAtOnce, Outcome.CRASHED, says="no result"),
    Fault(faults.WritesHalf, Outcome.CRASHED, says="no result"),
    Fault(faults.WritesNonsense, Outcome.CRASHED, says="no result"),
    Fault(faults.ClosesOutput, Outcome.CRASHED, says="nobody can hear this"),
    Fault(faults.KilledFromOutside, Outcome.LOST, says="no sign of memory pressure"),
    Fault(faults.DiesWithGrandchild, Outcome.LOST),
    Fault(faults.LeavesGrandchild, Outcome.OK, phase="later_steps"),
    Fault(faults.LeavesDaemon, Outcome.OK, phase="later_steps"),
    Fault(faults.Babbles, Outcome.OK, survivable=True, phase="later_steps"),
    Fault(faults.DiskFull, PrerequisiteError, survivable=True),
    Fault(faults.CannotAnswer, ExecutorError),
)


@dataclass
class Cell:
    """What was seen of one probe, at the moment its future was resolved."""

    folder: Path
    future: Future[ProbeResult]
    members_left: list[int]


def make_spec(folder: Path, fault: Fault, *, timeout_s: float = 120.0) -> ProbeSpec:
    return ProbeSpec(
        probe_id=folder.name,
        folder=str(folder),
        trainer=f"autotune.testing.faults:{fault.adapter.__name__}",
        config={},
        device="cpu",
        memory_budget_bytes=fault.budget_bytes,
        measured_steps=2,
        timeout_s=timeout_s,
    )


class Matrix:
    """Runs the probes of one executor in order, ahead of the tests that look at them."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.executor = EXECUTORS[name]()
        self.rows = [fault for fault in FAULTS if name != "inprocess" or fault.survivable]
        self.root = root
        self.cells: dict[type[faults.Finishes], Cell] = {}
        self.cells_after: list[Cell] = []
        for fault in self.rows:
            self.cells[fault.adapter] = self.submit(fault)
            # A fresh interpreter takes a second to import PyTorch: there, the rows after it do.
            if name != "spawn" or fault is FAULTS[-1]:
                suffix = f"-after-{fault.adapter.__name__}"
                self.cells_after.append(self.submit(FAULTS[0], suffix))

    def submit(self, fault: Fault, suffix: str = "") -> Cell:
        folder = self.root / f"{fault.adapter.__name__}{suffix}"
        timeout_s = HANG_S[self.name] if fault.hangs else 120.0
        future = self.executor.submit(make_spec(folder, fault, timeout_s=timeout_s))
        cell = Cell(folder, future, [])

        def look(_: Future[ProbeResult]) -> None:
            group = json.loads((folder / faults.GROUP_FILE).read_text())
            cell.members_left = processes.members(group["pgid"])
            # With a neighbour running, whose child a stray is can't be told until both ended.
            if self.executor.slots == 1:
                cell.members_left += [pid for pid in group["pids"] if processes.is_alive(pid)]

        if self.name != "inprocess":
            future.add_done_callback(look)
        return cell


@pytest.fixture(scope="module", params=EXECUTORS)
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    matrix = Matrix(request.param, tmp_path_factory.mktemp(request.param))
    yield matrix
    matrix.executor.shutdown()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.adapter.__name__)
def test_each_cell_names_one_ending(matrix: Matrix, fault: Fault) -> None:
    if fault.adapter not in matrix.cells:
        pytest.skip("can't be survived without a process of its own")
    cell = matrix.cells[fault.adapter]

    if not isinstance(fault.ending, Outcome):
        with pytest.raises(fault.ending):
            cell.future.result(120)
        assert cell.members_left == []
        return
    result = cell.future.result(120)
    assert result.outcome is fault.ending, result
    assert fault.says in result.detail
    assert result.phase == fault.phase or (matrix.name == "inprocess" and result.phase is None)
    assert (result.measurement is not None) == (fault.ending is Outcome.OK)
    assert cell.members_left == []
    stored = json.loads((cell.folder / "result.json").read_text())
    assert ProbeResult.from_dict(stored) == result
    assert ProbeSpec.from_dict(json.loads((cell.folder / "spec.json").read_text())).device == "cpu"
    assert result.timeline.total_s is not None


def test_the_executor_is_usable_after_each(matrix: Matrix) -> None:
    outcomes = {cell.folder.name: cell.future.result(120).outcome for cell in matrix.cells_after}
    assert set(outcomes.values()) == {Outcome.OK}, outcomes


def test_a_hang_says_where(matrix: Matrix) -> None:
    if matrix.name == "inprocess":
        pytest.skip("no time limit in the same process")
    result = matrix.cells[faults.Hangs].future.result(120)
    assert result.traceback is not None
    assert "in _go_wrong" in result.traceback
