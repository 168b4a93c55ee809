"""The command line with the real worker: what a user types, and Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl_kit import write_jsonl

from autotune.report.model import Report
from autotune.space.trl_keys import known_keys
from autotune.testing import processes

pytestmark = pytest.mark.trl

WAIT_S = 90.0
SMALL = ("--space", "quick", "--device", "cpu", "--measured-steps", "1", "--global-batch", "2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, chats: list[dict]) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", chats * 4)


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes that ``pid`` started, directly or not."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


def search(model: str, rows: Path, run: Path) -> list[str]:
    return ["search", model, str(rows), "--run-dir", str(run), *SMALL]


def start(model: str, rows: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "autotune",
            "search",
            model,
            str(rows),
            "--run-dir",
            str(run),
            *SMALL,
            *more,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(file: Path, number: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not file.exists() or len(file.read_text().splitlines()) < number:
        assert time.monotonic() < deadline, f"{file.name} never had {number} lines"
        time.sleep(0.02)


def test_a_search_imports_no_training_stack(model: str, rows: Path, tmp_path: Path) -> None:
    script = (
        "import json, sys\n"
        "from autotune.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = ('torch', 'transformers', 'trl', 'datasets', 'accelerate', 'peft')\n"
        "print(code, [name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    run = tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            "search",
            model,
            str(rows),
            "--run-dir",
            str(run),
            *SMALL,
            "--trials",
            "2",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "0 []", done.stderr
    data = json.loads(done.stdout)
    assert data == json.loads((run / "report.json").read_text())
    report = Report.from_dict(data)
    assert report.finished
    assert [trial.outcome.value for trial in report.trials[:2]] == ["ok", "ok"]
    assert all(trial.confirmed for trial in report.pareto)
    best = yaml.safe_load((run / "configs" / "best.yaml").read_text())
    assert best["model_name_or_path"] == model
    assert not (run / "work").exists()


def test_ctrl_c_leaves_a_readable_run_and_no_process(
    model: str, rows: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(model, rows, run, "--trials", "30")
    wait_for_lines(run / "probes.jsonl", 2)
    children = descendants(process.pid)
    assert children
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert "GiB" in out
    assert processes.wait_until_gone(*children, within_s=10)
    report = Report.load(run / "report.json")
    assert report.interrupted
    assert len(report.trials) >= 2
    num_probed = sum(trial.num_probes > 0 for trial in report.trials)
    resumed = start(model, rows, run, "--resume", "--trials", str(num_probed + 1), "--json")
    out, err = resumed.communicate(timeout=2 * WAIT_S)
    assert resumed.returncode == 0, err
    again = Report.from_dict(json.loads(out))
    assert again.finished
    assert sum(trial.num_probes > 0 for trial in again.trials) == num_probed + 1
    kept = {trial.number: trial.digest for trial in report.trials}
    assert {trial.number: trial.digest for trial in again.trials[: len(kept)]} == kept


def test_a_killed_search_leaves_no_process_and_can_go_on(
    model: str, rows: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(model, rows, run, "--trials", "30")
    wait_for_lines(run / "probes.jsonl", 2)
    children = descendants(process.pid)
    process.kill()
    process.communicate(timeout=WAIT_S)
    assert processes.wait_until_gone(*children, within_s=20)
    known = len((run / "probes.jsonl").read_text().splitlines())
    resumed = start(model, rows, run, "--resume", "--trials", str(known), "--json")
    out, err = resumed.communicate(timeout=2 * WAIT_S)
    assert resumed.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    assert report["finished"]
    assert [trial["number"] for trial in report["trials"]] == list(range(len(report["trials"])))


def test_the_keys_read_from_source_are_those_that_trl_takes() -> None:
    """Nothing that TRL takes may be refused, and little that it does not may pass."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

    classes = (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
    taken = {field.name for kind in classes for field in dataclasses.fields(kind)} | {"env"}
    found = known_keys("sft")
    assert found >= taken
    assert len(found - taken) < 10, found - taken
