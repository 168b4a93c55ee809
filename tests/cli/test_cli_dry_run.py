"""A dry run of a search: it tells what would be done, and does none of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import SEARCH, Done

from autotune import screen
from autotune.report.model import Report
from autotune.space.knobs import vllm
from autotune.testing.contexts import make_context, make_gpu
from autotune.testing.searches import make_answers


def test_a_dry_run_probes_and_writes_nothing(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--dry-run", "--run-dir", "here")
    assert done.code == 0
    assert "candidates" in done.out
    assert "at most" in done.out
    assert machine["made"][0].submitted == []
    assert list(Path().iterdir()) == []


def test_a_dry_run_says_why_vllm_is_not_searched(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    search = ("search", "some/model", "some/rows", "--trainer", "grpo", "--dry-run")
    done = cli(*search)
    assert done.code == 0
    assert "  use_vllm: TRL's vLLM needs a CUDA device, and this is cpu" in done.out
    machine["answers"] = make_answers(make_context(trainer="grpo", device=make_gpu()))
    inactive = {item["knob"]: item["reason"] for item in cli(*search, "--json").json["inactive"]}
    for name in vllm.NAMES:
        assert inactive[name] == "the package vllm>=0.22,<0.32 is not installed"


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


def test_a_dry_run_of_predictions_calls_the_bound_a_bound(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    from rich.console import Console

    from autotune.cli.planned import print_planned

    facts = cli(*SEARCH, "--dry-run", "--trials", 4, "--json").json
    facts |= {"trials": 40, "confirmations": 0, "worst_case_time_s": 12_000.0}
    stream = io.StringIO()
    print_planned({**facts, "predicted": True}, Console(file=stream, width=200))
    assert "40 trials, all predicted: usually seconds each." in stream.getvalue()
    assert "The bound is 3 h 20 min, if every one ran into its time limit." in stream.getvalue()
    stream = io.StringIO()
    print_planned({**facts, "confirmations": 8}, Console(file=stream, width=200))
    assert "40 trials and up to 8 confirmations take at most" in stream.getvalue()


def test_a_dry_run_as_json(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    done = cli(*SEARCH, "--dry-run", "--trials", 10, "--json", "--pin", "adaptation=full")
    assert done.code == 0
    facts = done.json
    assert facts["num_candidates"] > 10
    assert facts["trials"] == 10
    assert facts["worst_case_time_s"] == pytest.approx((10 + screen.SHARE * 10 + 8) * 300.0)
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
