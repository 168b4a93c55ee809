from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from autotune.errors import ExecutorError, PrerequisiteError
from autotune.executors import disk, evidence
from autotune.executors.evidence import Ending
from autotune.executors.logs import last_phase, tail, telling_line
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.testing.fakes import FakeExecutor
from autotune.worker import tasks

GIB = 1 << 30


def make_spec(folder: Path, **fields: Any) -> ProbeSpec:
    config = {"per_device_train_batch_size": 1}
    values: dict[str, Any] = {"trainer": "sft", "config": config, "device": "cuda:0"}
    return ProbeSpec(probe_id="0001", folder=str(folder), **{**values, **fields})


def make_ending(**fields: Any) -> Ending:
    return Ending(asked_at=0.0, **fields)


def killed(**fields: Any) -> Ending:
    return make_ending(signal=int(signal.SIGKILL), **fields)


def answer(folder: Path, result: ProbeResult) -> None:
    tasks.write_json(folder / "answer.json", {"ok": {"result": result.to_dict()}})


@pytest.mark.parametrize(
    ("ending", "device", "budget", "outcome"),
    [
        (killed(), "cuda:0", None, Outcome.LOST),
        (killed(oom_kills=1), "cuda:0", None, Outcome.HOST_OOM),
        (killed(max_resident_bytes=9 * GIB, available_bytes=10 * GIB), "cuda:0", None, "host_oom"),
        (killed(max_resident_bytes=8 * GIB, available_bytes=10 * GIB), "cuda:0", None, "lost"),
        # The kernel was short of memory that other processes had.
        (
            killed(oom_kills=1, max_resident_bytes=GIB, available_bytes=10 * GIB),
            "cpu",
            8 * GIB,
            Outcome.LOST,
        ),
        (
            killed(oom_kills=1, max_resident_bytes=6 * GIB, available_bytes=10 * GIB),
            "cpu",
            8 * GIB,
            Outcome.HOST_OOM,
        ),
        # On an accelerator the budget is the device's, not the host's.
        (killed(max_resident_bytes=4 * GIB), "cuda:0", 4 * GIB, Outcome.LOST),
        (killed(max_resident_bytes=4 * GIB), "cpu", 4 * GIB, Outcome.HOST_OOM),
        (killed(timed_out_after_s=5.0, oom_kills=1), "cpu", None, Outcome.TIMEOUT),
        (make_ending(signal=int(signal.SIGTERM), timed_out_after_s=5.0), "cpu", None, "timeout"),
        (make_ending(signal=int(signal.SIGTERM)), "cpu", None, Outcome.CRASHED),
        (make_ending(signal=int(signal.SIGBUS)), "cpu", None, Outcome.CRASHED),
        (make_ending(signal=int(signal.SIGSEGV), oom_kills=1), "cpu", None, Outcome.CRASHED),
        (make_ending(signal=64), "cpu", None, Outcome.CRASHED),
        (make_ending(exit_code=1), "cpu", None, Outcome.CRASHED),
        (make_ending(exit_code=0), "cpu", None, Outcome.CRASHED),
        (make_ending(server_lost=True), "cpu", None, Outcome.LOST),
    ],
)
def test_an_ending_without_an_answer(
    ending: Ending, device: str, budget: int | None, outcome: str, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path, device=device, memory_budget_bytes=budget)
    result = evidence.decide(spec, ending)
    assert result.outcome == outcome
    assert result.detail
    assert result.evidence == ending.to_dict()


def test_the_phase_and_the_last_words_are_kept(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"phase": "load"}\n{"phase": "first_step"}\n{"pha')
    (tmp_path / "stderr.log").write_text("warning\nfatal: gave up\n")
    result = evidence.decide(make_spec(tmp_path), make_ending(exit_code=3))
    assert result.phase == "first_step"
    assert result.detail == "ended with exit code 3 in the first step: fatal: gave up"
    assert result.traceback == "warning\nfatal: gave up"


def test_a_timeout_names_limit_and_phase(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"phase": "load", "at": 1.5}\n')
    ending = killed(timed_out_after_s=90.0)
    detail = evidence.decide(make_spec(tmp_path), ending).detail
    assert detail.startswith("not done after 90 s, ended in load")
    assert "--probe-timeout" in detail


def test_last_words_with_a_budget_are_out_of_memory(tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_text("libgomp: Thread creation failed: EAGAIN\n")
    ending = make_ending(exit_code=1)
    budget = make_spec(tmp_path, device="cpu", memory_budget_bytes=GIB)
    assert evidence.decide(budget, ending).outcome is Outcome.DEVICE_OOM
    free = make_spec(tmp_path, device="cpu")
    assert evidence.decide(free, ending).outcome is Outcome.CRASHED


@pytest.mark.parametrize(
    "ending", [make_ending(exit_code=0), make_ending(exit_code=1), killed(timed_out_after_s=1.0)]
)
def test_a_whole_answer_is_believed_however_the_process_ended(
    ending: Ending, tmp_path: Path
) -> None:
    spec = make_spec(tmp_path)
    expected = FakeExecutor().submit(spec).result()
    answer(tmp_path, expected)
    result = evidence.decide(spec, ending)
    assert result.outcome is Outcome.OK
    assert result.measurement == expected.measurement


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        '{"ok": null}',
        '{"ok": {}}',
        '{"ok": {"result": null}}',
        '{"ok": {"result": {"probe_id": "0001", "outcome": "fine"}}}',
        '{"ok": {"result": {"probe_id": "0001", "outcome": "ok"}}}',
        '{"ok": {"result": {"outcome": "crashed"}}}',
        '{"ok": {"result": {"probe_id": "0001", "outcome": "ok", "measurement": {"a": 1}}}}',
    ],
)
def test_what_is_no_answer_is_not_believed(text: str, tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text(text)
    result = evidence.decide(make_spec(tmp_path), make_ending(exit_code=0))
    assert result.outcome is Outcome.CRASHED
    assert "no result" in result.detail


def test_a_helper_killed_by_the_kernel_is_out_of_memory(tmp_path: Path) -> None:
    crashed = ProbeResult(
        probe_id="0001",
        outcome=Outcome.CRASHED,
        detail="RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
    )
    answer(tmp_path, crashed)
    spec = make_spec(tmp_path)
    assert evidence.decide(spec, make_ending(exit_code=0)).outcome is Outcome.CRASHED
    assert evidence.decide(spec, make_ending(exit_code=0, oom_kills=1)).outcome is Outcome.HOST_OOM


def test_an_error_as_answer_is_raised(tmp_path: Path) -> None:
    fields = {"type": "PrerequisiteError", "message": "no access", "hint": "log in"}
    tasks.write_json(tmp_path / "answer.json", {"error": fields})
    with pytest.raises(PrerequisiteError, match="no access"):
        evidence.decide(make_spec(tmp_path), make_ending(exit_code=0))


def test_a_full_disk_judges_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path)
    with pytest.raises(ExecutorError, match="is full") as caught:
        evidence.decide(spec, make_ending(exit_code=tasks.EXIT_DISK_FULL))
    assert "Free some space" in caught.value.hint

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tasks, "write_json", full)
    with pytest.raises(ExecutorError, match="is full"):
        evidence.conclude(spec, killed())
    with pytest.raises(ExecutorError, match="is full"):
        evidence.write_request(spec, asked_at=0.0)


