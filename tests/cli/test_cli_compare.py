"""Several runs in one table, and those that do not compare."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import GIB, SEARCH, Done

from autotune.report.model import Report
from autotune.testing.fakes import MemoryWall


@pytest.fixture
def two(machine: dict[str, Any], cli: Callable[..., Done]) -> tuple[Path, Path]:
    """Return the folders of two finished searches of one kind."""
    for name in ("one", "two"):
        assert cli(*SEARCH, "--trials", 3, "--run-dir", name).code == 0
    return Path("one"), Path("two")


def change(run: Path, **values: Any) -> None:
    """Change what a report says."""
    file = run / "report.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_picks_of_all_runs_are_shown(two: tuple[Path, Path], cli: Callable[..., Done]) -> None:
    done = cli("compare", *two)
    assert done.code == 0, done.err
    for run in two:
        assert f"{run}: measured, Test CPU" in done.out
        fastest = Report.load(run / "report.json").pick("fastest")
        assert f"trial {fastest.number}: " in done.out
    assert done.out.count("fastest") >= 2
    assert "predicted" not in done.out
    assert "warning" not in done.out


def test_json_has_the_figures_of_each_pick(
    two: tuple[Path, Path], cli: Callable[..., Done]
) -> None:
    facts = cli("compare", *two, "--json").json
    assert [run["name"] for run in facts["runs"]] == ["one", "two"]
    assert facts["obstacles"] == []
    for run, found in zip(two, facts["runs"], strict=True):
        report = Report.load(run / "report.json")
        assert {name: pick["trial"] for name, pick in found["picks"].items()} == report.picks()
        rate = report.pick("fastest").tokens_per_s
        assert rate is not None
        assert found["picks"]["fastest"]["tokens_per_s"]["median"] == rate.median


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"versions": {"torch": "2.99.0"}}, "torch (2.13.0, 2.99.0)"),
        (
            {"device": {"name": "cuda:0", "kind": "cuda", "label": "Big", "driver": "1.2"}},
            "the device (Test CPU, Big, driver 1.2)",
        ),
        (
            {"device": {"name": "virtual:x", "kind": "cuda", "label": "Test CPU"}},
            "measured or predicted (measured, predicted)",
        ),
        ({"weights": "real"}, "the weights (random, real)"),
    ],
    ids=["versions", "device", "source", "weights"],
)
def test_runs_that_do_not_compare_are_refused_or_labelled(
    values: dict[str, Any], named: str, two: tuple[Path, Path], cli: Callable[..., Done]
) -> None:
    if "versions" in values:
        known = dict(Report.load(two[1] / "report.json").versions)
        values = {"versions": known | values["versions"]}
    change(two[1], **values)
    done = cli("compare", *two)
    assert done.code == 2
    assert done.out == ""
    assert named in done.err
    assert "--anyway" in done.err
    done = cli("compare", *two, "--anyway")
    assert done.code == 0
    text = " ".join(done.out.split())
    assert f"not comparable: {named}" in text
    if "versions" in values:
        assert "two: measured, Test CPU, torch 2.99.0" in text


def test_other_requests_are_noted(two: tuple[Path, Path], cli: Callable[..., Done]) -> None:
    change(two[1], global_batch=64, space="mine")
    done = cli("compare", *two)
    assert done.code == 0
    text = " ".join(done.out.split())
    assert "The runs differ in the global batch (8, 64): their rates are of different" in text
    assert "The runs differ in the search space (quick, mine)" in text


def test_other_limits_and_objectives_are_noted(
    two: tuple[Path, Path], cli: Callable[..., Done]
) -> None:
    change(two[1], budget_bytes=GIB)  # what it had free, which is never twice the same
    assert "The runs differ in" not in cli("compare", *two).out
    asked = {"budget_bytes": GIB, "budget_source": "--memory-budget"}
    change(two[1], min_coverage=0.5, objectives=["epoch_time"], **asked)
    text = " ".join(cli("compare", *two).out.split())
    assert "The runs differ in the objectives (peak_memory and tokens_per_s, epoch_time)" in text
    assert "The runs differ in --min-coverage (" in text
    assert (
        "the memory budget (what the device has, 1.00 GiB): what fits one may not fit another."
        in text
    )


def test_a_folder_is_the_same_by_whatever_path_it_was_given(
    two: tuple[Path, Path], cli: Callable[..., Done]
) -> None:
    report = Report.load(two[1] / "report.json")
    change(two[1], model=f"./{report.model}", dataset=f"./{report.dataset}")
    assert "The runs differ in" not in cli("compare", *two).out
    change(two[1], data={**report.data, "fingerprint": "another"})
    assert "The runs differ in the data set" in " ".join(cli("compare", *two).out.split())


def test_runs_with_nothing_to_show_are_rows_that_say_so(
    two: tuple[Path, Path], machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["wall"] = MemoryWall(capacity_bytes=GIB, weights_bytes=9 * GIB)
    assert cli(*SEARCH, "--trials", 2, "--run-dir", "failed").code == 3
    Path("begun").mkdir()
    Path("begun/run.json").write_text("{}")
    text = " ".join(cli("compare", "one", "failed", "begun").out.split())
    assert "failed: measured, Test CPU None of" in text
    assert "begun No probe of it has ended yet" in text
    done = cli("compare", "failed", "begun")
    assert done.code == 0
    assert "tokens/s" not in done.out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["one"], "one run has nothing to be compared with"),
        (["one", "nowhere"], "there is no report in nowhere"),
    ],
)
def test_what_is_no_comparison_is_refused(
    arguments: list[str], named: str, two: tuple[Path, Path], cli: Callable[..., Done]
) -> None:
    done = cli("compare", *arguments)
    assert done.code == 2
    assert named in done.err


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_keep_to_the_width(
    width: int,
    two: tuple[Path, Path],
    cli: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, cli("compare", *two).out.splitlines())) <= width


def test_a_run_whose_figures_break_a_calculation_is_named(
    found: Path, cli: Callable[..., Done]
) -> None:
    shutil.copytree(found, "other")
    record = json.loads(Path("other/report.json").read_text())
    for trial in record["trials"]:
        for result in trial["results"]:
            for step in (result["measurement"] or {}).get("steps", ()):
                step["num_tokens"] = 0
    Path("other/report.json").write_text(json.dumps(record))
    for options in ((), ("--json",)):
        done = cli("compare", found, "other", *options)
        assert done.code == 1
        assert "damaged" in done.err + done.out
