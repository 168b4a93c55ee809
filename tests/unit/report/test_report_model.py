from __future__ import annotations

import json

import pytest
import yaml
from report_factory import (
    make_failure,
    make_measurement,
    make_report,
    make_result,
    make_trial,
    mixed_trials,
)

from autotune.errors import JournalError, NoFeasibleConfigError, UnknownNameError
from autotune.probe.result import MemoryPeak, Outcome
from autotune.report import Report, Trial
from autotune.report.model import probe_work_s
from autotune.report.trial import combine
from autotune.units import GIB


def test_steps_are_pooled_and_peaks_are_the_greatest():
    first = make_measurement((1000.0,) * 3, 10.0)
    second = make_measurement(
        (1200.0,) * 3, 11.0, num_alloc_retries=1, worst_batch=(16, 1024), warmup_steps=first.steps
    )
    trial = make_trial(1, results=(make_result(first), make_result(second)))
    pooled = trial.measurement
    assert pooled is not None
    assert len(pooled.steps) == 6
    assert len(pooled.warmup_steps) == 3
    assert pooled.peak_bytes == 11 * GIB == trial.peak_bytes
    assert pooled.worst_batch == (16, 1024)
    assert trial.tokens_per_s.median == pytest.approx(1100)
    assert trial.peak_interval.low == 10 * GIB
    assert trial.peak_interval.median == 10.5 * GIB
    assert trial.confirmed
    assert trial.on_the_edge


def test_unknown_peaks_stay_unknown_and_phases_are_united():
    a = make_measurement(phases={"load": MemoryPeak(used_bytes=1)})
    b = make_measurement(phases={"save": MemoryPeak(used_bytes=2)})
    assert dict(combine([a, b]).phases) == {
        "load": MemoryPeak(used_bytes=1),
        "save": MemoryPeak(used_bytes=2),
    }
    with pytest.raises(ValueError, match="no measurement"):
        combine([])


def test_a_failed_confirmation_is_not_measured():
    trial = make_trial(1)
    oom = make_result(outcome=Outcome.DEVICE_OOM)
    both = make_trial(1, results=(*trial.results, oom), outcome=Outcome.DEVICE_OOM)
    assert both.num_probes == 2
    assert not both.confirmed
    assert len(both.measurement.steps) == 5


def test_a_trial_without_a_finished_probe_has_no_figures():
    trial = make_failure(1)
    assert trial.measurement is None
    assert trial.tokens_per_s is trial.samples_per_s is trial.peak_bytes is None
    assert not trial.on_the_edge


def test_trial_and_report_round_trip_through_json(tmp_path):
    report = make_report(
        mixed_trials(),
        device={"label": "Card", "capability": (9, 0)},
        inactive_knobs=(("packing", "not for this trainer"),),
        removed_values=(("optim=x", "needs y"),),
        warnings=("w",),
    )
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert Report.load(report.save(tmp_path / "deep" / "report.json")) == report
    assert [item.name for item in (tmp_path / "deep").iterdir()] == ["report.json"]
    for trial in report.trials:
        assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"schema": 1}'])
def test_an_unreadable_report_is_a_journal_error(tmp_path, text):
    path = tmp_path / "report.json"
    with pytest.raises(JournalError):
        Report.load(path)
    path.write_text(text)
    with pytest.raises(JournalError):
        Report.load(path)


def test_picks():
    report = make_report(mixed_trials())
    assert [item.number for item in report.pareto] == [2, 0, 1, 3]
    assert report.pick("leanest").number == 2
    assert report.pick("fastest").number == 3
    assert report.pick("balanced").number == report.picks()["balanced"]
    assert report.pick(5).outcome is Outcome.DEVICE_OOM
    assert report.pick("0007").number == 7
    assert [item.number for item in report.same_training()] == [2, 0, 1]


def test_same_training_compares_like_with_like():
    trials = [
        make_trial(0, 1000, 10),
        make_trial(1, 1500, 12),
        make_trial(2, 2000, 11, changes=("tokens",)),
    ]
    report = make_report(trials, objectives=("tokens_per_s", "an_outside_one"))
    assert report.pareto_numbers == (0, 2)
    assert [item.number for item in report.same_training()] == [0, 1]


@pytest.mark.parametrize("name", ["fastets", "99", "-1", ""])
def test_an_unknown_pick(name):
    with pytest.raises(UnknownNameError, match="unknown trial") as caught:
        make_report(mixed_trials()).pick(name)
    assert caught.value.hint == (
        "Give fastest, leanest, balanced, highest-fidelity, or the number of a trial: 0 to 8."
    )


def test_an_unknown_pick_names_the_numbers_there_are():
    trials = [make_trial(number) for number in (0, 1, 2, 5, 7, 8)]
    with pytest.raises(UnknownNameError) as caught:
        make_report(trials).pick(3)
    assert caught.value.hint.endswith("a trial: 0 to 2, 5, 7 to 8.")
    with pytest.raises(UnknownNameError) as caught:
        make_report([]).pick(3)
    assert (
        caught.value.hint
        == "Give fastest, leanest, balanced, highest-fidelity, once a trial has ended."
    )


