"""How predictions are told: errors in place of spreads, and what the host must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_factory import make_measurement, make_report, make_result, make_trial

from autotune.probe import prediction
from autotune.probe.result import MemoryPeak, Outcome
from autotune.report import estimated_text
from autotune.report.cells import ending, rate
from autotune.report.estimated import CardEstimate, Estimate
from autotune.report.terminal import render_text
from autotune.units import GIB
from autotune.virtual import cards

VIRTUAL = {"name": "virtual:l4", "kind": "cuda", "label": "NVIDIA L4 (virtual)"}


def predicted(number: int, host_gib: float = 0.0):
    peaks = MemoryPeak(
        allocated_bytes=8 * GIB,
        reserved_bytes=9 * GIB,
        used_bytes=10 * GIB,
        resident_bytes=round(host_gib * GIB),
    )
    pooled = make_measurement(source="predicted", phases={"first_step": peaks}, makeup=MAKEUP)
    return make_trial(number, source="predicted", results=(make_result(pooled),))


MAKEUP = {
    "peak_bytes": 8 * GIB,
    "peak_event": {"index": 0, "op": "mm", "module": "", "phase": "forward", "mark": ""},
    "at_peak": {"parameters": 8 * GIB},
    "largest": [],
    "timeline": {
        "num_events": 1,
        "kinds": ["parameters"],
        "points": [[0, 8 * GIB]],
        "phases": ["forward"],
        "marks": [],
    },
    "host_peak_bytes": 0,
}


def test_predicted_rates_have_an_error_and_no_spread():
    trial = predicted(0)
    assert rate(trial) == "1,000 tokens/s ±25%"
    text = " ".join(render_text(make_report([trial], device=VIRTUAL)).split())
    assert "IQR" not in text
    assert "tokens/s: predicted, ±25% (checked against measurements on the A100 only)" in text
    header = make_report([trial], device=VIRTUAL).pick(0)
    from autotune.probe import trl_yaml

    lines = "\n".join(trl_yaml.header_lines(header.header(), file_name="x.yaml"))
    assert "quartiles" not in lines
    assert "1,000 tokens/s predicted, ±25%" in lines
    assert "A100 only" in lines


def test_measured_rates_keep_their_spread():
    assert "(IQR 2.0%)" in rate(make_trial(0))


@pytest.mark.parametrize(("card", "says"), [("NVIDIA A100 80GB PCIe", False), ("Tesla T4", True)])
def test_the_rate_was_checked_on_one_card(card, says):
    assert ("A100 only" in prediction.trust(card)) is says
    assert ("A100 only" in prediction.rate_error(card)) is says


def test_figures_of_memory_are_bridged():
    text = " ".join(render_text(make_report([predicted(0)], device=VIRTUAL)).split())
    assert "8.00 GiB allocated." in text
    assert "9.00 GiB reserved by PyTorch's allocator, 10.00 GiB used with the context" in text
    assert "GiB: peak of the device memory used (reserved and context)" in text


def test_the_timeline_says_what_its_budget_is() -> None:
    report = make_report([predicted(0)], device=VIRTUAL, budget_bytes=15 * GIB)
    text = " ".join(render_text(report, verbose=True).split())
    assert "budget 15.00 GiB" in text
    assert "budget 14.00 GiB" in text
    assert "That budget is the limit less the context, which is no tensor's." in text
    assert "That budget" not in render_text(report)


def test_a_block_of_figures_names_one_allocated_peak():
    trial = predicted(0)
    pooled = trial.results[0].measurement
    tensors = {**MAKEUP, "peak_bytes": 7 * GIB, "at_peak": {"parameters": 7 * GIB}}
    smaller = replace(pooled, makeup=tensors)
    report = make_report([make_trial(0, source="predicted", results=(make_result(smaller),))])
    text = " ".join(render_text(replace(report, device=VIRTUAL)).split())
    assert "8.00 GiB allocated." in text
    assert "whole blocks 1.00 12.5%" in text
    assert "7.00 GiB allocated" not in text


@pytest.mark.parametrize(("gib", "noted"), [(0.5, False), (286.0, True)])
def test_host_memory_is_noted_with_each_member(gib, noted):
    from autotune.probe import trl_yaml

    report = make_report([predicted(0, gib)], device=VIRTUAL)
    assert ("holds 286.00 GiB on the host, predicted" in render_text(report)) is noted
    lines = trl_yaml.header_lines(report.pick(0).header(), file_name="x.yaml")
    assert any("host memory  286.00 GiB predicted" in line for line in lines) is noted


def test_the_resident_size_of_a_measured_run_is_not_what_was_moved():
    assert make_trial(0).host_bytes is None


@pytest.mark.parametrize(("gib", "warned"), [(63.0, False), (286.0, True)])
def test_an_estimate_warns_of_what_the_host_must_hold(gib, warned):
    card = cards.find("h100")
    measurement = predicted(0, gib).measurement
    found = CardEstimate(
        device="virtual:h100",
        label=card.name,
        memory_bytes=card.memory_bytes,
        context_bytes=card.context_bytes,
        budget_bytes=70 * GIB,
        outcome=Outcome.OK,
        measurement=measurement,
    )
    assert found.fits
    assert found.verdict().startswith("FITS: a predicted 10.00 GiB used")
    assert ("WARNING: it needs 286.00 GiB of host memory." in found.verdict()) is warned


@pytest.mark.parametrize(
    ("outcome", "measured", "has_figures"),
    [
        (Outcome.OK, True, True),
        (Outcome.DEVICE_OOM, False, True),
        (Outcome.UNSUPPORTED, False, False),
        (Outcome.CRASHED, False, False),
    ],
)
@pytest.mark.parametrize("num_cards", [1, 2])
def test_verdicts_without_figures_speak_of_none(outcome, measured, has_figures, num_cards):
    card = CardEstimate(
        device="virtual:h100",
        label="H100",
        memory_bytes=80 * GIB,
        context_bytes=GIB,
        budget_bytes=70 * GIB,
        outcome=outcome,
        is_refusal=outcome is Outcome.UNSUPPORTED,
        measurement=predicted(0, 1.0).measurement if measured else None,
    )
    refused = replace(card, outcome=Outcome.UNSUPPORTED, is_refusal=True, measurement=None)
    estimate = Estimate(
        file="x.yaml", trainer="sft", cards=(card, refused)[:num_cards], coverage=1.0, data="Rows"
    )
    text = " ".join(estimated_text.render(estimate, 100).plain.split())
    assert ("All figures are predicted" in text) is has_figures
    assert ("trains on 100% of the tokens" in text) is has_figures


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        (
            "OutOfMemory: CUDA out of memory. Tried to allocate 30.51 GiB. GPU 0 " + "x " * 300,
            "device_oom: tried to allocate 30.51 GiB in load",
        ),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"
            " allocate 2147483648 bytes. Error code 12",
            "device_oom: tried to allocate 2.00 GiB in load",
        ),
        ("word " * 300, "device_oom in load: word word"),
    ],
)
def test_why_a_trial_failed_is_one_short_line(detail, told):
    result = make_result(outcome=Outcome.DEVICE_OOM, detail=detail, phase="load")
    text = ending(make_trial(1, outcome=Outcome.DEVICE_OOM, results=(result,)))
    assert text.startswith(told)
    assert len(text) < 200
