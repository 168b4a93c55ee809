"""The report as one HTML file, without a browser."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest
from report_factory import (
    make_failure,
    make_measurement,
    make_report,
    make_result,
    make_trial,
    mixed_trials,
)

from autotune.errors import PrerequisiteError
from autotune.probe.result import MemoryPeak
from autotune.report import html
from autotune.report.html import PredictedPoint, captions, charts, page, picture
from autotune.report.model import Report
from autotune.units import GIB

pytest.importorskip("plotly")
pytest.importorskip("jinja2")

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """A page's tags, ids, texts outside of scripts, scripts and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.addresses += [found[name] or "" for name in ("src", "href") if name in found]
        if tag in ("script", "style"):
            self.open.append(tag)
            self.scripts += [""] if tag == "script" else []

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open:
            self.words.append(data)
        elif self.open[-1] == "script":
            self.scripts[-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out plotly's 5 MB, which take a parser longer than all else."""
    monkeypatch.setattr(import_module("plotly.offline"), "get_plotlyjs", lambda: "/* plotly */")


def read(report: Report, *points: PredictedPoint) -> Page:
    return Page(page.render(report, points))


def test_all_parts_are_there() -> None:
    shown = read(
        make_report(
            mixed_trials(),
            notices=("A notice of it.",),
            warnings=("A warning of it.",),
            inactive_knobs=(("load_in_4bit", "bitsandbytes is not installed"),),
            sampler="tpe",
            seed=7,
        )
    )
    for words in (
        "org/model",
        "Test Card",
        "2026-01-02 03:04:05 UTC",
        "2.00x the rate, 1.50x the memory of the baseline",
        "tpe, 7",
        "A notice of it.",
        "A warning of it.",
        "bitsandbytes is not installed",
        "the device's free memory",
        "autotune search org/model org/data",
        "trl sft --config trial-0003.yaml",
        "per_device_train_batch_size: 8",
        "out of memory is implied by trial 5",
        "on the edge of memory",
        "over memory_budget by 6.2%",
    ):
        assert words in shown.text.replace(" ,", ","), words
    assert {f"trial-{number}" for number in range(9)} <= set(shown.ids)
    assert {"h1", "h2", "table", "th", "nav", "main", "details"} <= set(shown.tags)


def test_it_needs_nothing_from_elsewhere() -> None:
    shown = read(make_report(mixed_trials()))
    assert shown.addresses
    assert all(item.startswith("#") or item == "data:," for item in shown.addresses)
    assert not {"iframe", "object", "embed", "img"} & set(shown.tags)
    text = page.render(make_report(mixed_trials()))
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(" not in text


def test_links_within_the_page_lead_somewhere() -> None:
    shown = read(make_report(mixed_trials()))
    assert {item[1:] for item in shown.addresses if item.startswith("#")} <= set(shown.ids)
    assert len(shown.ids) == len(set(shown.ids))


def test_whatever_a_run_says_is_text() -> None:
    trials = [
        make_trial(0, config={"model_name_or_path": EVIL, "max_length": 8}, num_probes=2),
        make_trial(1, 2000, 5, changed={"knob": EVIL}, num_probes=2),
        make_failure(
            2,
            results=(make_result(outcome=make_failure(2).outcome, detail=EVIL),),
            skipped_because=EVIL,
        ),
    ]
    report = make_report(
        trials,
        **{name: EVIL for name in ("model", "dataset", "command", "space", "sampler")},
        **{name: (EVIL,) for name in ("notices", "warnings")},
        removed_values=((EVIL, EVIL),),
        device={"name": EVIL, "kind": "cuda", "label": EVIL, "driver": EVIL},
        versions={EVIL: EVIL},
        data={"length_counts": [[1, 4, 2]]},
    )
    points = [PredictedPoint(label=EVIL, peak_bytes=GIB, rate=100)]
    shown, harmless = read(report, *points), read(make_report(mixed_trials()))
    assert len(shown.scripts) == len(harmless.scripts)
    assert "img" not in shown.tags
    assert not {name for name in shown.attributes if name.startswith("on")}
    assert EVIL in shown.text
    figure = next(item for item in shown.scripts if item.startswith("{"))
    assert "</" not in figure
    # Over a point plotly knows a few tags: none of a run's may be among them.
    texts = [text for trace in json.loads(figure)["data"] for text in trace.get("text", ())]
    assert any("&lt;/script&gt;" in text for text in texts)
    assert not any("<script" in text or "<img" in text for text in texts)


def test_only_its_own_scripts_may_run() -> None:
    text = page.render(make_report(mixed_trials()))
    policy = text.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0]
    assert policy.count("sha256-") == 2
    assert "unsafe-inline" not in policy.split("style-src")[0]


@pytest.mark.parametrize(
    ("trials", "values", "says"),
    [
        ([], {"finished": False, "interrupted": True}, "No trial has ended"),
        ([], {"finished": False}, "The search has not finished"),
        ([make_failure(0), make_failure(1)], {}, "None of 2 trials ran within 16.00 GiB"),
        ([make_failure(0), make_failure(1)], {}, "so that there is nothing to draw"),
        ([make_failure(0), make_failure(1)], {"budget_bytes": None}, "no trial ran"),
        ([make_trial(0)], {"interrupted": True, "finished": False}, "was interrupted"),
        ([make_trial(3)], {}, "The baseline has not been run"),
        ([make_trial(0)], {"data": {}}, "does not hold the lengths"),
        ([make_trial(0)], {"data": {"length_counts": "broken"}}, "does not hold the lengths"),
        ([make_trial(0)], {"data": {"length_counts": [[1, 2]]}}, "does not hold the lengths"),
        ([make_trial(0)], {"device": {}, "versions": {}, "command": ""}, "nothing is fetched"),
    ],
)
def test_what_is_missing_is_said(trials: list, values: dict, says: str) -> None:
    assert says in read(make_report(trials, **values)).text


def test_a_report_from_before_there_were_lengths_is_read(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "golden" / "report.json"
    target = html.write(Report.load(stored), tmp_path / "report.html")
    assert "does not hold the lengths" in Page(target.read_text()).text


def test_the_picture_is_one_that_plotly_knows() -> None:
    graph_objects = import_module("plotly.graph_objects")
    report = make_report(mixed_trials())
    points = [PredictedPoint(label="a", peak_bytes=GIB, rate=10.0)]
    drawing = json.dumps(picture.figure(report, points))
    names = set(re.findall(r'"@(\w+)"', drawing))
    style = Path(page.__file__).with_name("page.css").read_text()
    assert {name for name in names if f"--{name}:" not in style} == set()
    graph_objects.Figure(json.loads(re.sub(r'"@\w+"', '"red"', drawing)))


def test_every_trial_with_figures_is_drawn_once_in_its_own_way() -> None:
    report = make_report(mixed_trials())
    drawing = picture.figure(report)
    assert drawing is not None
    marks = {
        trace["name"]: (trace["marker"]["symbol"], trace["customdata"])
        for trace in drawing["data"]
        if trace["mode"] == "markers"
    }
    assert marks == {
        "baseline": ("diamond", [0]),
        "Pareto set": ("circle", [1, 2, 3]),
        "other, within the limits": ("circle-open", [4]),
        "over a limit": ("triangle-up-open", [7]),
        "out of memory: no rate": ("x", [5, 6]),
    }
    oom = next(item for item in drawing["data"] if item["name"] == "out of memory: no rate")
    assert min(oom["x"]) > 16  # beyond the budget
    assert len(drawing["layout"]["shapes"]) == 1
    assert "budget 16.00 GiB" in str(drawing["layout"]["annotations"])


def test_a_budget_that_is_far_away_is_said_instead_of_drawn() -> None:
    report = make_report([make_trial(0), make_trial(1, 2000)], budget_bytes=80 * GIB)
    drawing = picture.figure(report)
    assert drawing is not None
    assert drawing["layout"]["shapes"] == []
    assert any("80.00 GiB, lies far" in text for text in captions.caption(report))


def test_bars_are_the_quartiles_and_the_range_of_the_peaks() -> None:
    results = tuple(
        make_result(make_measurement((900.0, 1000.0, 1100.0), peak), probe_id=f"0000-{peak}")
        for peak in (9.0, 10.0)
    )
    drawing = picture.figure(make_report([make_trial(0, results=results)]))
    assert drawing is not None
    trace = next(item for item in drawing["data"] if item["name"] == "baseline")
    assert trace["x"] == [10.0]
    assert trace["error_x"]["arrayminus"] == [1.0]
    assert trace["error_y"]["array"] == [pytest.approx(75.0)]
    assert "least of its probes 9.00 GiB" in trace["text"][0]


def predicted_report() -> Report:
    makeup = {"at_peak": {"parameters": 2 * GIB, "activations": 4 * GIB}}
    phases = {
        "first_step": MemoryPeak(
            allocated_bytes=6 * GIB, reserved_bytes=7 * GIB, used_bytes=8 * GIB
        )
    }
    values = {"source": "predicted", "makeup": makeup, "phases": phases}
    device = {"name": "virtual:rtx-4090", "kind": "cuda", "label": "RTX 4090"}
    trial = make_trial(0, source="predicted", measurement_values=values)
    return make_report([trial], device=device)


def test_predictions_are_called_so_and_look_so() -> None:
    report = predicted_report()
    shown = read(report)
    assert "predicted, none is measured" in shown.text
    assert "±25%" in shown.text
    drawing = picture.figure(report)
    assert drawing is not None
    (baseline,) = (item for item in drawing["data"] if item["mode"] == "markers")
    assert baseline["marker"]["symbol"] == "diamond-dot"
    assert baseline["error_y"]["visible"] is False


def test_a_predicted_peak_is_made_of_parts_that_add_up_to_it() -> None:
    (item,) = charts.makeups(predicted_report())
    assert item["total"] == "8.00 GiB"
    assert [(part["name"], part["gib"]) for part in item["parts"]] == [
        ("parameters", "2.00 GiB"),
        ("activations", "4.00 GiB"),
        ("reserved, unused", "1.00 GiB"),
        ("context", "1.00 GiB"),
    ]
    assert sum(part["share"] for part in item["parts"]) == pytest.approx(1)


def test_a_measured_peak_is_shown_by_phase() -> None:
    (item,) = charts.peaks_by_phase(make_report([make_trial(0)]))
    assert [(phase["name"], phase["gib"], phase["is_peak"]) for phase in item["phases"]] == [
        ("load", "2.50 GiB", False),
        ("first step", "10.00 GiB", True),
    ]


def test_lengths_are_marked_where_the_picks_cut_them() -> None:
    trials = [
        make_trial(0, config={"max_length": 1024}),
        make_trial(1, 2000, config={"max_length": 256}, coverage=0.9),
        make_trial(2, 500, 2, config={"max_length": None}),
    ]
    report = make_report(trials, data={"length_counts": ((1, 256, 6), (257, 512, 2))})
    found = charts.lengths(report)
    assert found is not None
    assert [bar["share"] for bar in found["bars"]] == [1.0, pytest.approx(1 / 3)]
    assert [(mark["length"], mark["share"], mark["beyond"]) for mark in found["marks"]] == [
        ("256", 0.5, False),
        ("1,024", 1.0, True),
        ("no limit", 1.0, True),
    ]
    assert found["marks"][0]["trained"] == "90.0%"


def test_predictions_beside_a_run_are_read_leniently(tmp_path: Path) -> None:
    report = make_report(
        [make_trial(0, candidate={"a": 1, "b": 1}), make_trial(1, candidate={"a": 9, "b": 1})]
    )
    assert html.read_predictions(tmp_path, report) == ()
    records = [
        {
            "prediction": {
                "candidate": {"a": 2, "b": 1},
                "values": {"tokens_per_s": 5.0},
                "peak_bytes": GIB,
            }
        },
        {"candidate": {"a": 3, "b": 1}, "values": {"tokens_per_s": 6.0, "peak_memory": 7}},
        {
            "prediction": {
                "candidate": {"a": 2, "b": 1},
                "values": {"tokens_per_s": 8.0},
                "peak_bytes": GIB,
            }
        },
        {
            "prediction": {
                "candidate": {"a": 9, "b": 1},
                "values": {"tokens_per_s": 5.0},
                "peak_bytes": GIB,
            }
        },
        {"prediction": {"candidate": {"a": 4}, "values": {}, "peak_bytes": None}},
        {"kind": "stand_in", "card": {}},
        [1],
        "text",
    ]
    text = "".join(json.dumps(record) + "\n" for record in records) + '{"prediction": {"cand'
    (tmp_path / "predictions.jsonl").write_text(text)
    # Trial 1 took ten times the memory and was two hundred times as fast as predicted.
    assert html.read_predictions(tmp_path, report) == (
        PredictedPoint(label="a=2", peak_bytes=10 * GIB, rate=1600.0, is_scaled=True),
        PredictedPoint(label="a=3", peak_bytes=70, rate=1200.0, is_scaled=True),
    )
    first, *_ = html.read_predictions(tmp_path, make_report([]))
    assert first == PredictedPoint(label="a=2, b=1", peak_bytes=GIB, rate=8.0)


def test_predictions_are_drawn_beside_measured_trials() -> None:
    report = make_report(mixed_trials())
    far = PredictedPoint(label="far", peak_bytes=900 * GIB, rate=1)
    near = PredictedPoint(label="near", peak_bytes=5 * GIB, rate=1)
    drawing = picture.figure(report, [far, near])
    assert drawing is not None
    (trace,) = (item for item in drawing["data"] if item["name"] == "predicted only, not run")
    assert trace["marker"]["symbol"] == "square-open"
    assert trace["x"] == [5.0]
    assert "Small squares" in read(report, far, near).text


def test_processes_need_a_second_file() -> None:
    trial = make_trial(0, accelerate={"num_processes": 2, "distributed_type": "MULTI_CPU"})
    text = read(make_report([trial])).text
    assert (
        "trl sft --config trial-0000.yaml --accelerate_config trial-0000.accelerate.yaml" in text
    )
    assert "distributed_type: MULTI_CPU" in text


def test_what_cannot_be_written_as_yaml_is_said_in_its_place() -> None:
    trial = make_trial(0, config={"odd": object()})
    assert "odd" in read(make_report([trial])).text


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PrerequisiteError, match=package) as caught:
        page.check()
    assert "pip install 'trl-autotune[html]'" in caught.value.hint


def test_a_file_there_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    assert html.write(replace(make_report([make_trial(0)]), model="m/x"), target) == target
    assert target.read_text().startswith("<!doctype html>")
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]


def test_predictions_that_are_no_file_or_nested_are_passed_over(tmp_path: Path) -> None:
    report = make_report([make_trial(0)])
    (tmp_path / "predictions.jsonl").write_text("[" * 100_000 + "\n")
    assert html.read_predictions(tmp_path, report) == ()
    (tmp_path / "predictions.jsonl").unlink()
    os.mkfifo(tmp_path / "predictions.jsonl")
    assert html.read_predictions(tmp_path, report) == ()