def test_a_full_disk_under_a_task_names_the_places_that_it_writes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    request = {"folder": str(tmp_path / "run" / "work")}
    temporary = tmp_path / "tmp" / "autotune-task-x"
    temporary.mkdir(parents=True)

    def ask() -> ExecutorError:
        with pytest.raises(ExecutorError, match="disk is full") as caught:
            evidence.task_answer(
                "prepare",
                temporary,
                make_ending(exit_code=tasks.EXIT_DISK_FULL),
                request=request,
            )
        return caught.value

    scratch = {"folder": str(tmp_path / "tmp" / "autotune-y" / "work")}
    named = disk.task_disk_full("prepare", temporary, scratch).message
    assert "autotune-y" not in named
    assert str(tmp_path / "tmp") in named
    error = ask()
    for place in (request["folder"], str(tmp_path / "hub"), str(tmp_path / "tmp")):
        assert place in error.message
    # The task's own folder is gone when this is read, and there is no search to resume yet.
    assert "autotune-task" not in error.message
    assert "--resume" not in error.hint
    assert "same command again" in error.hint
    monkeypatch.setattr(disk, "_free_bytes", lambda place: 0 if place.endswith("hub") else 1e12)
    error = ask()
    assert str(tmp_path / "hub") in error.message
    assert request["folder"] not in error.message


def test_a_task_whose_own_folder_is_full_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.ENOSPC, errno.EROFS):
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(tasks, "write_json", Mock(side_effect=error))
        with pytest.raises(ExecutorError, match=str(tmp_path.parent)) as caught:
            evidence.write_task("prepare", tmp_path, {"folder": "/elsewhere"})
        assert "elsewhere" not in caught.value.message


def test_a_full_disk_is_found_behind_a_librarys_own_error() -> None:
    error = RuntimeError("the data set could not be generated")
    error.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert tasks.ran_out_of_disk(error)
    assert not tasks.ran_out_of_disk(RuntimeError("something else"))


def test_conclude_writes_what_it_returns(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    result = evidence.conclude(spec, killed(num_neighbours=3))
    assert result.num_neighbours == 3
    stored = json.loads((tmp_path / "result.json").read_text())
    assert ProbeResult.from_dict(stored) == result


def test_nothing_of_an_earlier_run_is_taken_for_this_one(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    answer(tmp_path, FakeExecutor().submit(spec).result())
    (tmp_path / "events.jsonl").write_text('{"phase": "save"}\n')
    evidence.write_request(spec, asked_at=1.0)
    result = evidence.decide(spec, killed())
    assert (result.outcome, result.phase) == (Outcome.LOST, None)
    request = json.loads((tmp_path / "request.json").read_text())
    assert ProbeSpec.from_dict(request["spec"]) == spec


def test_telling_line_prefers_what_was_said_before_the_stack() -> None:
    stack = 'Fatal Python error: Aborted\n\nThread 0x1:\n  File "a.py", line 3 in go\n'
    assert telling_line("std::bad_alloc\n" + stack) == "std::bad_alloc"
    assert telling_line(stack) == 'File "a.py", line 3 in go'
    assert telling_line("one\ntwo\n\n") == "two"
    assert telling_line("") == ""


def test_tail_starts_at_a_line_and_leaves_the_module_list_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"\xff first\n" + b"x" * 100 + b"\nExtension modules: a, b\nlast\n")
    assert tail(log, 50).endswith("last")
    assert "Extension" not in tail(log)
    assert tail(log, 8) == "last"
    assert last_phase(log) is None
