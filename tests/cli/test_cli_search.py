"""The search command: what it shows, ends with and leaves; probes run on a fake machine."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import GIB, SEARCH, Done

from autotune.errors import ExecutorError
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.model import Report
from autotune.testing.fakes import MemoryWall
from autotune.testing.searches import make_answers


def interrupting_at(number: int) -> Callable[[ProbeSpec], None]:
    count = iter(range(10**9))

    def fault(spec: ProbeSpec) -> None:
        if next(count) == number:
            raise KeyboardInterrupt

    return fault


def test_a_search_ends_with_a_recommendation(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--trials", 8, "--run-dir", "here")
    assert done.code == 0
    report = Report.load("here/report.json")
    assert report.finished
    # The result is on stdout, what happens meanwhile on stderr.
    assert "GiB" in done.out
    assert "tokens/s" in done.out or "tok/s" in done.out
    for text in (
        "starting the worker",
        "Pareto set so far",
        "probing the Pareto set again",
        "run folder",
    ):
        assert text not in done.out
        assert text in done.err
    assert str(Path("here").resolve() / "configs" / "best.yaml") in done.err
    lines = done.err.splitlines()
    assert sum("GiB" in line for line in lines) >= 8
    assert "\x1b" not in done.out + done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("slots", [1, 3])
def test_several_probes_at_a_time_are_explained(
    slots: int, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["slots"] = slots
    done = cli(*SEARCH, "--trials", 8, "--run-dir", "here")
    assert done.code == 0
    assert done.err.count("several probes run at a time") == (slots > 1)
    assert (f"up to {slots} at a time" in " ".join(done.out.split())) == (slots > 1)


def test_json_is_the_report_and_nothing_else(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--trials", 4, "--run-dir", "here", "--json")
    assert done.code == 0
    assert done.json == json.loads(Path("here/report.json").read_text())


def test_options_reach_the_search(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    arguments = ["--trials", 5, "--run-dir", "here", "--json", "--seed", 7, "--sampler", "random"]
    arguments += ["--global-batch", 16, "--min-coverage", 0.9, "--memory-budget", "10GiB"]
    arguments += ["--pin", "adaptation=full", "--pin", "checkpointing=full", "--split", "test"]
    arguments += ["--probe-timeout", "2m", "--weights", "real", "--phases", "eval, save"]
    done = cli(*SEARCH, *arguments)
    assert done.code == 0, done.err
    report = Report.from_dict(done.json)
    assert (report.seed, report.sampler, report.global_batch) == (7, "random", 16)
    assert report.min_coverage == 0.9
    assert report.budget_bytes == 10 * GIB
    assert report.weights == "real"
    for trial in report.trials:
        assert trial.candidate["adaptation"] == "full"
        assert trial.candidate["checkpointing"] == "full"
    spec = machine["made"][0].submitted[0]
    assert spec.timeout_s == 120.0
    assert spec.phases == ("eval", "save")
    assert spec.config["dataset_train_split"] == "test"
    assert spec.memory_budget_bytes == 10 * GIB


@pytest.mark.parametrize("environment", [".venv", "an environment"])
def test_commands_that_are_shown_can_be_typed_in_any_folder_without_an_activated_environment(
    environment: str,
    machine: dict[str, Any],
    cli: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = Path(environment).resolve() / "bin"
    commands.mkdir(parents=True)
    for name in ("python", "trl", "autotune"):
        (commands / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", f"{environment}/bin/python")
    monkeypatch.setattr(sys, "argv", ["/anywhere/autotune", *SEARCH, "--trials", "1"])
    monkeypatch.setenv("PATH", "/nowhere")
    done = cli(*SEARCH, "--trials", 1, "--run-dir", "one")
    assert f"train with: {shlex.quote(str(commands / 'trl'))} sft --config /" in done.err
    autotune = shlex.quote(str(commands / "autotune"))
    assert Report.load("one/report.json").command.startswith(f"{autotune} search ")
    monkeypatch.setenv("PATH", str(commands))
    done = cli(*SEARCH, "--trials", 1, "--run-dir", "two")
    assert "train with: trl sft --config " in done.err
    assert Report.load("two/report.json").command.startswith("autotune search ")


def test_the_default_run_folder_is_under_runs(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    assert cli(*SEARCH, "--trials", 2).code == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("model-")


def test_nothing_fits(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    machine["wall"] = MemoryWall(capacity_bytes=GIB // 8)
    done = cli(*SEARCH, "--trials", 5, "--run-dir", "here")
    assert done.code == 3
    assert "error:" in done.err
    assert "the weights alone do not fit" in done.err
    assert "hint:" in done.err
    assert Report.load("here/report.json").finished
    done = cli(*SEARCH, "--trials", 6, "--run-dir", "here", "--resume", "--json")
    assert done.code == 3
    assert done.json["pareto_numbers"] == []


def test_a_broken_set_up_is_exit_code_1(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    machine["fault"] = lambda spec: Outcome.CRASHED
    done = cli(*SEARCH, "--run-dir", "here")
    assert done.code == 1
    assert "the baseline is crashed" in done.err
    assert "hint:" in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


def test_a_worker_that_cannot_be_started_is_exit_code_1(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    def refuse(request: Any) -> dict[str, Any]:
        raise ExecutorError("The worker did not start.", hint="Run autotune doctor.")

    machine["answers"] = {"describe": refuse}
    done = cli(*SEARCH, "--run-dir", "here")
    assert done.code == 1
    assert done.err.splitlines()[-2:] == [
        "error: The worker did not start.",
        "  hint: Run autotune doctor.",
    ]


def test_an_interrupted_search_shows_what_it_has(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["fault"] = interrupting_at(3)
    done = cli(*SEARCH, "--trials", 8, "--no-screen", "--run-dir", "here")
    assert done.code == 130
    assert "GiB" in done.out
    assert "--resume" in done.err
    report = Report.load("here/report.json")
    assert report.interrupted
    assert len(report.trials) == 3
    # It can be looked at, exported from and continued.
    assert cli("report", "here").code == 0
    assert cli("export", "here", "--pick", "leanest").code == 0
    machine["fault"] = None
    done = cli(*SEARCH, "--trials", 8, "--run-dir", "here", "--resume", "--json")
    assert done.code == 0
    assert done.json["finished"]


def test_an_interrupt_before_the_first_probe_is_130(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    def interrupt(request: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    machine["answers"] = {**make_answers(), "prepare": interrupt}
    done = cli(*SEARCH, "--run-dir", "here")
    assert done.code == 130
    assert "Traceback" not in done.err
    # The folder holds no search yet, so it can be used again.
    machine["answers"] = make_answers()
    assert cli(*SEARCH, "--trials", 2, "--run-dir", "here").code == 0


# --- run folders --------------------------------------------------------------------------------


def test_a_run_is_not_overwritten(found: Path, cli: Callable[..., Done]) -> None:
    before = (found / "probes.jsonl").read_bytes()
    done = cli(*SEARCH, "--trials", 2, "--run-dir", found)
    assert done.code == 2
    assert "--resume" in done.err
    assert done.out == ""
    assert (found / "probes.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["file", "file/deep", "x" * 300, "file/../file"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_wrong_run_folder_is_exit_code_2(
    name: str, dry: list[str], machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("file").touch()
    done = cli(*SEARCH, "--run-dir", name, *dry)
    assert done.code == 2, done.err
    assert "cannot be a run folder" in done.err
    assert "--run-dir" in done.err
    assert machine["made"] == []


@pytest.mark.parametrize("name", ["file", "file/deep", "x" * 300])
def test_a_wrong_folder_for_the_demo_is_exit_code_2(name: str, cli: Callable[..., Done]) -> None:
    Path("file").touch()
    done = cli("demo", "--folder", name)
    assert done.code == 2, done.err
    assert "--folder" in done.err
    assert "Traceback" not in done.err


def test_the_demo_looks_at_its_run_folder_first(cli: Callable[..., Done]) -> None:
    Path("mine/run").mkdir(parents=True)
    Path("mine/run/run.json").write_text("{}")
    done = cli("demo", "--folder", "mine")
    assert done.code == 2
    assert "--resume" in done.err
    assert [path.name for path in Path("mine").iterdir()] == ["run"]


def test_a_folder_that_may_not_be_written_is_exit_code_2(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)
    for arguments in ((*SEARCH, "--run-dir", "here"), ("demo", "--folder", "here")):
        done = cli(*arguments)
        assert done.code == 2, done.err
        assert "Permission denied" in done.err
        assert "hint:" in done.err


def test_a_disk_that_is_full_before_the_first_probe(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        done = cli(*SEARCH, "--trials", 2, "--run-dir", "here")
    assert done.code == 1
    # There is no search to resume yet, and the folder is free to start one.
    assert "--resume" not in done.err
    assert "give the same command again" in done.err
    assert not Path("here").exists()
    assert cli(*SEARCH, "--trials", 2, "--run-dir", "here").code == 0


def test_a_strangers_folder_is_left_alone(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("chapter 1")
    done = cli(*SEARCH, "--run-dir", "mine")
    assert done.code == 2
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]


def test_a_resumed_run_must_be_the_same_search(found: Path, cli: Callable[..., Done]) -> None:
    done = cli(*SEARCH, "--run-dir", found, "--resume", "--global-batch", 32)
    assert done.code == 2
    assert "--global-batch: 8 before, 32 now" in done.err
