"""What a new user meets first: budgets, weights, widths, and words that name what is meant."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_kit import CARD, SEARCH, Done, on_a_virtual_card

from autotune.probe.result import Outcome
from autotune.report.model import Report


@pytest.fixture
def virtual_machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the processes that probes of a virtual card run in."""
    return on_a_virtual_card(monkeypatch)


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=str)
def test_a_budget_above_the_cards_memory_is_refused(
    more: list[str], virtual_machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--device", CARD, "--memory-budget", "40GiB", *more)
    assert done.code == 2
    assert "40.00 GiB is more than NVIDIA GeForce RTX 4090 (virtual) has: 23.52 GiB" in done.err


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=str)
def test_a_budget_above_a_real_devices_memory_is_refused(
    more: list[str], machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--memory-budget", "9000GiB", *more)
    assert done.code == 2
    assert "9000.00 GiB is more than" in done.err
    assert "--memory-budget" in done.err


def test_a_budget_without_its_unit_is_asked_about(cli: Callable[..., Done]) -> None:
    for command in (SEARCH, ("demo", "--folder", "made")):
        done = cli(*command, "--memory-budget", "22")
        assert done.code == 2
        assert "Did you mean 22GiB?" in done.err
    assert not Path("made").exists()


def test_a_budget_of_ones_own_on_a_virtual_card_says_that_there_is_no_margin(
    virtual_machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    asked = [*SEARCH, "--device", CARD, "--dry-run"]
    assert "margin of 5%" in cli(*asked, "--memory-budget", "20GiB").out
    assert "margin of 5%" not in cli(*asked).out


# --- models without weights ---------------------------------------------------------------------


def test_a_model_without_weights_is_named_at_both_ends(
    virtual_machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    asked = ["search", "./model", "some/rows", "--space", "quick", "--device", CARD]
    where = str(Path("model").resolve())
    done = cli(*asked, "--trials", 2, "--run-dir", "here")
    assert done.code == 0
    start, _, end = done.err.partition("train with: ")
    assert f"note: The model folder {where} holds no weights" in start
    assert f"but first: The model folder {where} holds no weights" in end
    assert "holds no weights" in " ".join(done.out.split())
    Path("model/model.safetensors").touch()
    done = cli(*asked, "--trials", 2, "--run-dir", "there")
    assert "holds no weights" not in done.err + done.out


# --- estimates ----------------------------------------------------------------------------------


def test_a_definite_refusal_is_told_from_what_cannot_be_predicted(
    virtual_machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("good.yaml").write_text("model_name_or_path: some/model\ndataset_name: some/rows\n")
    refused = {"virtual:t4": Outcome.UNSUPPORTED, "virtual:l4": Outcome.CRASHED}
    virtual_machine["fault"] = lambda spec: refused.get(spec.device)
    done = cli("estimate", "good.yaml", "--device", "4090,t4,l4")
    assert done.code == 0  # one that it fits on is enough
    assert "Tesla T4: DOES NOT RUN: as the fake was told" in done.out
    assert "NVIDIA L4: CANNOT BE TOLD (crashed)" in done.out
    known = cli("estimate", "good.yaml", "--device", "4090,t4,l4", "--json").json["cards"]
    assert [card["fits"] for card in known] == [True, False, None]


def test_the_help_of_plot_says_that_it_draws_one_card(cli: Callable[..., Done]) -> None:
    assert "single" in cli("estimate", "--help").out


# --- what is printed ----------------------------------------------------------------------------


def test_a_piped_report_keeps_the_width_that_is_set(
    found: Path, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = max(map(len, cli("report", found).out.splitlines()))
    monkeypatch.delenv("COLUMNS")
    assert 120 < wide <= 200
    assert max(map(len, cli("report", found).out.splitlines())) <= 120


def test_a_failure_is_short_in_progress_and_whole_in_a_verbose_report(
    found: Path, cli: Callable[..., Done]
) -> None:
    report = Report.load(found / "report.json")
    whole = (
        "OutOfMemory: CUDA out of memory. Tried to allocate 30.51 GiB. GPU 0 has a total capacity"
        " of 23.52 GiB. See the documentation" + " for more" * 60
    )
    first = report.trials[0]
    result = replace(
        first.results[0],
        outcome=Outcome.DEVICE_OOM,
        measurement=None,
        detail=whole,
        phase="load",
    )
    failed = replace(first, outcome=Outcome.DEVICE_OOM, results=(result,), feasible=False)
    members = tuple(number for number in report.pareto_numbers if number != first.number)
    trials = (failed, *report.trials[1:])
    replace(report, trials=trials, pareto_numbers=members).save(found / "report.json")
    short = " ".join(cli("report", found).out.split())
    assert "device_oom: tried to allocate 30.51 GiB in load" in short
    assert "See the documentation" not in short
    assert whole in " ".join(cli("report", found, "--verbose").out.split())


def test_the_table_of_cards_has_units_in_its_head(cli: Callable[..., Done]) -> None:
    head = cli("gpus").out.splitlines()[0]
    assert re.split(r" {2,}", head) == [
        *("card", "GiB", "driver MiB", "capability", "GB/s"),
        *("bf16 T/s", "fp16 T/s", "fp32 T/s", "link GB/s"),
    ]
