from __future__ import annotations

import io
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
from rich.console import Console

from autotune.probe.result import Outcome
from autotune.report import cells
from autotune.report.plot import scatter
from autotune.report.terminal import probe_line, render, render_text
from autotune.units import GIB


def make_repeated(trial, *outcomes):
    lost = tuple(
        make_result(outcome=outcome, detail="killed by SIGKILL", probe_id=f"{index:04d}")
        for index, outcome in enumerate(outcomes)
    )
    return replace(trial, results=(*lost, *trial.results))


def test_repeated_probes_are_counted():
    trials = [make_trial(0), make_repeated(make_trial(1), Outcome.LOST), make_failure(2)]
    text = " ".join(render_text(make_report(trials)).split())
    assert "ok 2 (1 after repeated probes), device_oom 1." in text


def test_every_figure_of_a_member_is_shown():
    text = render_text(make_report(mixed_trials()))
    (line,) = [line for line in text.splitlines() if line.split()[:2] == ["3", "measured"]]
    for figure in ("15.00", "2,000", "2.0%", "20.0%", "87.6%", "2.00x", "1.50x", "tokens"):
        assert figure in line
    assert "[fastest, balanced] max_length=512" in text
    assert "(on the edge of memory)" in text
    assert "ok 6 (1 over a limit), device_oom 2 (1 not run), crashed 1" in text
    assert "The baseline, trial 0, is measured at 1,000 tokens/s (IQR 2.0%)" in text


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [
        (make_failure(0), "the baseline (trial 0) ran out of memory."),
        (make_failure(0, Outcome.HOST_OOM), "the baseline (trial 0) ran out of memory."),
        (make_failure(0, Outcome.TIMEOUT), "the baseline (trial 0) ended as timeout."),
        (make_trial(0, source="predicted"), "the baseline (trial 0) cannot be compared"),
        (None, "the baseline has not been run."),
    ],
)
def test_a_table_without_gains_says_why(baseline, reason):
    trials = [*([baseline] if baseline else []), make_trial(1, peak_gib=9)]
    report = make_report(trials, pareto_numbers=(1,))
    _, _, below = " ".join(render_text(report).split()).partition("or what differs.")
    assert below.strip().startswith(f"No gain is shown: {reason}")


def test_a_table_with_gains_does_not():
    assert "No gain is shown" not in render_text(make_report(mixed_trials()))


@pytest.mark.parametrize(
    ("num_slots", "words"),
    [
        (1, "(1 min 40 s of loading and training in probes);"),
        (3, "in probes, up to 3 at a time);"),
    ],
)
def test_the_time_of_probes_says_how_many_run_at_a_time(num_slots, words):
    text = render_text(make_report(mixed_trials(), num_slots=num_slots))
    assert words in " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_lines_keep_to_the_width(width):
    text = render_text(make_report(mixed_trials(), warnings=("word " * 60,)), width=width)
    table = [line for line in text.splitlines() if " measured " in line]
    assert max(len(line) for line in text.splitlines() if line not in table) <= max(width, 80)
    if width >= 80:
        assert max(len(line) for line in table) <= width


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([], ["No trial has ended", "0 trials"]),
        (
            [make_failure(0), make_failure(1, Outcome.TIMEOUT)],
            ["The baseline does not fit", "None of 2 trials ran", "Use a card with more memory"],
        ),
        (
            [make_failure(0), make_trial(1)],
            [
                "The baseline does not fit (device_oom: tried to allocate 2.00 GiB in",
                "Pareto set: 1 of 2",
            ],
        ),
        ([make_failure(0, Outcome.UNSUPPORTED)], ["The baseline did not run"]),
        ([make_trial(1)], ["The baseline has not been run", "Pareto set: 1 of 1"]),
        (
            [make_trial(0, feasible=False, violations={"memory_budget": 0.1})],
            ["over a limit (memory_budget by 10.0%)", "trial 0 came closest"],
        ),
        (
            [make_failure(0), make_trial(1, changes=("method",))],
            ["No feasible trial trains the same as the baseline"],
        ),
    ],
)
def test_poor_searches_render(trials, words):
    text = render_text(make_report(trials, finished=False))
    assert all(word in " ".join(text.split()) for word in words)


def test_an_interrupted_search_says_so():
    report = make_report(mixed_trials(), finished=False, interrupted=True)
    assert "interrupted; this is the report so far" in " ".join(render_text(report).split())


def test_predictions_are_called_so():
    single = make_result(make_measurement((1000.0,), source="predicted"))
    trials = [make_trial(0, source="predicted", results=(single,))]
    text = render_text(make_report(trials))
    assert "is predicted at 1,000 tokens/s" in text
    assert "measured" not in text
    assert "(predicted)" in probe_line(trials[0])


def test_like_is_compared_with_like():
    trials = [
        make_trial(0, 1000, 10),
        make_trial(1, 1500, 12),
        make_trial(2, 2000, 11, changes=("tokens",)),
    ]
    text = render_text(make_report(trials))
    assert "Pareto set of those that train the same as the baseline\n" in text
    assert " 1  measured" in text


