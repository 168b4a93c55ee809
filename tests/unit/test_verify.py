"""Running files and comparing figures, with a stand-in for ``trl``."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

sys.path.insert(0, str(Path(__file__).parent / "report"))
from report_factory import make_measurement, make_result, make_trial

from autotune import verify
from autotune.errors import PrerequisiteError
from autotune.probe.result import Interval, MemoryPeak
from autotune.report.comparison import compare
from autotune.report.trial import Trial
from autotune.testing.contexts import make_cpu, make_gpu
from autotune.units import GIB
from autotune.verify import Comparison, verify_files

LOG = "{{'loss': '8.4', 'num_tokens': '{}', 'epoch': '0.1'}}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trial-0001.yaml"
    path.write_text("max_length: 8\n")
    return path


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(verify, "_RUN_TRL", script)


def test_the_rate_is_read_from_the_log() -> None:
    lines = [(0.0, "Loading"), (10.0, LOG.format(1000)), (11.0, LOG.format("3000"))]
    lines += [(12.5, "\r 50%|     | " + LOG.format("6e+03")), (99.0, "{'train_runtime': '9'}")]
    assert verify._rate(lines) == pytest.approx(5000 / 2.5)
    assert verify._rate(lines[:2]) is None
    assert verify._rate([]) is None


@pytest.mark.parametrize(
    ("found", "difference", "is_outside"),
    [(100.0, 0.0, False), (104.0, 0.04, False), (110.0, 0.1, True), (90.0, -0.1, True)],
)
def test_a_figure_is_set_against_the_reports(
    found: float, difference: float, is_outside: bool
) -> None:
    comparison = Comparison.of("rate", found, Interval(median=100.0, low=95.0, high=104.0))
    assert comparison.difference_ratio == pytest.approx(difference)
    assert comparison.is_outside is is_outside
    assert ("outside" if is_outside else "within") + " its spread (95 to 104)" in comparison.text()
    assert f"{difference:+.1%} against the report's 100" in comparison.text()


def test_what_cannot_be_told_apart_is_within() -> None:
    flat = Interval(median=2.0 * GIB, low=2.0 * GIB, high=2.0 * GIB)
    assert not Comparison.of("resident peak", 2.01 * GIB, flat).is_outside
    assert "2.01 GiB, +0.5% against the report's 2.00 GiB, within its spread (2.00 GiB)" in (
        Comparison.of("resident peak", 2.01 * GIB, flat).text()
    )


def test_a_single_probe_has_no_spread_to_be_outside_of() -> None:
    phases = {"load": MemoryPeak(used_bytes=9 * GIB, resident_bytes=1 * GIB)}
    trial = make_trial(1, results=(make_result(make_measurement(phases=phases)),))
    (peak,) = compare(trial, resident=round(1.013 * GIB))
    assert not peak.has_spread
    assert not peak.is_outside
    assert peak.text() == (
        "resident peak 1.01 GiB, +1.3% against the report's 1.00 GiB, of a single probe: there is"
        " no spread to be within"
    )
    # The rate's is over the steps, of which one probe has several.
    assert trial.tokens_per_s is not None
    (rate,) = compare(trial, rate=2 * trial.tokens_per_s.median)
    assert rate.is_outside


def test_a_run_is_compared_with_its_trial(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import time\nfor n in (10, 20, 30):\n print(" + repr(LOG) + ".format(n))\n"
    stand_in(monkeypatch, script + " time.sleep(0.05)\n")
    # This test's own process may be larger than the stand-in.
    monkeypatch.setattr(verify.resource, "getrusage", lambda who: Mock(ru_maxrss=0))
    phases = {"load": MemoryPeak(used_bytes=9 * GIB, resident_bytes=3 * GIB)}
    results = tuple(make_result(make_measurement(phases=phases)) for _ in range(2))
    trial = make_trial(1, results=results)
    (check,) = verify_files([file], trials={file: trial}, timeout_s=30)
    assert check.passed
    peak, rate = check.comparisons
    # Like is compared with like: the host's memory, on whatever device it was measured.
    assert (peak.name, peak.reported.median) == ("resident peak", 3 * GIB)
    assert peak.found == check.peak_resident_bytes
    assert peak.is_outside
    assert (rate.name, rate.found) == ("rate", check.tokens_per_s)
    assert 20 < rate.found < 400
    assert len(check.line().splitlines()) == 3
    (check,) = verify_files([file], timeout_s=30)
    assert check.comparisons == ()
    assert "resident peak" in check.line()


def test_the_peak_is_that_of_each_run_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = []
    for size in (own + (200 << 20), own + (100 << 20), 1):
        stand_in(monkeypatch, f"x = b'x' * {size}")
        (check,) = verify_files([file], timeout_s=60)
        peaks.append(check.peak_resident_bytes)
    large, middle, small = peaks
    assert large > own + (200 << 20)
    assert own + (100 << 20) < middle < large
    # What is smaller than we are cannot be told from us.
    assert small is None


def test_a_run_that_fails_is_not_compared(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "raise ValueError('no such thing')")
    (check,) = verify_files([file], trials={file: make_trial(1)}, timeout_s=30)
    assert not check.passed
    assert check.comparisons == ()
    assert check.detail == "exit code 1: ValueError: no such thing"


def test_a_run_that_hangs_is_ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "import time; time.sleep(60)")
    (check,) = verify_files([file], timeout_s=0.5)
    assert not check.passed
    assert "did not end within" in check.detail


def test_a_helper_that_stays_behind_holds_nobody_up(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
    stand_in(monkeypatch, script + "time.sleep(60)'])")
    (check,) = verify_files([file], timeout_s=30)
    assert check.passed
    assert check.wall_time_s < 20


def predicted_trial() -> Trial:
    phases = {
        "load": MemoryPeak(allocated_bytes=1 * GIB, reserved_bytes=1 * GIB, resident_bytes=0),
        "first_step": MemoryPeak(
            allocated_bytes=4 * GIB, reserved_bytes=5 * GIB, resident_bytes=0
        ),
    }
    measurement = make_measurement(phases=phases, source="predicted")
    return make_trial(1, results=(make_result(measurement),), source="predicted")


def test_a_prediction_is_compared_with_the_devices_own_peaks() -> None:
    trial = predicted_trial()
    rate = trial.tokens_per_s.median
    found = compare(trial, resident=9 * GIB, allocated=4 * GIB, reserved=6 * GIB, rate=0.8 * rate)
    # The host's memory was not predicted, so that it is not compared.
    assert [item.name for item in found] == ["allocated peak", "reserved peak", "rate"]
    assert [item.is_outside for item in found] == [False, True, False]
    assert "4.00 GiB measured, +0.0% against the predicted 4.00 GiB, within" in found[0].text()
    assert "outside what that may be off by (4.75 GiB to 5.25 GiB)" in found[1].text()
    # A few steps need not meet the worst batch.
    (low,) = compare(trial, allocated=3 * GIB)
    assert not low.is_outside
    assert "below what that may be off by" in low.text()
    assert compare(trial, rate=0.7 * rate)[0].is_outside
    assert compare(trial) == ()


def test_a_predicted_run_tells_its_peaks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The training process is one that trl starts: it finds the hook by itself.
    torch = "import sys, types; cuda = types.SimpleNamespace(is_initialized=lambda: True,"
    torch += " max_memory_allocated=lambda: 123, max_memory_reserved=lambda: 456);"
    torch += " sys.modules['torch'] = types.SimpleNamespace(cuda=cuda); print('trained')"
    stand_in(
        monkeypatch, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {torch!r}])"
    )
    (check,) = verify_files([file], trials={file: predicted_trial()}, timeout_s=30)
    assert check.passed
    assert (check.peak_allocated_bytes, check.peak_reserved_bytes) == (123, 456)
    assert [item.name for item in check.comparisons] == ["allocated peak", "reserved peak"]
    (check,) = verify_files([file], trials={file: make_trial(1)}, timeout_s=30)
    assert check.peak_allocated_bytes is None


def test_model_and_data_may_lie_elsewhere(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stand-in fails with what its file holds, which becomes the detail.
    script = "import sys; raise ValueError(' '.join(open(sys.argv[3]).read().split()))"
    stand_in(monkeypatch, script)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}")
    old = "datasets: [{data_files: /old/rows.jsonl, path: json, split: part}]\n"
    file.write_text(f"model_name_or_path: /old/model\n{old}max_length: 8\n")
    places = {"model": str(tmp_path / "model"), "dataset": str(tmp_path / "rows.jsonl")}
    (check,) = verify_files([file], timeout_s=30, **places)
    assert f"model_name_or_path: {tmp_path / 'model'}" in check.detail
    assert "split: part" in check.detail
    assert "/old/" not in check.detail
    assert "max_length: 8" in check.detail
    assert check.file == str(file)
    assert "/old/model" in file.read_text()


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("model_name_or_path: /from/there/model\n", "--model"),
        ("dataset_name: /from/there/rows\n", "--dataset"),
        ("datasets: [{path: json, data_files: /from/there/rows.jsonl}]\n", "--dataset"),
        ("datasets: [{path: json, data_files: [/from/there/*.jsonl]}]\n", "--dataset"),
    ],
)
def test_what_is_not_on_this_machine_is_named_before_a_run(
    text: str, option: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "")
    file.write_text(text)
    with pytest.raises(PrerequisiteError, match="/from/there/") as caught:
        list(verify_files([file], timeout_s=30))
    assert option in caught.value.hint


def test_names_of_the_hub_and_patterns_are_left_to_trl(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "")
    (tmp_path / "a.jsonl").touch()
    file.write_text(
        "model_name_or_path: some/model\n"
        f"datasets: [{{path: json, data_files: '{tmp_path}/*.jsonl'}}]\n"
    )
    (check,) = verify_files([file], timeout_s=30)
    assert check.passed


@pytest.mark.parametrize(("kind", "is_said"), [("cpu", True), ("cuda", False)])
def test_want_of_a_gpu_is_explained(
    kind: str, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = make_cpu() if kind == "cpu" else make_gpu()
    monkeypatch.setattr(verify, "_device_here", lambda: here)
    reason = "exit code 1: ValueError: Your setup doesn't support bf16/gpu."
    assert ("PyTorch sees no GPU here" in verify._explained(reason)) is is_said
    # Nobody asks for the device where it is about something else.
    monkeypatch.delattr(verify, "_device_here")
    assert verify._explained("exit code 1: KeyError: 'x'") == "exit code 1: KeyError: 'x'"
