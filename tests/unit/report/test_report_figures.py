"""The JSON's figures are the table's."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from report_factory import (
    make_failure,
    make_measurement,
    make_report,
    make_result,
    make_trial,
    mixed_trials,
)

from autotune.probe.result import MemoryPeak
from autotune.report import Report
from autotune.report.terminal import render_text
from autotune.units import GIB, format_duration, format_rate


def table(report: Report) -> dict[int, dict[str, str]]:
    """Return the figures in the text, by trial and column."""
    lines = render_text(report, width=200, plot=False).splitlines()
    first = next(i for i, line in enumerate(lines) if line.split()[:2] == ["trial", "source"])
    titles = lines[first].split()
    rows = {}
    for line in lines[first + 1 :]:
        if not line.strip():
            break
        if re.match(r"\s*\d+\s+(measured|predicted)\s", line):
            cells = re.split(r"\s{2,}", line.strip())
            assert len(cells) == len(titles)
            rows[int(cells[0])] = dict(zip(titles, cells, strict=True))
    return rows


def shown(figures: dict) -> dict[str, str]:
    """Return the JSON's figures as the table writes them."""

    def of(value, text):
        return "-" if value is None else text(value)

    def gain(name):
        tied = "~" if figures[f"{name}_is_noise"] else ""
        return of(figures[name], lambda value: f"{tied}{value:.2f}x")

    rate = figures["tokens_per_s"]
    return {
        "source": figures["source"],
        "GiB": of(figures["used_peak_bytes"], lambda value: f"{value / GIB:.2f}"),
        "tokens/s": of(rate["median"], format_rate),
        "IQR": of(rate["low"], lambda low: f"{(rate['high'] - low) / rate['median']:.1%}"),
        "samples/s": of(figures["samples_per_s"], format_rate),
        "epoch": of(figures["epoch_s"], format_duration),
        "padding": of(figures["padding_share"], lambda value: f"{value:.1%}"),
        "trained": f"{figures['trained_share']:.1%}".replace("100.0%", "100%"),
        "rate": gain("rate_gain"),
        "memory": gain("memory_gain"),
        "training": figures["training"],
    }


def predicted() -> tuple:
    return tuple(
        replace(
            item,
            source="predicted",
            results=tuple(
                replace(run, measurement=replace(run.measurement, source="predicted"))
                if run.measurement
                else run
                for run in item.results
            ),
        )
        for item in mixed_trials()
    )


@pytest.mark.parametrize("trials", [mixed_trials(), predicted()], ids=["measured", "predicted"])
def test_the_figures_in_the_json_are_the_table_s(trials):
    report = make_report(trials)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    rows = table(report)
    assert list(rows) == data["pareto"]
    assert len(rows) > 1
    by_number = {item["number"]: item for item in data["trials"]}
    for number, row in rows.items():
        told = {"trial": str(number), **shown(by_number[number]["figures"])}
        assert {name: told[name] for name in row} == row
    text = render_text(report, width=200)
    assert set(data["picks"]) == {"fastest", "leanest", "balanced", "highest-fidelity"}
    del data["picks"]["highest-fidelity"]  # it is named below the table
    for name, number in data["picks"].items():
        tags = re.search(rf"^ *{number}  .*\n +\[([a-z, ]+)\]", text, re.MULTILINE)
        assert tags is not None
        assert name in tags[1].split(", ")


def test_only_trials_that_ran_have_figures_and_nothing_feasible_has_no_picks():
    over = make_trial(1, feasible=False, violations={"memory_budget": 0.1})
    data = make_report([make_failure(0), over]).to_dict()
    assert data["picks"] == {}
    assert data["pareto"] == []
    assert data["trials"][0]["figures"] is None
    figures = data["trials"][1]["figures"]
    assert figures["used_peak_bytes"] == over.peak_bytes
    assert figures["rate_gain"] is figures["rate_gain_is_noise"] is None
    assert "device memory used" in figures["peak_of"]


def test_a_single_step_has_no_spread():
    data = make_report(
        [make_trial(0, results=(make_result(make_measurement((1000.0,))),))]
    ).to_dict()
    assert data["trials"][0]["figures"]["tokens_per_s"] == {
        "median": pytest.approx(1000.0),
        "low": None,
        "high": None,
    }


def test_a_report_written_before_has_none_of_it_and_is_read(tmp_path):
    report = make_report(mixed_trials())
    data = report.to_dict()
    for name in ("picks", "pareto"):
        del data[name]
    for item in data["trials"]:
        del item["figures"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    assert Report.load(path) == report
    assert Report.load(path).to_dict() == report.to_dict()


def test_what_follows_from_the_rest_is_worked_out_again():
    data = make_report(mixed_trials()).to_dict()
    good = json.loads(json.dumps(data))
    data["picks"] = {"fastest": 99}
    data["trials"][0]["figures"] = "nonsense"
    assert json.loads(json.dumps(Report.from_dict(data).to_dict())) == good


def test_a_step_that_generates_says_what_takes_how_long_and_how_much():
    usual = make_measurement()
    steps = tuple(replace(step, generation_time_s=3.0) for step in usual.steps)
    phases = {**usual.phases, "generation": MemoryPeak(used_bytes=7 * GIB)}
    trial = make_trial(0, results=(make_result(replace(usual, steps=steps, phases=phases)),))
    report = make_report([trial])
    (data,) = json.loads(json.dumps(report.to_dict()))["trials"]
    found = data["figures"]["generation"]
    assert found["time_s"] == 3.0
    assert found["training_time_s"] == pytest.approx(usual.step_time_s.median)
    assert found["used_peak_bytes"] == 7 * GIB
    assert found["training_used_peak_bytes"] == 10 * GIB
    text = " ".join(render_text(report).split())
    assert "a step: 3 s of generation at 7.00 GiB, " in text
    assert " s of training at 10.00 GiB, measured" in text


def test_other_trainers_say_nothing_of_generation():
    report = make_report([make_trial(0)])
    assert report.to_dict()["trials"][0]["figures"]["generation"] is None
    assert "generation" not in render_text(report)
