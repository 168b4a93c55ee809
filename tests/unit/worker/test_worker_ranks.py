from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.probe.result import Outcome, ProbeResult
from autotune.testing import processes
from autotune.worker import tasks
from autotune.worker.ranks import Watch, has_failed

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process in a session of its own, as torchrun starts a rank."""
    process = subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def make_rank(folder: Path, rank: int, *, pid: int | None = None) -> Path:
    place = tasks.rank_folder(folder, rank)
    place.mkdir()
    if pid is not None:
        tasks.write_json(place / tasks.PID, pid)
    return place


def answer(place: Path, outcome: Outcome) -> None:
    result = ProbeResult(probe_id="0001", outcome=outcome).to_dict()
    tasks.write_json(place / "answer.json", {"ok": {"result": result}})


def test_an_answer_tells_whether_a_rank_failed(tmp_path: Path) -> None:
    place = make_rank(tmp_path, 0)
    assert has_failed(place) is None
    answer(place, Outcome.OK)
    assert has_failed(place) is False
    answer(place, Outcome.DEVICE_OOM)
    assert has_failed(place) is True
    tasks.write_json(place / "answer.json", {"error": {"type": "UsageError"}})
    assert has_failed(place) is True
    (place / "answer.json").write_text("half a")
    assert has_failed(place) is None


def test_the_first_failure_ends_the_others_after_the_grace(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    make_rank(tmp_path, 0, pid=sleeper.pid)
    failing = make_rank(tmp_path, 1)
    watch = Watch(tmp_path, 2, grace_s=0.3)
    watch.look()
    assert sleeper.poll() is None
    answer(failing, Outcome.DEVICE_OOM)
    watch.look()
    assert sleeper.poll() is None
    time.sleep(0.35)
    watch.look()
    assert sleeper.wait(5) == -signal.SIGKILL
    first, second = watch.endings({0: -signal.SIGKILL, 1: 75})
    # What this process killed has no say in what went wrong.
    assert first["signal"] is None
    assert first["max_resident_bytes"] > 1 << 20
    assert second["exit_code"] == 75


def test_those_that_go_on_are_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    make_rank(tmp_path, 0, pid=sleeper.pid)
    answer(make_rank(tmp_path, 1), Outcome.OK)
    watch = Watch(tmp_path, 2, grace_s=0.0)
    watch.look()
    watch.look()
    assert sleeper.poll() is None


def test_a_rank_that_dies_without_a_word_has_failed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    ended.wait()
    make_rank(tmp_path, 0, pid=sleeper.pid)
    make_rank(tmp_path, 1, pid=ended.pid)
    watch = Watch(tmp_path, 2, grace_s=0.0)
    watch.look()
    assert sleeper.wait(5) == -signal.SIGKILL
    assert watch.endings({})[1]["ended_at"] is not None


def test_a_number_that_is_somebody_else_s_is_not_killed(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c',"
        " 'import time; time.sleep(60)'], stdout=-3, stderr=-3).pid)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    stranger = int(made.stdout)
    try:
        make_rank(tmp_path, 0, pid=stranger)
        answer(make_rank(tmp_path, 1), Outcome.CRASHED)
        watch = Watch(tmp_path, 2, grace_s=0.0)
        watch.look()
        assert processes.is_alive(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_what_torchrun_asked_to_end_has_no_say(tmp_path: Path) -> None:
    make_rank(tmp_path, 0)
    (seen,) = Watch(tmp_path, 1).endings({0: -signal.SIGTERM})
    assert seen["signal"] is None
    assert seen["exit_code"] is None
