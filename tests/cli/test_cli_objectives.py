"""Searches for other things than tokens per second and peak memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_kit import SEARCH, Done

from autotune.report.model import Report
from autotune.report.terminal import render_text
from autotune.testing.fakes import FakeExecutor


def search(cli: Callable[..., Done], *names: str, folder: str = "found", **more: Any) -> Done:
    asked = [word for name in names for word in ("--objective", name)]
    return cli(*SEARCH, "--trials", 8, "--run-dir", folder, *asked, *more.get("options", ()))


@pytest.mark.parametrize(
    "names",
    [
        ("epoch-time",),
        ("peak-memory",),
        ("tokens_per_s",),
        ("epoch-time", "host-memory"),
        ("samples-per-s", "peak-memory", "host_memory"),
    ],
)
def test_one_two_and_three_objectives(
    names: tuple[str, ...], machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = search(cli, *names)
    assert done.code == 0, done.err
    wanted = sorted(name.replace("-", "_") for name in names)
    report = Report.load("found/report.json")
    assert list(report.objectives) == wanted
    assert report.pareto
    assert all(item.feasible for item in report.pareto)
    words = " ".join(done.out.split())
    assert "Objective" in words
    for name in wanted:
        assert name.replace("_", " ") in words
    for number in report.picks().values():
        assert report.pick(number).feasible
    again = cli("report", "found", "--json").json
    found = next(item["figures"] for item in again["trials"] if item["figures"])
    assert set(found["objectives"]) == set(wanted)


def test_of_one_objective_the_set_is_the_best_within_the_noise(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    assert search(cli, "peak-memory").code == 0
    report = Report.load("found/report.json")
    feasible = [item.peak_bytes or 0 for item in report.trials if item.feasible]
    assert [item.peak_bytes for item in report.pareto] == [min(feasible)]


def test_the_fastest_goes_by_the_speed_that_was_asked_for(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = search(cli, "epoch-time", "peak-memory")
    report = Report.load("found/report.json")
    times = {
        item.number: pooled.epoch_time_s
        for item in report.pareto
        if (pooled := item.measurement) is not None
    }
    assert report.picks()["fastest"] == min(times, key=lambda number: times[number])
    assert "[fastest] and [balanced] go by epoch time." in " ".join(done.out.split())


def test_chosen_columns_are_kept_in_a_narrow_terminal(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    assert search(cli, "epoch-time", "host-memory").code == 0
    report = Report.load("found/report.json")
    narrow = render_text(report, width=60)
    assert "epoch" in narrow.partition("Pareto set:")[2].splitlines()[1]
    assert "host_memory" in narrow
    plain = render_text(replace(report, objectives=("peak_memory", "tokens_per_s")), width=60)
    assert "host_memory" not in plain


def test_other_objectives_are_another_search(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    assert search(cli, "epoch-time", "peak-memory").code == 0
    done = search(cli, options=("--resume",))
    assert done.code == 2
    assert "--objective: epoch_time, peak_memory before, peak_memory, tokens_per_s now" in done.err
    # The order of asking makes no other search.
    assert search(cli, "peak-memory", "epoch_time", options=("--resume",)).code == 0


def test_naming_the_default_is_no_other_search(found: Path, cli: Callable[..., Done]) -> None:
    assert "objectives" not in json.loads((found / "run.json").read_text())["identity"]
    assert search(cli, "tokens-per-s", "peak-memory", options=("--resume",)).code == 0


def test_an_unknown_objective_names_close_ones(cli: Callable[..., Done]) -> None:
    done = search(cli, "epoch-tme")
    assert done.code == 2
    assert "epoch_time" in done.err
    assert not Path("found").exists()


def test_an_objective_without_a_value_is_refused_at_the_baseline(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = FakeExecutor._probe

    def without_rows(self: FakeExecutor, spec: Any) -> Any:
        result = probe(self, spec)
        assert result.measurement is not None
        return replace(result, measurement=replace(result.measurement, rows_per_epoch=0.0))

    monkeypatch.setattr(FakeExecutor, "_probe", without_rows)
    done = search(cli, "epoch-time", "peak-memory")
    assert done.code == 1
    assert "trial 0 has no value of what is to be optimised (epoch_time: " in done.err
    assert "without --objective epoch_time" in done.err
    assert cli("report", "found").code == 0