def test_no_feasible_trial_names_the_closest():
    trials = [
        make_failure(0),
        make_trial(1, peak_gib=18, feasible=False, violations={"memory_budget": 0.125}),
        make_trial(2, peak_gib=17, feasible=False, violations={"memory_budget": 0.0625}),
    ]
    with pytest.raises(NoFeasibleConfigError) as caught:
        make_report(trials).pick("balanced")
    assert "trial 2 came closest with a peak of 17.00 GiB" in caught.value.message
    assert "memory_budget by 6.2%" in caught.value.message
    assert "Raise the memory budget" in caught.value.hint


def test_no_feasible_trial_counts_the_failures():
    with pytest.raises(NoFeasibleConfigError, match=r"none of 2 trials ran .*2 device_oom"):
        make_report([make_failure(0), make_failure(1)]).pick("fastest")
    with pytest.raises(NoFeasibleConfigError, match="no trial has ended"):
        make_report([]).pick("fastest")


def test_gain():
    report = make_report(
        [make_trial(0, 1000, 10), make_trial(1, 1500, 5), make_trial(2, 1002, 10)]
    )
    gain = report.gain(report.trials[1])
    assert gain.rate_ratio == pytest.approx(1.5)
    assert gain.memory_ratio == pytest.approx(0.5)
    assert not gain.rate_is_tied
    assert report.gain(report.trials[2]).rate_is_tied
    assert report.gain(report.baseline).rate_ratio == 1


def test_no_gain_where_the_numbers_cannot_be_compared():
    assert make_report([make_failure(0)]).gain(make_trial(1)) is None
    assert make_report([]).gain(make_trial(1)) is None
    report = make_report([make_trial(0)])
    assert report.gain(make_trial(1, source="predicted")) is None
    elsewhere = make_result(make_measurement(), environment={"device": "Other"})
    assert report.gain(make_trial(1, results=(elsewhere,))) is None


def test_a_picked_trial_exports_with_the_reports_facts(tmp_path):
    path = make_report(mixed_trials()).pick("fastest").export(tmp_path / "sft.yaml")
    text = path.read_text()
    assert yaml.safe_load(text)["max_length"] == 512
    assert "Written by autotune 0.1.0 on 2026-01-02T03:04:05+00:00, trial 3 of 9 (fastest" in text
    assert (
        "15.00 GiB measured, device memory used (reserved and context), reached in the first step"
        in text
    )
    assert "trl sft --config sft.yaml" in text
    assert "Test Card, driver 1.0" in text
    assert "87.65% of the data's tokens" in text
    assert "2.00 x the baseline's" in text
    assert str(tmp_path) not in text


def test_a_trial_exports_without_a_report_and_says_that_it_failed(tmp_path):
    text = make_failure(4).export(tmp_path / "x.yaml").read_text()
    assert "DOES NOT WORK: the outcome was device_oom" in text
    text = make_report([make_failure(4)]).pick(4).export(tmp_path / "y.yaml").read_text()
    assert "DOES NOT WORK: the outcome was device_oom" in text
    assert "run it with" not in text


def test_probe_work_is_loading_and_training():
    assert probe_work_s([make_trial(0, num_probes=2), make_failure(1)]) == 30.0


@pytest.mark.parametrize(
    ("candidate", "needs"),
    [
        ({"attn_implementation": "sdpa", "adaptation": "full"}, []),
        (
            {"attn_implementation": "flash_attention_2"},
            ["the package flash-attn>=2.3.3, for attn_implementation=flash_attention_2"],
        ),
        (
            {"attn_implementation": "flash_attention_3"},
            ["the package flash-attn-3, for attn_implementation=flash_attention_3"],
        ),
        (
            {"attn_implementation": "kernels-community/flash-attn2", "use_kernels": "on"},
            [
                "the package kernels>=0.18.2,<0.19, for"
                " attn_implementation=kernels-community/flash-attn2",
                "the package kernels>=0.18.2,<0.19, for use_kernels=on",
            ],
        ),
        (
            {"adaptation": "lora_4bit", "optim": "paged_adamw_8bit"},
            [
                "the packages peft and bitsandbytes, for adaptation=lora_4bit",
                "the package bitsandbytes, for optim=paged_adamw_8bit",
            ],
        ),
        ({"adaptation": "lora"}, ["the package peft, for adaptation=lora"]),
        ({"a_plug_in_that_is_gone": "x"}, []),
    ],
)
def test_a_header_names_every_package_that_the_configuration_needs(
    candidate: dict[str, str], needs: list[str]
) -> None:
    assert make_trial(0, candidate=candidate).header()["needs"] == needs