def test_no_colour_means_plain_text(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    render(make_report(mixed_trials()), Console(file=stream, force_terminal=True, width=100))
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_styles(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=100)
    render(make_report(mixed_trials()), console)
    assert "\x1b[" in stream.getvalue()


def test_reasons_are_listed_when_asked_for():
    report = make_report([], inactive_knobs=(("packing", "needs sft"),), notices=("hello",))
    assert "Not searched: packing. `autotune report RUN --verbose` says" in render_text(report)
    assert "- packing: needs sft" in render_text(report, verbose=True)
    assert "- hello" in render_text(report)


@pytest.mark.parametrize(
    ("trial", "line"),
    [
        (
            make_trial(1, 1500, 5, changed={"bf16": True}),
            "trial 1  bf16=true  ok  1,500 tokens/s (IQR 2.0%)  5.00 GiB (measured)"
            "  1.50x rate, 0.50x memory",
        ),
        (
            make_trial(0),
            "trial 0  nothing changed (baseline)  ok  1,000 tokens/s (IQR 2.0%)  10.00 GiB"
            " (measured)",
        ),
        (
            make_failure(2),
            "trial 2  knob=2  device_oom: tried to allocate 2.00 GiB in the first step",
        ),
        (
            make_failure(2, results=(), skipped_because="implied by trial 1"),
            "trial 2  knob=2  device_oom (not run: implied by trial 1)",
        ),
        (make_failure(2, Outcome.LOST, results=()), "trial 2  knob=2  lost"),
        (
            make_repeated(make_trial(1, 1500, 5), Outcome.LOST),
            "trial 1  knob=1  ok  1,500 tokens/s (IQR 2.0%)  5.00 GiB (measured)"
            "  1.50x rate, 0.50x memory  after a probe that was lost",
        ),
        (
            make_repeated(make_failure(2), Outcome.LOST, Outcome.LOST, Outcome.CRASHED),
            "trial 2  knob=2  device_oom: tried to allocate 2.00 GiB in the first step"
            "  after 2 probes that were lost and a probe that crashed",
        ),
        (
            make_repeated(make_failure(2, Outcome.CRASHED), Outcome.CRASHED),
            "trial 2  knob=2  crashed in the first step: CUDA out of memory. Tried to allocate"
            " 2.00 GiB  after a probe that crashed",
        ),
    ],
)
def test_probe_line(trial, line):
    assert probe_line(trial, make_trial(0)) == line


def test_probe_line_without_a_baseline_has_no_gain():
    assert "rate" not in probe_line(make_trial(1), None)
    over = make_trial(1, feasible=False, violations={"memory_budget": 0.1})
    assert "ok, over memory_budget" in probe_line(over, make_failure(0))


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "-"), (1.0, "100%"), (0.9999, ">99.9%"), (0.0, "0%"), (1e-5, "<0.1%"), (0.5, "50.0%")],
)
def test_percent_never_rounds_to_none_or_all(share, text):
    assert cells.percent(share) == text


def test_plot_has_its_marks():
    trials = mixed_trials()
    text = scatter(trials, pareto=(0, 1, 2, 3), budget_bytes=16 * GIB)
    rows = [line.split("┤")[1] for line in text.splitlines() if "┤" in line]
    drawn = "".join(rows)
    assert drawn.count("P") == 3
    assert drawn.count("b") == 1
    assert drawn.count("·") == 1
    assert drawn.count("x") == 2
    assert "2 out of memory" in text


def test_there_is_no_plot_of_nothing_and_none_of_a_single_point():
    assert scatter([make_failure(0)]) == ""
    assert scatter([make_trial(0)]) == ""
    assert scatter([make_trial(0), make_trial(1), make_failure(2)], budget_bytes=16 * GIB) == ""


def test_a_budget_far_away_is_named_and_not_drawn():
    text = scatter([make_trial(0), make_trial(1, 2000, 12)], budget_bytes=1000 * GIB)
    assert "not drawn, far to the right: budget 1000.00 GiB" in text


def test_values_that_are_equal_on_one_axis_are_drawn_in_its_middle_with_one_label():
    text = scatter([make_trial(0, 1000, 10), make_trial(1, 2000, 10)], width=60)
    (foot,) = [line for line in text.splitlines() if line.endswith(" GiB")]
    assert foot.split() == ["10.00", "GiB"]
    columns = {
        line.index(mark) for line in text.splitlines()[:15] for mark in "b·" if mark in line
    }
    assert len(columns) == 1
    text = scatter([make_trial(0, 1000, 10), make_trial(1, 1000, 12)], width=60)
    labels = [line.split("┤")[0].strip() for line in text.splitlines() if "┤" in line]
    assert [label for label in labels if label] == ["1,000"]
    assert not labels[0]
    assert not labels[-1]
