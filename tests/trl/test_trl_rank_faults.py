"""Every way one of a probe's processes can end: one outcome, and no process left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.executors.subprocess import SubprocessExecutor
from autotune.probe import accelerate_config
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.testing import faults, processes
from autotune.worker import tasks

pytestmark = pytest.mark.trl

MIB = 1 << 20
PRELOAD = ("torch", "accelerate", "autotune.devices.cpu")
ENDED_WITHIN_S = 10.0


@dataclass(frozen=True)
class Fault:
    adapter: type[faults.Finishes]
    ending: Outcome
    says: str = ""
    budget_bytes: int | None = None
    timeout_s: float = 120.0


FAULTS = (
    Fault(faults.RankOutOfMemory, Outcome.DEVICE_OOM, says="process 1 of 2"),
    Fault(faults.RankFillsMemory, Outcome.DEVICE_OOM, says="process 1", budget_bytes=450 * MIB),
    Fault(faults.RankKilledWhenFull, Outcome.HOST_OOM, says="SIGKILL", budget_bytes=450 * MIB),
    Fault(faults.RankKilled, Outcome.LOST, says="process 1 of 2: killed by SIGKILL"),
    Fault(faults.RankSegfaults, Outcome.CRASHED, says="process 1 of 2: killed by SIGSEGV"),
    Fault(faults.RankRaises, Outcome.CRASHED, says="shapes do not match"),
    Fault(faults.RankDiverges, Outcome.DIVERGED, says="process 1 of 2"),
    Fault(faults.RankLeavesAtOnce, Outcome.CRASHED, says="process 1 of 2 left no result"),
    Fault(faults.RankHangs, Outcome.TIMEOUT, says="in the first step", timeout_s=12.0),
)


@pytest.fixture(scope="module")
def pair() -> Iterator[SubprocessExecutor]:
    executor = SubprocessExecutor(("cpu",), processes=2, launch="fork", preload=PRELOAD)
    yield executor
    executor.shutdown()


def make_spec(folder: Path, adapter: type[faults.Finishes], **fields: object) -> ProbeSpec:
    values = {
        "probe_id": folder.name,
        "folder": str(folder),
        "trainer": f"autotune.testing.faults:{adapter.__name__}",
        "config": {},
        "device": "cpu",
        "measured_steps": 2,
        "timeout_s": 120.0,
        "processes": 2,
        "accelerate": accelerate_config.written("ddp", device_kind="cpu", processes=2),
        **fields,
    }
    return ProbeSpec(**values)  # type: ignore[arg-type]


def pids(folder: Path) -> list[int]:
    return sorted(tasks.rank_pids(folder))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.adapter.__name__)
def test_one_process_decides_for_all(
    pair: SubprocessExecutor, tmp_path: Path, fault: Fault
) -> None:
    folder = tmp_path / "0001"
    spec = make_spec(
        folder,
        fault.adapter,
        memory_budget_bytes=fault.budget_bytes,
        timeout_s=fault.timeout_s,
    )
    result = pair.submit(spec).result(180)
    ended_at = time.time()
    assert result.outcome is fault.ending, result
    assert fault.says in result.detail
    assert result.measurement is None
    assert len(pids(folder)) == 2
    assert not [pid for pid in pids(folder) if processes.is_alive(pid)]
    if fault.ending is not Outcome.TIMEOUT:
        # From the failure, not from the start: a fresh interpreter takes seconds to import.
        answers = [tasks.rank_folder(folder, rank) / "answer.json" for rank in (0, 1)]
        failed_at = min(
            [path.stat().st_mtime for path in answers if path.exists()], default=ended_at
        )
        assert ended_at - failed_at < ENDED_WITHIN_S
    assert json.loads((folder / "result.json").read_text())["outcome"] == fault.ending.value


def test_two_processes_are_measured_as_one(pair: SubprocessExecutor, tmp_path: Path) -> None:
    folder = tmp_path / "0001"
    result = pair.submit(make_spec(folder, faults.Finishes)).result(180)
    assert result.outcome is Outcome.OK, result
    measurement = result.measurement
    assert measurement is not None
    assert measurement.num_processes == 2
    assert [step.num_tokens for step in measurement.steps] == [60, 60]
    assert [step.num_tokens for step in measurement.ranks[1].steps] == [30, 30]
    assert measurement.peak_bytes == max(rank.peak_bytes for rank in measurement.ranks)
    assert len(pids(folder)) == 2


def test_a_config_that_starts_one_process_is_refused(
    pair: SubprocessExecutor, tmp_path: Path
) -> None:
    config = accelerate_config.written("ddp", device_kind="cpu", processes=2)
    spec = make_spec(
        tmp_path / "0001", faults.Finishes, accelerate={**config, "distributed_type": "MULTI_CPU"}
    )
    with pytest.raises(UsageError, match="started 1 process with this configuration, not 2"):
        pair.submit(spec).result(180)


def test_what_accelerate_refuses_is_told(pair: SubprocessExecutor, tmp_path: Path) -> None:
    config = accelerate_config.written("ddp", device_kind="cpu", processes=2)
    spec = make_spec(tmp_path / "0001", faults.Finishes, accelerate={**config, "no_such_key": 1})
    result = pair.submit(spec).result(180)
    assert result.outcome is Outcome.CRASHED
    assert "no_such_key" in result.detail


def test_shutting_down_ends_all_processes(tmp_path: Path) -> None:
    executor = SubprocessExecutor(("cpu",), processes=2, launch="fork", preload=PRELOAD)
    folder = tmp_path / "0001"
    try:
        executor.submit(make_spec(folder, faults.RankHangs))
        deadline = time.monotonic() + 60
        started = [tasks.rank_folder(folder, rank) / faults.GROUP_FILE for rank in (0, 1)]
        while not all(path.exists() for path in started):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        executor.shutdown()
    assert processes.wait_until_gone(*pids(folder), within_s=ENDED_WITHIN_S)
