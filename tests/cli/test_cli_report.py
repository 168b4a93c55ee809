"""What is left of a search: report, export and verify."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_kit import GIB, SEARCH, Done

from autotune import verify
from autotune.report.model import Report
from autotune.testing.fakes import MemoryWall
from autotune.verify import Check, Comparison


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


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("wall_time_s",), 10**400),
        (("min_coverage",), 10**400),
        (("trials", 0, "results", 0, "measurement", "accumulation_steps"), 0),
        (("trials", 0, "results", 0, "measurement", "rows_per_sample"), 0),
        (("trials", 0, "results", 0, "measurement", "steps", 0, "micro_times_s"), []),
        (("trials", 0, "results", 0, "measurement", "phases", "load", "used_bytes"), 10**400),
    ],
)
@pytest.mark.parametrize("command", ["report", "export"])
def test_a_value_that_nothing_can_be_made_of_is_no_traceback(
    command: str, place: tuple[Any, ...], value: Any, found: Path, cli: Callable[..., Done]
) -> None:
    record = json.loads((found / "report.json").read_text())
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (found / "report.json").write_text(json.dumps(record))
    done = cli(command, found)
    assert done.code in (0, 1)
    assert done.code == 0 or "damaged" in done.err
    assert done.code == 1 or done.out


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
    "content",
    [
        "learning_rate: 1.0e-4\n",
        "",
        "# Written by autotune\nlearning_rate: 1.0e-4\n",
        b"\xff\xfe binary",
        "a: [\n",
    ],
)
def test_a_file_that_the_run_did_not_export_is_not_overwritten(
    content: str | bytes, found: Path, cli: Callable[..., Done]
) -> None:
    own = Path("own.yaml")
    before = content if isinstance(content, bytes) else content.encode()
    own.write_bytes(before)
    done = cli("export", found, "-o", own)
    assert done.code == 2
    assert "own.yaml is there already" in done.err
    assert "--force" in done.err
    assert own.read_bytes() == before
    done = cli("export", found, "-o", own, "--force")
    assert done.code == 0, done.err
    report = Report.load(found / "report.json")
    assert yaml.safe_load(own.read_text()) == report.pick("balanced").config


def test_another_pick_of_the_same_run_takes_the_file_s_place(
    found: Path, cli: Callable[..., Done]
) -> None:
    report = Report.load(found / "report.json")
    for pick in ("fastest", "leanest"):
        assert cli("export", found, "--pick", pick, "-o", "sft.yaml").code == 0
        assert yaml.safe_load(Path("sft.yaml").read_text()) == report.pick(pick).config


def test_an_exported_file_with_a_key_added_is_not_overwritten(
    found: Path, cli: Callable[..., Done]
) -> None:
    assert cli("export", found, "-o", "sft.yaml").code == 0
    with Path("sft.yaml").open("a") as file:
        file.write("learning_rate: 1.0e-4\n")
    done = cli("export", found, "-o", "sft.yaml")
    assert done.code == 2
    assert "learning_rate" in Path("sft.yaml").read_text()


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
    machine["wall"] = MemoryWall(capacity_bytes=GIB // 8)
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
    assert done.err.count("rate 1 tokens/s, -99.9% against the report's ") == num
    done = cli("verify", found / "configs" / "best.yaml")
    assert "1 of 1 figures" in done.out
    # A file that was edited, or has no report, has nothing to be compared with.
    file = next(iter((found / "configs").glob("trial-*.yaml")))
    file.write_text(file.read_text() + "learning_rate: 1.0e-4\n")
    done = cli("verify", file)
    assert "differs from trial" in done.err
    assert "figures" not in done.out
    Path("alone.yaml").write_text("max_length: 8\n")
    done = cli("verify", "alone.yaml")
    assert done.code == 0
    assert "note: alone.yaml is in no run folder, so it is run, and compared with" in done.err
    (found / "report.json").unlink()
    done = cli("verify", found)
    assert done.code == 0
    assert "no report" in done.err
