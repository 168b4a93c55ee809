"""The executor contract, and what processes promise beyond it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ExecutorError, PrerequisiteError, UsageError
from autotune.executors.base import Executor
from autotune.executors.inprocess import InProcessExecutor
from autotune.executors.subprocess import SubprocessExecutor
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.testing import processes
from autotune.testing.fakes import FakeExecutor

TASKS = "autotune.testing.tasks"
WAIT_S = 30.0


def fork(**options: Any) -> SubprocessExecutor:
    return SubprocessExecutor(**{"launch": "fork", "preload": (), **options})


def spawn(**options: Any) -> SubprocessExecutor:
    return SubprocessExecutor(**{"launch": "spawn", "preload": (), **options})


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "fork": fork,
    "spawn": spawn,
    "inprocess": InProcessExecutor,
}


@pytest.fixture(scope="module", params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    executor = EXECUTORS[request.param]()
    yield executor
    executor.shutdown()


@pytest.fixture
def made() -> Iterator[Callable[..., SubprocessExecutor]]:
    """Make executors that are shut down after the test."""
    everyone: list[SubprocessExecutor] = []

    def make(**options: Any) -> SubprocessExecutor:
        everyone.append(fork(**options))
        return everyone[-1]

    yield make
    for item in everyone:
        item.shutdown()


def make_spec(folder: Path, **fields: Any) -> ProbeSpec:
    values: dict[str, Any] = {
        "probe_id": "0001",
        "folder": str(folder),
        "trainer": "autotune.testing.faults:Hangs",
        "config": {},
        "device": "cpu",
    }
    return ProbeSpec(**{**values, **fields})


def wait_for_file(path: Path) -> str:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.01)
    return path.read_text()


def run_sleep(
    executor: Executor, file: Path, **options: Any
) -> tuple[threading.Thread, list[Any]]:
    """Run the sleeping task in a thread; return the thread and where its error will be."""
    errors: list[Any] = []

    def run() -> None:
        try:
            executor.run_task(
                f"{TASKS}:sleep", {"file": str(file)}, timeout_s=options.get("timeout_s", 60)
            )
        except ExecutorError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


# --- the contract -------------------------------------------------------------------------------


def test_a_task_answers(executor: Executor) -> None:
    answer = executor.run_task(f"{TASKS}:echo", {"a": [1, None, "x"]}, timeout_s=WAIT_S)
    assert answer["request"] == {"a": [1, None, "x"]}


def test_a_task_raises_its_own_error(executor: Executor) -> None:
    with pytest.raises(PrerequisiteError) as caught:
        executor.run_task(f"{TASKS}:refuse", {}, timeout_s=WAIT_S)
    assert caught.value.hint == "Log in."


def test_any_other_error_of_a_task_is_shown(executor: Executor) -> None:
    with pytest.raises(ExecutorError, match="nobody expects this"):
        executor.run_task(f"{TASKS}:fail", {}, timeout_s=WAIT_S)


def test_the_environment_of_a_task_is_its_own(executor: Executor) -> None:
    request = {"names": ["AUTOTUNE_TEST"], "process_env": {"AUTOTUNE_TEST": "yes"}}
    answer = executor.run_task(f"{TASKS}:environment", request, timeout_s=WAIT_S)
    assert answer["values"] == {"AUTOTUNE_TEST": "yes"}
    assert "AUTOTUNE_TEST" not in os.environ


def test_probes_tell_the_hub_nothing(executor: Executor) -> None:
    request = {"names": ["HF_HUB_DISABLE_TELEMETRY"]}
    answer = executor.run_task(f"{TASKS}:environment", request, timeout_s=WAIT_S)
    assert answer["values"] == {"HF_HUB_DISABLE_TELEMETRY": "1"}


def test_a_folder_that_cannot_be_made_is_no_verdict(executor: Executor, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    future = executor.submit(make_spec(tmp_path / "file" / "0001"))
    with pytest.raises(ExecutorError, match="can't be written"):
        future.result(WAIT_S)


@pytest.mark.parametrize("make", [*EXECUTORS.values(), FakeExecutor])
def test_after_shutdown_nothing_is_taken(make: Callable[[], Executor], tmp_path: Path) -> None:
    executor = make()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(ExecutorError, match="shut down"):
        executor.submit(make_spec(tmp_path))


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", ["fork", "spawn"])
def test_slots_run_at_the_same_time(
    launch: str, made: Callable[..., SubprocessExecutor], tmp_path: Path
) -> None:
    executor = made(devices=("cpu", "cpu"), launch=launch)
    assert executor.slots == 2
    request = {"folder": str(tmp_path), "parties": 2}
    pids: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: pids.append(
                executor.run_task(f"{TASKS}:meet", request, timeout_s=WAIT_S)["pid"]
            )
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pids)) == 2


@pytest.mark.parametrize("launch", ["fork", "spawn"])
def test_a_timeout_ends_the_group(
    launch: str, made: Callable[..., SubprocessExecutor], tmp_path: Path
) -> None:
    executor = made(launch=launch)
    with pytest.raises(ExecutorError, match=r"not done after 1 s"):
        executor.run_task(f"{TASKS}:sleep", {"file": str(tmp_path / "pids")}, timeout_s=1.0)
    pid, grandchild, _ = map(int, (tmp_path / "pids").read_text().split())
    assert not processes.is_alive(pid)
    assert not processes.is_alive(grandchild)


@pytest.mark.parametrize("launch", ["fork", "spawn"])
def test_a_dead_server_takes_its_probes_along_and_is_replaced(
    launch: str, made: Callable[..., SubprocessExecutor], tmp_path: Path
) -> None:
    executor = made(launch=launch)
    thread, errors = run_sleep(executor, tmp_path / "pids")
    pid, grandchild, server = map(int, wait_for_file(tmp_path / "pids").split())

    os.kill(server, signal.SIGKILL)
    thread.join(WAIT_S)

    assert "its server died" in str(errors[0])
    assert processes.wait_until_gone(pid, grandchild, within_s=5)
    assert executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S)["parent_pid"] != server


def test_a_probe_whose_server_died_is_lost(
    made: Callable[..., SubprocessExecutor], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    executor = made()
    server = executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S)["parent_pid"]
    future = executor.submit(make_spec(tmp_path))
    wait_for_file(tmp_path / "group.json")
    os.kill(server, signal.SIGKILL)
    result = future.result(WAIT_S)
    assert result.outcome is Outcome.LOST
    assert result.evidence["server_lost"] is True
    assert (tmp_path / "result.json").exists()


def test_probes_side_by_side_know_it(
    made: Callable[..., SubprocessExecutor], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    executor = made(devices=("cpu", "cpu"), timeout_s=2.0)
    futures = [
        executor.submit(make_spec(tmp_path / name, probe_id=name)) for name in ("0001", "0002")
    ]
    results = [future.result(WAIT_S) for future in futures]
    assert [result.outcome for result in results] == [Outcome.TIMEOUT, Outcome.TIMEOUT]
    assert [result.num_neighbours for result in results] == [1, 1]


@pytest.mark.parametrize("launch", ["fork", "spawn"])
def test_nothing_outlives_a_search_that_was_killed(launch: str, tmp_path: Path) -> None:
    code = (
        "import sys; from autotune.executors.subprocess import SubprocessExecutor\n"
        f"executor = SubprocessExecutor(launch={launch!r}, preload=())\n"
        f"executor.run_task('{TASKS}:sleep', {{'file': sys.argv[1]}}, timeout_s=60)\n"
    )
    search = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "pids")])
    pids = tuple(map(int, wait_for_file(tmp_path / "pids").split()))
    assert all(processes.is_alive(pid) for pid in pids)
    search.kill()
    search.wait()
    assert processes.wait_until_gone(*pids, within_s=5)


def test_nothing_outlives_an_executor_that_was_forgotten(tmp_path: Path) -> None:
    executor = fork()
    server = executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S)["parent_pid"]
    del executor
    gc.collect()
    assert processes.wait_until_gone(server, within_s=5)


def test_a_future_keeps_its_executor(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    future = fork(timeout_s=1.5).submit(make_spec(tmp_path))
    gc.collect()
    assert future.result(WAIT_S).outcome is Outcome.TIMEOUT


def test_shutdown_ends_what_runs_and_fails_what_waits(tmp_path: Path) -> None:
    executor = fork()
    thread, errors = run_sleep(executor, tmp_path / "pids")
    pids = tuple(map(int, wait_for_file(tmp_path / "pids").split()))
    waiting = executor.submit(make_spec(tmp_path / "0001"))
    executor.shutdown()
    thread.join(WAIT_S)
    assert "shut down" in str(errors[0])
    with pytest.raises(ExecutorError, match="shut down"):
        waiting.result(WAIT_S)
    assert not any(processes.is_alive(pid) for pid in pids)


def test_environments_have_servers_of_their_own_but_few(
    made: Callable[..., SubprocessExecutor],
) -> None:
    executor = made()

    def server(value: str) -> int:
        request = {"process_env": {"AUTOTUNE_TEST": value}}
        answer = executor.run_task(f"{TASKS}:echo", request, timeout_s=WAIT_S)
        return int(answer["parent_pid"])

    first, second = server("1"), server("2")
    assert first != second
    assert server("1") == first
    third = server("3")
    assert processes.wait_until_gone(second, within_s=5)  # unused for longest
    assert processes.is_alive(first)
    assert processes.is_alive(third)


# --- starting -----------------------------------------------------------------------------------


def test_a_server_that_cannot_start_says_why(
    made: Callable[..., SubprocessExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no interpreter today' >&2\nexit 3\n")
    python.chmod(0o755)
    executor = made()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        with pytest.raises(ExecutorError, match="no interpreter today"):
            executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S)
        patch.setattr(sys, "executable", str(tmp_path / "nothing"))
        with pytest.raises(ExecutorError, match="could not be started"):
            executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S)
    assert executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S)


def test_a_server_that_takes_too_long_is_given_up(
    made: Callable[..., SubprocessExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_import.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = made(preload=("slow_import",), start_timeout_s=0.5)
    with pytest.raises(ExecutorError, match="before it could start"):
        executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S)


@pytest.mark.parametrize("launch", ["fork", "auto"])
def test_a_missing_training_stack_is_a_prerequisite(
    launch: str,
    made: Callable[..., SubprocessExecutor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = made(launch=launch, preload=("torch",))
    with pytest.raises(PrerequisiteError, match=r"libcudart\.so\.13") as caught:
        executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S)
    assert caught.value.hint == "pip install 'trl-autotune[trl]'"


def test_where_a_fork_is_not_safe_probes_are_spawned(
    made: Callable[..., SubprocessExecutor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True, name='busy').start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    executor = made(launch="auto", preload=("starts_thread",))
    answers = [executor.run_task(f"{TASKS}:echo", {}, timeout_s=WAIT_S) for _ in range(2)]
    assert answers[0]["parent_pid"] == answers[1]["parent_pid"]
    with pytest.raises(ExecutorError, match="busy") as caught:
        made(launch="fork", preload=("starts_thread",)).run_task(
            f"{TASKS}:echo", {}, timeout_s=WAIT_S
        )
    assert "spawn" in caught.value.hint


def test_the_search_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, autotune.executors.subprocess, autotune.executors.base\n"
        "assert not {'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "device", "shown"),
    [(None, 1, "1"), ("4,7", 1, "7"), ("GPU-aa,GPU-bb", "cuda:0", "GPU-aa")],
)
def test_a_probe_sees_its_own_card_alone(
    visible: str | None,
    device: int | str,
    shown: str,
    made: Callable[..., SubprocessExecutor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    request = {"names": ["CUDA_VISIBLE_DEVICES"], "device": "cuda:5"}
    answer = made(devices=(device,)).run_task(f"{TASKS}:environment", request, timeout_s=WAIT_S)
    assert answer == {"values": {"CUDA_VISIBLE_DEVICES": shown}, "device": "cuda:0"}


@pytest.mark.parametrize(
    "options",
    [
        {"devices": ()},
        {"devices": ("cuda:x",)},
        {"devices": (3,)},
        {"processes": 0},
        {"devices": (0, 1, 0), "processes": 2},
        {"launch": "thread"},
        {"timeout_s": 0},
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UsageError):
        SubprocessExecutor(**options)
