"""The command line, as a user and as a script sees it; probes run on a fake machine."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_kit import Done, clean_process

from autotune import doctor, tuner, verify
from autotune.cli import trl_keys
from autotune.cli.main import main
from autotune.errors import ExecutorError
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.model import Report
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_answers
from autotune.verify import Check, Comparison

GIB = 1 << 30
COMMANDS = (
    *("search", "gpus", "estimate", "report", "export", "verify", "lengths", "spaces", "doctor"),
    "demo",
)
SEARCH = ("search", "some/model", "some/rows", "--space", "quick")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Work in an empty folder, and put the signal handlers back."""
    with clean_process(monkeypatch, tmp_path):
        yield


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the processes that probes run in; the options may be changed by a test."""
    options: dict[str, Any] = {
        "wall": MemoryWall(capacity_bytes=14 * GIB),
        "answers": make_answers(),
        "made": [],
    }

    def make(**_: Any) -> FakeExecutor:
        executor = FakeExecutor(**{k: v for k, v in options.items() if k != "made"})
        options["made"].append(executor)
        return executor

    monkeypatch.setattr(tuner, "SubprocessExecutor", make)
    monkeypatch.setattr(doctor, "SubprocessExecutor", make)
    return options


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture
def found(machine: dict[str, Any], cli: Callable[..., Done]) -> Path:
    """Return the folder of a finished search."""
    assert cli(*SEARCH, "--trials", 8, "--run-dir", "found").code == 0
    return Path("found")


def interrupting_at(number: int) -> Callable[[ProbeSpec], None]:
    count = iter(range(10**9))

    def fault(spec: ProbeSpec) -> None:
        if next(count) == number:
            raise KeyboardInterrupt

    return fault


# --- search -------------------------------------------------------------------------------------


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
    for text in ("starting the worker", "front so far", "probing the front again", "run folder"):
        assert text not in done.out
        assert text in done.err
    assert str(Path("here").resolve() / "configs" / "best.yaml") in done.err
    lines = done.err.splitlines()
    assert sum("GiB" in line for line in lines) >= 8
    assert "\x1b" not in done.out + done.err
    assert "Traceback" not in done.err


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


def test_commands_that_are_shown_can_be_typed_without_an_activated_environment(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Path(".venv/bin")
    commands.mkdir(parents=True)
    for name in ("python", "trl", "autotune"):
        (commands / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(commands.resolve() / "python"))
    monkeypatch.setattr(sys, "argv", ["/anywhere/autotune", *SEARCH, "--trials", "1"])
    monkeypatch.setenv("PATH", "/nowhere")
    done = cli(*SEARCH, "--trials", 1, "--run-dir", "one")
    assert "train with: .venv/bin/trl sft --config " in done.err
    assert Report.load("one/report.json").command.startswith(".venv/bin/autotune search ")
    monkeypatch.setenv("PATH", str(commands.resolve()))
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
    machine["wall"] = MemoryWall(capacity_bytes=1 * GIB)
    done = cli(*SEARCH, "--trials", 5, "--run-dir", "here")
    assert done.code == 3
    assert "error:" in done.err
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
    done = cli(*SEARCH, "--trials", 8, "--run-dir", "here")
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--space", "qick"], "quick"),
        (["--space", "none.yaml"], "none.yaml"),
        (["--trainer", "ppo"], "ppo"),
        (["--sampler", "tpee"], "tpe"),
        (["--pin", "lora_rr=8"], "lora_r"),
        (["--pin", "lora_r=eight"], "lora_r"),
        (["--pin", "lora_r"], "KNOB=VALUE"),
        (["--pin", "=8"], "KNOB=VALUE"),
        (["--pin", "lora_r=8", "--pin", "lora_r=16"], "twice"),
        (["--memory-budget", "22 parsecs"], "--memory-budget"),
        (["--memory-budget", "-1GiB"], "--memory-budget"),
        (["--memory-budget", "0"], "--memory-budget"),
        (["--memory-budget", "1MiB"], "below the weights"),
        (["--time-budget", "soon"], "--time-budget"),
        (["--time-budget", "0s"], "--time-budget"),
        (["--probe-timeout", "1 fortnight"], "--probe-timeout"),
        (["--trials", "0"], "--trials"),
        (["--trials", "many"], "--trials"),
        (["--global-batch", "0"], "--global-batch"),
        (["--min-coverage", "1.5"], "--min-coverage"),
        (["--weights", "trained"], "weights"),
        (["--phases", "eval,test"], "phases"),
        (["--resume"], "--run-dir"),
        (["--resume", "--run-dir", "nowhere"], "no search to resume"),
        (["--study", "nonsense://x", "--run-dir", "x"], "nonsense"),
        (["--no-such-option"], "--no-such-option"),
        (["--split", ""], "split"),
        (["--revision", " "], "revision"),
        (["--dataset-config", ""], "configuration"),
    ],
    ids=" ".join,
)
def test_a_wrong_request_is_exit_code_2(
    arguments: list[str], named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, *arguments)
    assert done.code == 2, done.err
    assert named in done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    assert not [spec for made in machine["made"] for spec in made.submitted]


@pytest.mark.parametrize(
    ("model", "dataset", "named"),
    [
        ("./nowhere", "some/rows", "nowhere"),
        ("some/model", "rows.jsonl", "rows.jsonl"),
        ("some/model", "notes.txt", ".txt"),
        (".", "some/rows", "config.json"),
        ("some/model", "empty", "no data file"),
    ],
)
def test_missing_files_are_exit_code_2(
    model: str, dataset: str, named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("notes.txt").touch()
    Path("empty").mkdir()
    done = cli("search", model, dataset)
    assert done.code == 2
    assert named in done.err
    assert "hint:" in done.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pin", "lora_q=8"], "Did you mean 'lora_r'"),
        (["--pin", "lora_r=eight"], "lora_r"),
        (["--pin", "adaptation=lorra"], "lora"),
        (["--device", "nope"], "unknown device 'nope'"),
        (["--device", "cud"], "Did you mean 'cuda'"),
        (["--device", ""], "unknown device"),
        (["--device", "cuda:"], "cuda:0"),
        (["--device", "cuda:one"], "cuda:0"),
        (["--device", "xpu:-1"], "xpu:0"),
        (["--device", "cpu:0"], "takes no index"),
        (["--device", "auto:1"], "takes no index"),
        (["--trainer", "foo:bar", "--space", "quick"], "'sft', not for 'foo:bar'"),
    ],
    ids=" ".join,
)
def test_a_wrong_name_is_refused_before_anything_is_started(
    arguments: list[str], named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, *arguments)
    assert done.code == 2, done.err
    assert named in done.err
    assert machine["made"] == []
    assert not list(Path().iterdir())


def test_an_unknown_trainer_is_no_unknown_space(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli("search", "some/model", "some/rows", "--trainer", "foo:bar")
    assert done.code == 2
    assert "unknown trainer 'foo:bar'" in done.err
    assert "Known: sft" in done.err


@pytest.mark.parametrize(("model", "dataset"), [("", ""), ("", "some/rows"), ("some/model", " ")])
def test_an_empty_name_is_not_the_current_folder(
    model: str, dataset: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli("search", model, dataset)
    assert done.code == 2
    assert "empty name" in done.err
    assert machine["made"] == []


@pytest.mark.parametrize(
    "arguments", [(), ("serch",), ("search",), ("search", "only/model"), ("report",)]
)
def test_a_command_that_is_not_whole_is_exit_code_2(
    arguments: tuple[str, ...], cli: Callable[..., Done]
) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert "Usage" in done.out + done.err


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_exit_code_0(option: str, cli: Callable[..., Done]) -> None:
    done = cli(option)
    assert done.code == 0
    for name in COMMANDS:
        assert name in done.out
    for name in COMMANDS:
        assert cli(name, option).code == 0


def test_the_version_is_printed(cli: Callable[..., Done]) -> None:
    done = cli("--version")
    assert done.code == 0
    assert done.out.startswith("trl-autotune ")


# --- dry run ------------------------------------------------------------------------------------


def test_a_dry_run_probes_and_writes_nothing(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--dry-run", "--run-dir", "here")
    assert done.code == 0
    assert "candidates" in done.out
    assert "at most" in done.out
    assert machine["made"][0].submitted == []
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--study", "nonsense://x"], "nonsense"),
        (["--study", "nope/study.journal"], "no folder nope"),
        (["--study", "sqlite:///nope/study.db"], "no folder nope"),
        (["--study", "sqlite:///notes.txt"], "notes.txt"),
        (["--study", "notes.txt"], "notes.txt"),
        (["--study", "mysql+nodriver://host/x"], "mysql"),
        (["--run-dir", "found"], "holds a search already"),
        (["--run-dir", "notes.txt"], "cannot be a run folder"),
        (["--run-dir", "strange"], "not empty"),
        (["--run-dir", "nowhere", "--resume"], "no search to resume"),
        (["--run-dir", "found", "--resume", "--global-batch", "32"], "belongs to another search"),
    ],
    ids=str,
)
def test_a_dry_run_checks_folder_and_study(
    arguments: list[str], named: str, found: Path, cli: Callable[..., Done]
) -> None:
    Path("notes.txt").write_text("chapter 1\nchapter 2\n")
    Path("strange").mkdir()
    Path("strange/thesis.tex").touch()
    before = sorted(str(path) for path in Path().rglob("*"))
    done = cli(*SEARCH, "--dry-run", *arguments)
    assert done.code in (1, 2), done.out  # 1: what is there is damaged
    assert named in done.err
    assert "Traceback" not in done.err
    assert sorted(str(path) for path in Path().rglob("*")) == before


@pytest.mark.parametrize("study", ["new.journal", "sqlite:///new.db", "sqlite://"])
def test_a_dry_run_makes_no_study(
    study: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    assert cli(*SEARCH, "--dry-run", "--study", study).code == 0
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("study", ["kept.journal", "sqlite:///kept.db"])
def test_a_dry_run_leaves_a_study_as_it_is(
    study: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    assert cli(*SEARCH, "--trials", 2, "--run-dir", "one", "--study", study).code == 0
    file = Path(study.removeprefix("sqlite:///"))
    before = file.read_bytes()
    done = cli(
        *SEARCH, "--trials", 3, "--run-dir", "one", "--study", study, "--resume", "--dry-run"
    )
    assert done.code == 0, done.err
    assert file.read_bytes() == before


def test_a_dry_run_of_a_resumed_search(found: Path, cli: Callable[..., Done]) -> None:
    before = {path: path.read_bytes() for path in found.rglob("*") if path.is_file()}
    done = cli(*SEARCH, "--dry-run", "--run-dir", found, "--resume", "--json")
    assert done.code == 0, done.err
    assert done.json["budget_bytes"] == Report.load(found / "report.json").budget_bytes
    assert {path: path.read_bytes() for path in found.rglob("*") if path.is_file()} == before
    (found / "probes.jsonl").write_text("nonsense\n" * 2)
    assert "line 1 is damaged" in cli(*SEARCH, "--dry-run", "--run-dir", found, "--resume").err


def test_a_dry_run_as_json(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    done = cli(*SEARCH, "--dry-run", "--trials", 10, "--json", "--pin", "adaptation=full")
    assert done.code == 0
    facts = done.json
    assert facts["num_candidates"] > 10
    assert facts["trials"] == 10
    assert facts["worst_case_time_s"] == 18 * 300.0
    names = [knob["name"] for knob in facts["knobs"]]
    assert "per_device_train_batch_size" in names
    (adaptation,) = (knob for knob in facts["knobs"] if knob["name"] == "adaptation")
    assert adaptation["values"] == ["full"]
    assert facts["baseline"]["adaptation"] == "full"


def test_a_dry_run_of_a_large_space_is_quick(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli("search", "some/model", "some/rows", "--dry-run", "--time-budget", "1h", "--json")
    assert done.code == 0
    assert done.json["num_candidates"] == 20_000
    assert not done.json["num_candidates_is_exact"]
    assert done.json["worst_case_time_s"] == 1.25 * 3600 + 300
    # Every value of every knob is listed, whatever a listing of candidates would reach.
    values = {knob["name"]: knob["values"] for knob in done.json["knobs"]}
    assert {"full", "lora", "lora_8bit"} <= set(values["adaptation"])
    assert {"padded", "bfd", "wrapped"} <= set(values["batching"])
    assert {"sdpa", "eager"} <= set(values["attn_implementation"])


# --- report and export --------------------------------------------------------------------------


def test_a_report_can_be_shown_again(found: Path, cli: Callable[..., Done]) -> None:
    first, again = cli("report", found), cli("report", found / "report.json")
    assert first.code == again.code == 0
    assert first.out == again.out
    assert first.err == ""
    assert cli("report", found, "--verbose").code == 0
    assert cli("report", found, "--json").json == json.loads((found / "report.json").read_text())


@pytest.mark.parametrize("command", ["report", "export", "verify"])
def test_a_run_that_is_not_there(command: str, cli: Callable[..., Done]) -> None:
    Path("empty").mkdir()
    for name in ("nowhere", "empty"):
        done = cli(command, name)
        assert done.code == 2
        assert name in done.err
        assert "hint:" in done.err
        assert done.out == ""


@pytest.mark.parametrize("command", ["report", "export"])
def test_a_run_without_a_probe_yet(
    command: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("begun").mkdir()
    Path("begun/run.json").write_text("{}")
    done = cli(command, "begun")
    assert done.code == 2
    assert "--resume" in done.err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99}', '{"schema": 1}'])
def test_a_report_that_cannot_be_read(content: str, cli: Callable[..., Done]) -> None:
    Path("broken").mkdir()
    Path("broken/report.json").write_text(content)
    done = cli("report", "broken")
    assert done.code == 1
    assert "report.json" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": null}', '{"schema": 1}', "\0"])
@pytest.mark.parametrize("command", ["report", "export"])
def test_a_damaged_report_says_how_to_get_it_back(
    command: str, content: str, found: Path, cli: Callable[..., Done]
) -> None:
    (found / "report.json").write_text(content)
    done = cli(command, found)
    assert done.code == 1
    assert "damaged" in done.err
    assert f"--run-dir {found} --resume" in done.err
    # What the hint says is true.
    assert cli(*SEARCH, "--trials", 8, "--run-dir", found, "--resume").code == 0
    assert cli(command, found).code == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("wall_time_s", "long"),
        ("budget_bytes", "lots"),
        ("pareto_numbers", ["one"]),
        ("device", []),
        ("removed_values", [["a", "b", "c"]]),
        ("global_batch", None),
        ("notices", [1]),
    ],
)
def test_a_value_of_a_wrong_type_in_a_report_is_named(
    field: str, value: Any, found: Path, cli: Callable[..., Done]
) -> None:
    record = json.loads((found / "report.json").read_text())
    (found / "report.json").write_text(json.dumps({**record, field: value}))
    done = cli("report", found)
    assert done.code == 1
    assert "damaged" in done.err
    assert "--resume" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("pick", ["fastest", "leanest", "balanced", "0"])
def test_a_pick_is_exported_to_stdout(pick: str, found: Path, cli: Callable[..., Done]) -> None:
    done = cli("export", found, "--pick", pick)
    assert done.code == 0
    assert done.err == ""
    report = Report.load(found / "report.json")
    assert yaml.safe_load(done.out) == report.pick(pick).config


def test_a_pick_is_exported_to_a_file(found: Path, cli: Callable[..., Done]) -> None:
    Path("deep").mkdir()
    done = cli("export", found, "-o", "deep/sft.yaml")
    assert done.code == 0
    assert done.out == ""
    assert "deep/sft.yaml" in done.err
    report = Report.load(found / "report.json")
    assert yaml.safe_load(Path("deep/sft.yaml").read_text()) == report.pick("balanced").config


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "found", "-o", "nope/deep/x.yaml"),
        ("export", "found", "-o", "file/x.yaml"),
        ("export", "found", "-o", "folder"),
        ("lengths", "some/model", "some/rows", "--plot", "nope/deep/x.png"),
        ("lengths", "some/model", "some/rows", "--plot", "folder"),
        ("lengths", "some/model", "some/rows", "--plot", "x.gif"),
        (*SEARCH, "--trials", "2", "--study", "nope/deep/study.journal"),
        (*SEARCH, "--trials", "2", "--study", "folder"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_and_no_folder_made(
    arguments: tuple[str, ...], found: Path, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("folder").mkdir()
    Path("file").touch()
    asked = len(machine["made"])
    done = cli(*arguments)
    assert done.code == 2, done.err
    assert "hint:" in done.err
    assert not Path("nope").exists()
    # Nobody waits for work whose result could not be kept.
    assert not [spec for made in machine["made"][asked:] for spec in made.submitted]
    if arguments[0] == "lengths":
        assert len(machine["made"]) == asked


def test_export_needs_a_file_and_a_known_pick(found: Path, cli: Callable[..., Done]) -> None:
    Path("folder").mkdir()
    done = cli("export", found, "-o", "folder")
    assert done.code == 2
    assert "folder" in done.err
    for pick in ("fastesd", "999", "-1", ""):
        done = cli("export", found, f"--pick={pick}")
        assert done.code == 2, pick
        assert "hint:" in done.err


def test_nothing_to_export_where_nothing_fits(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["wall"] = MemoryWall(capacity_bytes=1 * GIB)
    cli(*SEARCH, "--trials", 3, "--run-dir", "here")
    done = cli("export", "here")
    assert done.code == 3
    assert done.out == ""
    assert cli("report", "here").code == 0
    assert cli("verify", "here").code == 2


def test_verify_takes_yaml_only(cli: Callable[..., Done]) -> None:
    Path("notes.txt").touch()
    assert cli("verify", "notes.txt").code == 2
    Path("list.yaml").write_text("- 1\n- 2\n")
    done = cli("verify", "list.yaml")
    assert done.code == 2
    assert "mapping" in done.err
    Path("broken.yaml").write_text("a: [1\n")
    assert cli("verify", "broken.yaml").code == 2
    Path("deep.yaml").write_text(f"a: {'[' * 2000}{']' * 2000}\n")
    done = cli("verify", "deep.yaml")
    assert done.code == 2
    assert "deep.yaml, line 1" in done.err
    Path("good.yaml").write_text("max_steps: 1\n")
    assert cli("verify", "good.yaml", "--timeout", "never").code == 2
    assert cli("verify", "good.yaml", "--steps", "0").code == 2


def test_verify_compares_with_the_report(
    found: Path, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def far_off(files: list[Path], *, trials: dict[Path, Any], **_: Any) -> Iterator[Check]:
        for file in files:
            trial = trials.get(file)
            rate = () if trial is None else (Comparison.of("rate", 1.0, trial.tokens_per_s),)
            yield Check(
                file=str(file),
                passed=True,
                num_steps=3,
                wall_time_s=1.0,
                peak_resident_bytes=GIB,
                comparisons=rate,
            )

    monkeypatch.setattr(verify, "verify_files", far_off)
    num = len(Report.load(found / "report.json").pareto)
    done = cli("verify", found)
    assert done.code == 0
    assert f"{num} of {num} figures are outside the report's spread" in done.out
    assert done.err.count("rate 1 tokens/s, -100.0% against the report's ") == num
    done = cli("verify", found / "configs" / "best.yaml")
    assert "1 of 1 figures" in done.out
    # A file that was edited, or has no report, has nothing to be compared with.
    file = next(iter((found / "configs").glob("trial-*.yaml")))
    file.write_text(file.read_text() + "learning_rate: 1.0e-4\n")
    done = cli("verify", file)
    assert "differs from trial" in done.err
    assert "figures" not in done.out
    Path("alone.yaml").write_text("max_length: 8\n")
    assert cli("verify", "alone.yaml").code == 0
    (found / "report.json").unlink()
    done = cli("verify", found)
    assert done.code == 0
    assert "no report" in done.err


# --- looks --------------------------------------------------------------------------------------


def test_spaces_are_listed(cli: Callable[..., Done]) -> None:
    done = cli("spaces")
    assert done.code == 0
    assert "quick (sft)" in done.out
    assert "sft (sft)" in done.out
    found = cli("spaces", "--json").json["spaces"]
    assert {item["name"] for item in found} >= {"quick", "sft"}
    assert all(item["digest"] and item["knobs"] and item["description"] for item in found)


def test_a_space_is_shown(cli: Callable[..., Done]) -> None:
    done = cli("spaces", "quick")
    assert done.code == 0
    assert "  per_device_train_batch_size: 1, 2, 4, 8, 16\n" in done.out
    assert "  max_length: from the data: lengths that 95 %, 100 % of the rows do not" in done.out
    assert "fixed" not in done.out
    for internal in ("{", "choice", "ordered", "quantiles'"):
        assert internal not in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    Path("mine.yaml").write_text("schema: 1\ntrainer: sft\nknobs:\n  lora_r: [4, 8]\n")
    shown = cli("spaces", "mine.yaml", "--json").json["spaces"]
    assert [item["name"] for item in shown] == ["mine"]
    (knob,) = shown[0]["knobs"]
    assert (knob["name"], knob["values"]) == ("lora_r", "4, 8")
    assert knob["domain"] == {"choice": [4, 8], "ordered": True}


def test_what_a_space_fixes_is_shown_and_checked(
    cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = frozenset({"learning_rate", "lr_scheduler_type", "warmup_steps"})
    monkeypatch.setattr(trl_keys, "known_keys", lambda trainer: known)
    text = "schema: 1\ntrainer: sft\nknobs:\n  lora_r: [4]\nfixed:\n  {}: 1.0e-4\n"
    Path("mine.yaml").write_text(text.format("learning_rate"))
    done = cli("spaces", "mine.yaml")
    assert done.code == 0
    assert "  fixed in every candidate: learning_rate=0.0001\n" in done.out
    Path("mine.yaml").write_text(text.format("learning_ratee"))
    for options in ([], ["--json"]):
        done = cli("spaces", "mine.yaml", *options)
        assert done.code == 2
        assert "unknown TRL key 'learning_ratee'" in done.err
        assert "'learning_rate'" in done.err
    # Without TRL nothing can be said about its keys.
    monkeypatch.setattr(trl_keys, "known_keys", lambda trainer: frozenset())
    assert cli("spaces", "mine.yaml").code == 0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("schema: 1\ntrainer: sft\nknobs:\n  lora_rr: [4]\n", "lora_r"),
        ("schema: 9\ntrainer: sft\nknobs: {}\n", "schema"),
        ("knobs: [", "mine.yaml"),
        ("schema: 1\ntrainer: sft\nknobs:\n  lora_r: []\n", "lora_r"),
        ("schema: 1\ntrainer: sft\nfixed: {max_steps: 3}\nknobs:\n  lora_r: [4]\n", "max_steps"),
    ],
)
def test_a_wrong_space_is_exit_code_2(content: str, named: str, cli: Callable[..., Done]) -> None:
    Path("mine.yaml").write_text(content)
    done = cli("spaces", "mine.yaml")
    assert done.code == 2
    assert named in done.err
    assert "Traceback" not in done.err
    assert cli("spaces", "nowhere").code == 2


def test_lengths_are_shown(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    done = cli("lengths", "some/model", "some/rows")
    assert done.code == 0
    assert "3,000" in done.out or "3000" in done.out
    found = cli("lengths", "some/model", "some/rows", "--json")
    assert found.code == 0
    assert isinstance(found.json, dict)
    assert list(Path().iterdir()) == []


def test_doctor(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")
    done = cli("doctor", "--json")
    assert done.code == 0
    findings = {item["name"]: item for item in done.json["findings"]}
    assert {"python", "torch", "trl", "disk", "worker", "device"} <= set(findings)
    assert all(item["passed"] for item in findings.values())
    done = cli("doctor")
    assert "Test CPU" in done.out
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name == "trl" else "1.0")
    done = cli("doctor", "--json")
    assert done.code == 2
    findings = {item["name"]: item for item in done.json["findings"]}
    assert not findings["trl"]["passed"]
    assert "pip install" in findings["trl"]["hint"]
    assert "worker" not in findings


def test_doctor_marks_what_is_missing_by_what_it_means(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"matplotlib", "trl"}
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name in missing else "1.0")
    monkeypatch.setitem(doctor.knob.registry.broken, "my_knob", "no module named x")
    done = cli("doctor")
    assert done.code == 2
    marks = {line.split(":")[0][5:]: line[:4] for line in done.out.splitlines()}
    assert marks["torch"] == "ok  "
    assert marks["matplotlib"] == "--  "
    assert marks["trl"] == "FAIL"
    assert marks["plug-in knob my_knob"] == "warn"
    assert not [line for line in done.out.splitlines() if line[:2] == "ok" and "not inst" in line]
    states = {item["name"]: item["state"] for item in cli("doctor", "--json").json["findings"]}
    assert (states["matplotlib"], states["trl"]) == ("absent", "problem")


def test_doctor_names_a_missing_device(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Any) -> dict[str, Any]:
        raise ExecutorError("there is no cuda device here.", hint="Use --device cpu.")

    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")
    machine["answers"] = {"describe": refuse}
    done = cli("doctor", "--device", "cuda", "--json")
    assert done.code == 2
    assert done.json["findings"][-1]["hint"] == "Use --device cpu."
    assert machine["made"][-1].is_shut_down


# --- terminals ----------------------------------------------------------------------------------


def test_no_color_gives_plain_lines_on_a_terminal(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in cli(*SEARCH, "--trials", 3, "--run-dir", "color").err
    monkeypatch.setenv("NO_COLOR", "1")
    done = cli(*SEARCH, "--trials", 3, "--run-dir", "plain")
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\x1b" not in done.err


def test_without_a_terminal_each_line_says_how_far_the_search_is(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--trials", 4, "--run-dir", "here")
    places = re.findall(r"^\[(\d+) of (\d+), [\d.]+ m?s\] trial ", done.err, re.MULTILINE)
    assert places == [(str(number), "4") for number in (1, 2, 3, 4)]
    again = re.findall(r"^\[again (\d+), [\d.]+ m?s\] trial ", done.err, re.MULTILINE)
    assert again == [str(number + 1) for number in range(len(again))] != []
    # A small space ends before the trials that were asked for.
    pins = ["--pin", "adaptation=full", "--pin", "checkpointing=none", "--pin", "batching=padded"]
    done = cli(*SEARCH, "--trials", 99, "--run-dir", "small", *pins)
    (size,) = set(re.findall(r"^\[\d+ of (\d+), ", done.err, re.MULTILINE))
    assert int(size) < 20
    # Where only the time ends it, the time is all there is to say.
    done = cli("search", "some/model", "some/rows", "--time-budget", "1s", "--run-dir", "time")
    assert re.search(r"^\[1, [\d.]+ m?s\] trial 0", done.err, re.MULTILINE)


# --- real processes -----------------------------------------------------------------------------


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options
    )


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "trl", "datasets", "optuna", "numpy", "rich.progress")
    script = (
        "import sys\n"
        "from autotune.cli.main import main\n"
        f"heavy = {heavy!r}\n"
        "code = main(['--help'])\n"
        "print([name for name in heavy if name in sys.modules], code, file=sys.stderr)\n"
    )
    done = run_python("-c", script)
    assert done.stderr.strip() == "[] 0"


@pytest.mark.parametrize("command", ["spaces", "report"])
def test_looking_needs_no_optuna_and_no_torch(command: str, found: Path) -> None:
    script = (
        "import sys\n"
        "from autotune.cli.main import main\n"
        f"code = main({[command] if command == 'spaces' else [command, str(found)]!r})\n"
        "heavy = [name for name in ('torch', 'transformers', 'trl') if name in sys.modules]\n"
        "print(heavy, code, file=sys.stderr)\n"
    )
    done = run_python("-c", script)
    assert done.stderr.strip() == "[] 0", done.stderr


def test_the_module_and_the_script_are_the_same(found: Path) -> None:
    module = run_python("-m", "autotune", "report", str(found), "--json")
    assert module.returncode == 0
    assert module.stderr == ""
    script = Path(sys.executable).parent / "autotune"
    if not script.exists():
        pytest.skip("the package is not installed here")
    done = subprocess.run(
        [str(script), "report", str(found), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == module.stdout
    assert run_python("-m", "autotune", "report", "nowhere").returncode == 2


AUTOTUNE = (sys.executable, "-m", "autotune")
EVERY_OUTPUT = pytest.mark.parametrize(
    "arguments",
    [
        ("report", "found"),
        ("report", "found", "--json"),
        ("export", "found"),
        ("spaces", "sft"),
        ("spaces", "--json"),
        ("--help",),
        ("report", "--help"),
        ("--version",),
    ],
    ids=" ".join,
)


@EVERY_OUTPUT
@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_goes_away_is_no_error(
    buffering: list[str], arguments: tuple[str, ...], found: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, *buffering, "-m", "autotune", *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    # What a shell reports of `cat` or `grep` in the same place.
    assert (done.returncode, done.stderr) == (141, "")


@EVERY_OUTPUT
@pytest.mark.parametrize("buffering", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_full_disk_behind_standard_output(
    buffering: list[str], arguments: tuple[str, ...], found: Path
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *buffering, "-m", "autotune", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    first, second = done.stderr.splitlines()
    assert first == "error: standard output cannot be written: No space left on device."
    assert "hint:" in second


@EVERY_OUTPUT
@pytest.mark.parametrize("closed", [">&-", ">&- 0<&-"])
def test_a_closed_standard_output(closed: str, arguments: tuple[str, ...], found: Path) -> None:
    done = in_a_shell(f"{shlex.join([*AUTOTUNE, *arguments])} {closed}")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == "error: standard output is closed, so that the result would be lost."
    assert "/dev/null" in second


@pytest.mark.parametrize("lost", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("arguments", [("report", "found"), ("export", "nowhere")])
def test_messages_that_cannot_be_written_change_nothing(
    lost: str, arguments: tuple[str, ...], found: Path
) -> None:
    words = shlex.join([*AUTOTUNE, *arguments])
    wanted, done = in_a_shell(words), in_a_shell(f"{words} {lost}")
    assert (done.returncode, done.stdout) == (wanted.returncode, wanted.stdout)
    assert done.stderr == ""


def in_a_shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )


SLOW_IMPORT = """
import os, signal, sys
from autotune.cli import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{signal})
            raise ImportError("turned into another error")

