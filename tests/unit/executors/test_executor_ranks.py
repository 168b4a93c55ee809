from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import PrerequisiteError
from autotune.executors import evidence, ranks
from autotune.executors.evidence import Ending
from autotune.executors.logs import EVENTS, STDERR
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.testing.fakes import FakeExecutor
from autotune.worker import tasks

GIB = 1 << 30
SMALL = {"per_device_train_batch_size": 1}
LAUNCHED = Ending(asked_at=0.0, exit_code=0)
SILENT: Mapping[str, Any] = {
    "exit_code": None,
    "signal": None,
    "max_resident_bytes": GIB,
    "ended_at": 100.0,
}


def died(number: int = signal.SIGKILL, **fields: Any) -> dict[str, Any]:
    return {**SILENT, "signal": int(number), **fields}


def make_spec(folder: Path, **fields: Any) -> ProbeSpec:
    values: dict[str, Any] = {"trainer": "sft", "config": SMALL, "device": "cpu", "processes": 2}
    return ProbeSpec(probe_id="0001", folder=str(folder), **{**values, **fields})


def answer(
    folder: Path, rank: int, outcome: Outcome, *, at: float = 100.0, detail: str = ""
) -> None:
    """Leave a rank's answer, written at a time."""
    place = tasks.rank_folder(folder, rank)
    place.mkdir(parents=True, exist_ok=True)
    fault = None if outcome is Outcome.OK else outcome
    own = make_spec(place, processes=1)
    result = FakeExecutor(fault=lambda spec: fault).submit(own).result()
    data = {**result.to_dict(), "detail": detail}
    tasks.write_json(place / "answer.json", {"ok": {"result": data}})
    os.utime(place / "answer.json", (at, at))


def launched(folder: Path, *seen: Mapping[str, Any], said: str = "") -> None:
    """Leave the launcher's answer."""
    for rank in range(2):
        tasks.rank_folder(folder, rank).mkdir(parents=True, exist_ok=True)
    endings = [dict(item) for item in seen] or [dict(SILENT)] * 2
    tasks.write_json(folder / "answer.json", {"ok": {"ranks": endings, "launcher": said}})


def decide(folder: Path, ending: Ending = LAUNCHED, **fields: Any) -> ProbeResult:
    return ranks.decide(make_spec(folder, **fields), ending)


def test_all_that_finished_are_one_measurement(tmp_path: Path) -> None:
    launched(tmp_path)
    answer(tmp_path, 0, Outcome.OK)
    answer(tmp_path, 1, Outcome.OK)
    result = decide(tmp_path)
    assert result.outcome is Outcome.OK
    assert result.probe_id == "0001"
    assert result.measurement is not None
    assert result.measurement.num_processes == 2
    assert ProbeResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


@pytest.mark.parametrize("oom", [Outcome.DEVICE_OOM, Outcome.HOST_OOM])
@pytest.mark.parametrize("other", [Outcome.CRASHED, Outcome.OK, Outcome.UNSUPPORTED])
def test_out_of_memory_decides_whatever_came_before(
    tmp_path: Path, oom: Outcome, other: Outcome
) -> None:
    launched(tmp_path)
    answer(tmp_path, 0, other, at=90.0)
    answer(tmp_path, 1, oom, at=95.0, detail="needs more")
    result = decide(tmp_path)
    assert result.outcome is oom
    assert result.measurement is None
    assert result.detail == "process 1 of 2: needs more"
    assert result.evidence["rank"] == 1


def test_the_first_failure_decides_over_those_that_it_caused(tmp_path: Path) -> None:
    launched(tmp_path)
    answer(tmp_path, 0, Outcome.CRASHED, at=100.2, detail="Connection closed by peer")
    answer(tmp_path, 1, Outcome.DIVERGED, at=100.0, detail="nan")
    assert decide(tmp_path).detail == "process 1 of 2: nan"


def test_a_kill_decides_over_the_loss_of_the_peer(tmp_path: Path) -> None:
    launched(tmp_path, SILENT, died(ended_at=100.1))
    answer(tmp_path, 0, Outcome.CRASHED, at=100.0, detail="Connection closed by peer")
    result = decide(tmp_path)
    assert result.outcome is Outcome.LOST
    assert "process 1 of 2: killed by SIGKILL" in result.detail


def test_a_kill_near_the_budget_is_out_of_memory_of_the_host(tmp_path: Path) -> None:
    launched(tmp_path, SILENT, died(max_resident_bytes=2 * GIB))
    answer(tmp_path, 0, Outcome.CRASHED)
    assert decide(tmp_path, memory_budget_bytes=2 * GIB).outcome is Outcome.HOST_OOM
    assert decide(tmp_path, memory_budget_bytes=4 * GIB).outcome is Outcome.LOST


def test_a_rank_that_was_ended_for_another_has_no_say(tmp_path: Path) -> None:
    launched(tmp_path, SILENT, {**SILENT, "exit_code": 3})
    (tasks.rank_folder(tmp_path, 1) / STDERR).write_text("the library gave up\n")
    result = decide(tmp_path)
    assert result.outcome is Outcome.CRASHED
    assert result.detail.startswith("process 1 of 2: ended with exit code 3")
    assert "gave up" in result.detail


def test_an_error_of_one_is_raised(tmp_path: Path) -> None:
    launched(tmp_path)
    answer(tmp_path, 0, Outcome.CRASHED)
    error = {"type": "PrerequisiteError", "message": "The disk is full.", "hint": "Free some."}
    tasks.write_json(tasks.rank_folder(tmp_path, 1) / "answer.json", {"error": error})
    with pytest.raises(PrerequisiteError, match="disk is full"):
        decide(tmp_path)


def test_what_accelerate_said_is_told(tmp_path: Path) -> None:
    launched(tmp_path, said="ValueError: unknown key")
    result = decide(tmp_path)
    assert result.outcome is Outcome.CRASHED
    assert result.detail == "accelerate launch: ValueError: unknown key"


def test_a_rank_without_a_result_is_named(tmp_path: Path) -> None:
    launched(tmp_path)
    answer(tmp_path, 0, Outcome.OK)
    result = decide(tmp_path)
    assert result.outcome is Outcome.CRASHED
    assert "process 1 of 2 left no result" in result.detail


def test_a_time_limit_tells_where_the_slowest_was(tmp_path: Path) -> None:
    for rank, phases in enumerate((["load", "first_step"], ["load"])):
        place = tasks.rank_folder(tmp_path, rank)
        place.mkdir()
        lines = [json.dumps({"phase": name}) + "\n" for name in phases]
        (place / EVENTS).write_text("".join(lines))
    result = decide(tmp_path, Ending(asked_at=0.0, signal=9, timed_out_after_s=5.0))
    assert result.outcome is Outcome.TIMEOUT
    assert result.phase == "load"
    assert result.detail.startswith("process 1 of 2: not done after 5 s")


def test_answers_count_though_the_launcher_died(tmp_path: Path) -> None:
    answer(tmp_path, 0, Outcome.DEVICE_OOM)
    assert decide(tmp_path, Ending(asked_at=0.0, signal=9)).outcome is Outcome.DEVICE_OOM


def test_a_folder_that_is_used_again_is_cleared(tmp_path: Path) -> None:
    answer(tmp_path, 0, Outcome.OK)
    evidence.write_request(make_spec(tmp_path), asked_at=0.0)
    assert not tasks.rank_folder(tmp_path, 0).exists()
