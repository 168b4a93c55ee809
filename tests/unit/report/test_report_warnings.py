from __future__ import annotations

from dataclasses import replace

import pytest
from report_factory import make_failure, make_measurement, make_result, make_trial

from autotune.probe.result import Outcome
from autotune.report.cells import probe_line
from autotune.report.warnings import collect
from autotune.units import GIB

EDGE = {"num_alloc_retries": 3}
OTHERS = {"device_used_by_others_bytes": 2 * GIB}


def test_sound_trials_give_none():
    assert collect([make_trial(0, num_probes=2), make_failure(1)], pareto=[0]) == ()
    assert collect([]) == ()


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        (make_trial(7, spread=0.25), ["trial 7: 25%", "Measure more steps"]),
        (
            make_trial(7, results=(make_result(make_measurement((1000.0,))),)),
            ["Fewer than 3 steps", "trial 7", "as few as 1"],
        ),
        (make_trial(7, measurement_values=EDGE), ["On the edge", "3 times", "trial 7"]),
        (make_trial(7, measurement_values=OTHERS), ["2.00 GiB", "trial 7", "Stop it"]),
    ],
)
def test_each_warning_names_trial_number_and_remedy(trial, words):
    (text,) = collect([trial])
    assert all(word in text for word in words)


def test_differing_environments():
    other = make_result(make_measurement(), environment={"device": "Other", "driver": "1.0"})
    (text,) = collect([make_trial(0), make_trial(3, results=(other,))])
    assert "(device, packages)" in text
    assert "trial 3 differs from that of trial 0" in text


def test_a_recommendation_on_one_probe_is_flagged():
    (text,) = collect([make_trial(0, num_probes=2), make_trial(1)], pareto=[0, 1])
    assert text.startswith("Recommended on a single probe: trial 1.")
    assert text.endswith("confirm with the same command and --resume.")


def test_how_to_confirm_is_a_command():
    command = "autotune search a b --run-dir runs/x --resume"
    (text,) = collect([make_trial(1)], pareto=[1], resume_with=command)
    assert text.endswith(f"confirm with: {command}")


def test_what_is_modelled_is_said():
    def engine(gib: int, *, sleeps: bool) -> dict:
        found = {"requested_bytes": gib * GIB, "weights_bytes": GIB, "kv_cache_bytes": 2 * GIB}
        return {**found, "training_bytes": GIB // 4, "sleeps": sleeps, "vllm": "0.31.0"}

    def trial(number: int, found: dict | None):
        makeup = {"modelled": {"vllm": found}} if found else {}
        return make_trial(
            number, measurement_values={"source": "predicted", "makeup": makeup}, num_probes=1
        )

    asleep = trial(3, engine(24, sleeps=True))
    (text,) = collect([trial(0, None), asleep, trial(4, engine(32, sleeps=True))])
    assert "in trials 3, 4 is modelled, neither measured nor traced" in text
    assert "24.00 GiB to 32.00 GiB of the card" in text
    assert "of which 0.250 GiB stay while it sleeps" in text
    (text,) = collect([trial(5, engine(24, sleeps=False))])
    assert "in trial 5 is modelled" in text
    assert "sleeps" not in text
    assert collect([trial(0, None)]) == ()


def test_repeated_probes_are_warned_of():
    lost = make_result(outcome=Outcome.LOST, probe_id="0003", detail="killed by SIGKILL\nmore")
    trial = make_trial(3, num_probes=2)
    (text,) = collect([replace(trial, results=(lost, *trial.results))])
    for word in ("A probe", "trial 3", "lost: killed by SIGKILL)", "probes/0003/stderr.log"):
        assert word in text
    failed = replace(make_failure(4, Outcome.CRASHED), results=(lost, lost))
    (text,) = collect([failed])
    assert "A probe crashed or vanished" in text


def test_the_spread_is_the_same_figure_in_lines_and_warnings():
    trial = make_trial(7, spread=0.25)
    assert "(IQR 25.0%)" in probe_line(trial)
    (text,) = collect([trial])
    assert "25%" in text


def test_predictions_have_no_spread_to_warn_of():
    single = make_result(make_measurement((1000.0,), source="predicted"))
    assert collect([make_trial(1, source="predicted", results=(single,))], pareto=[1]) == ()


def test_long_lists_are_cut_and_recommended_trials_come_first():
    trials = [make_trial(n, spread=0.3, num_probes=2) for n in range(9)]
    (text,) = collect(trials, pareto=[8])
    assert "trials 0, 1, 2, 3, 8 and 4 more" in text


@pytest.mark.parametrize(("share", "warned"), [(None, False), (0.05, False), (0.4, True)])
def test_a_busy_host_is_named_with_its_share(share, warned):
    trial = make_trial(3, measurement_values={"cpu_taken_by_others_ratio": share})
    found = [text for text in collect([trial]) if "processor time" in text]
    assert bool(found) is warned
    if warned:
        assert "40%" in found[0]
        assert "trial 3" in found[0]