sys.meta_path.insert(0, Finder())
main.run({arguments!r})
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["report", "nowhere"]),
        ("autotune.cli.search", ["search", "a/b", "c/d"]),
        ("optuna", ["search", "a/b", "c/d"]),
        ("rich.console", ["report", "nowhere"]),
        ("autotune.doctor", ["doctor"]),
    ],
)
def test_a_signal_while_importing_is_130(number: str, module: str, arguments: list[str]) -> None:
    script = SLOW_IMPORT.format(module=module, signal=number, arguments=arguments)
    done = run_python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_moments_of_a_search(number: signal.Signals) -> None:
    Path("model").mkdir()
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    process = subprocess.Popen(
        [*AUTOTUNE, "search", "model", "rows.jsonl", "--run-dir", "here"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    status = Path(f"/proc/{process.pid}/status")
    while time.monotonic() < deadline:
        (caught,) = [line for line in status.read_text().splitlines() if "SigCgt" in line]
        mask = int(caught.split()[1], 16)
        # Python itself handles SIGINT; ours is there as soon as SIGTERM is caught as well.
        if mask & (1 << (signal.SIGTERM - 1)):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert out == ""
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("serch", "search"), ("reportt", "report"), ("lenghts", "lengths"), ("doctro", "doctor")],
)
def test_a_mistyped_command_is_met_with_the_nearest(
    typed: str, meant: str, cli: Callable[..., Done]
) -> None:
    done = cli(typed)
    assert done.code == 2
    assert f"Did you mean '{meant}'" in done.err
