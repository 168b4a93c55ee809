from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from autotune.devices.base import Measured
from autotune.probe.result import MemoryPeak
from autotune.trainers.base import DivergedError
from autotune.worker.meters import PHASES_FILE, StepRecorder, merge_peaks


class FakeDevice(Measured):
    """A device whose memory is what a test says, and which notes when it is waited for."""

    kind = "fake"

    def __init__(self) -> None:
        self.used = 100
        self.peak = 100
        self.num_waits = 0

    def use(self, num_bytes: int) -> None:
        self.used = num_bytes
        self.peak = max(self.peak, num_bytes)

    def synchronize(self) -> None:
        self.num_waits += 1

    def reset_peaks(self, phase: str = "") -> None:
        self.peak = self.used

    def read_peaks(self) -> MemoryPeak:
        return MemoryPeak(used_bytes=self.peak)

    def num_alloc_retries(self) -> int:
        return 3

    def used_by_others_bytes(self) -> int | None:
        return 7


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that a test moves."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1000.0 + now[0])
    return now


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def recorder(device: FakeDevice, tmp_path: Path, clock: list[float]) -> StepRecorder:
    return StepRecorder(device, tmp_path, num_before=1, accumulation_steps=4)


def count(recorder: StepRecorder, tokens: int) -> None:
    recorder.count(
        num_tokens=tokens, num_positions=2 * tokens, num_loss_tokens=tokens // 2, num_rows=3
    )


def step(recorder: StepRecorder, clock: list[float], micros: list[float], rest: float) -> None:
    recorder.begin_step()
    for seconds in micros:
        clock[0] += seconds
        recorder.end_micro_batch()
    clock[0] += rest
    recorder.end_step()


def test_a_step_is_split_into_micro_batches_and_the_rest(
    recorder: StepRecorder, clock: list[float]
) -> None:
    for tokens in (10, 20, 30, 40):
        count(recorder, tokens)
    step(recorder, clock, [1.0, 2.0], 0.5)
    clock[0] += 100.0  # logging between steps is not timed
    step(recorder, clock, [4.0, 8.0], 0.25)
    measured = recorder.measurement()
    (unmeasured,), (only,) = measured.warmup_steps, measured.steps
    assert unmeasured.micro_times_s == (1.0, 2.0)
    assert unmeasured.optimizer_time_s == 0.5
    assert (unmeasured.num_tokens, unmeasured.num_positions) == (30, 60)
    assert only.micro_times_s == (4.0, 8.0)
    assert only.optimizer_time_s == 0.25
    assert (only.num_tokens, only.num_positions) == (70, 140)
    assert (only.num_loss_tokens, only.num_rows) == (35, 6)
    assert measured.accumulation_steps == 4
    # Two micro-batches stand for four.
    assert only.time_s(4) == pytest.approx(24.25)
    assert only.tokens_per_s(4) == pytest.approx(140 / 24.25)


def test_a_prediction_takes_its_rate_from_beside_the_largest_micro_batches(
    device: FakeDevice, tmp_path: Path, clock: list[float]
) -> None:
    def recorded() -> StepRecorder:
        recorder = StepRecorder(device, tmp_path, num_before=1, num_after=1, accumulation_steps=8)
        for tokens in (1000, 10, 20, 1000):
            count(recorder, tokens)
        step(recorder, clock, [90.0, 1.0], 0.5)
        step(recorder, clock, [2.0, 90.0], 0.25)
        return recorder

    with pytest.raises(ValueError, match="before a measured one"):
        recorded().measurement()
    device.source = "predicted"
    (only,) = recorded().measurement().steps
    assert only.micro_times_s == (1.0, 2.0)
    assert only.optimizer_time_s == 0.25
    assert only.num_tokens == 30
    assert only.time_s(8) == pytest.approx(12.25)


def test_counts_that_arrive_ahead_belong_to_their_own_step(
    recorder: StepRecorder, clock: list[float]
) -> None:
    # A data loader collates the next batch before the step that uses it begins.
    count(recorder, 10)
    count(recorder, 20)
    step(recorder, clock, [1.0], 0.0)
    count(recorder, 40)
    count(recorder, 80)
    step(recorder, clock, [1.0], 0.0)
    step(recorder, clock, [1.0], 0.0)
    measured = recorder.measurement()
    tokens = [item.num_tokens for item in (*measured.warmup_steps, *measured.steps)]
    assert tokens == [10, 20, 40]


def test_steps_before_and_after_the_measured_ones_are_kept_apart(
    device: FakeDevice, tmp_path: Path, clock: list[float]
) -> None:
    recorder = StepRecorder(device, tmp_path, num_before=2, num_after=1, accumulation_steps=1)
    for tokens in (1, 2, 3, 4, 5):
        count(recorder, tokens)
        step(recorder, clock, [1.0], 0.0)
    measured = recorder.measurement()
    assert [item.num_tokens for item in measured.warmup_steps] == [1, 2]
    assert [item.num_tokens for item in measured.steps] == [3, 4]


def test_a_worst_batch_after_the_measured_steps_is_no_measured_step(
    device: FakeDevice, tmp_path: Path, clock: list[float]
) -> None:
    recorder = StepRecorder(device, tmp_path, num_before=1, num_after=1, accumulation_steps=1)
    for tokens in (1, 2):
        count(recorder, tokens)
        step(recorder, clock, [1.0], 0.0)
    with pytest.raises(ValueError, match="after 2 steps"):
        recorder.measurement()


def test_each_phase_has_its_own_peak(
    recorder: StepRecorder, device: FakeDevice, clock: list[float]
) -> None:
    recorder.enter_phase("load")
    device.use(500)
    device.use(200)
    recorder.enter_phase("first_step")
    device.use(900)
    device.use(300)
    count(recorder, 1)
    step(recorder, clock, [1.0], 0.0)
    recorder.enter_phase("later_steps")
    device.use(800)
    count(recorder, 1)
    step(recorder, clock, [1.0], 0.0)
    phases = recorder.measurement().phases
    assert {name: peak.used_bytes for name, peak in phases.items()} == {
        "load": 500,
        "first_step": 900,
        "later_steps": 800,
    }
    assert list(phases) == ["load", "first_step", "later_steps"]


def test_a_phase_that_is_entered_again_keeps_its_larger_peak(
    recorder: StepRecorder, device: FakeDevice, clock: list[float]
) -> None:
    recorder.enter_phase("steps")
    device.use(900)
    device.use(100)
    recorder.enter_phase("eval")
    device.use(400)
    device.use(100)
    clock[0] += 5.0
    recorder.enter_phase("steps")
    device.use(300)
    for _ in range(2):
        count(recorder, 1)
        step(recorder, clock, [1.0], 0.0)
    phases = recorder.measurement().phases
    assert phases["steps"].used_bytes == 900
    assert phases["eval"].used_bytes == 400
    assert recorder.phase_entered_s == {"steps": 1000.0, "eval": 1000.0}


def test_phases_are_on_the_disk_at_once(recorder: StepRecorder, tmp_path: Path) -> None:
    recorder.enter_phase("load")
    recorder.enter_phase("first_step")
    lines = (tmp_path / PHASES_FILE).read_text().splitlines()
    assert [json.loads(line)["phase"] for line in lines] == ["load", "first_step"]
    assert recorder.phase == "first_step"


def test_the_device_is_waited_for_at_every_edge(
    recorder: StepRecorder, device: FakeDevice, clock: list[float]
) -> None:
    count(recorder, 1)
    count(recorder, 1)
    step(recorder, clock, [1.0, 1.0], 0.0)
    assert device.num_waits == 4


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_ends_the_run(recorder: StepRecorder, loss: float) -> None:
    recorder.report_loss(3.5)
    with pytest.raises(DivergedError, match="step 0"):
        recorder.report_loss(loss)


def test_facts_and_the_device_reach_the_measurement(
    recorder: StepRecorder, clock: list[float]
) -> None:
    recorder.describe_run(worst_batch=(4, 64), rows_per_epoch=10.0)
    recorder.describe_run(rows_per_sample=0.5)
    for _ in range(2):
        count(recorder, 1)
        step(recorder, clock, [1.0], 0.0)
    measured = recorder.measurement()
    assert measured.worst_batch == (4, 64)
    assert (measured.rows_per_epoch, measured.rows_per_sample) == (10.0, 0.5)
    assert measured.device_kind == "fake"
    assert measured.num_alloc_retries == 3
    assert measured.device_used_by_others_bytes == 7
    assert measured.source == "measured"


def test_without_a_measured_step_there_is_no_measurement(
    recorder: StepRecorder, clock: list[float]
) -> None:
    count(recorder, 1)
    step(recorder, clock, [1.0], 0.0)
    with pytest.raises(ValueError, match="after 1 step,"):
        recorder.measurement()


def test_peaks_are_merged_field_by_field() -> None:
    a = MemoryPeak(allocated_bytes=1, reserved_bytes=9, used_bytes=None)
    b = MemoryPeak(allocated_bytes=5, reserved_bytes=None, used_bytes=None)
    assert merge_peaks(a, b) == MemoryPeak(allocated_bytes=5, reserved_bytes=9)
    assert merge_peaks(a, b) == merge_peaks(b, a)


def test_other_processes_share_of_the_processor_is_taken_over_the_measured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # (others' seconds, seconds passed on all cores) at the end of each step.
    uses = iter([(0.0, 0.0), (1.0, 10.0), (4.0, 20.0), (90.0, 30.0)])
    monkeypatch.setattr("autotune.worker.meters.host.cpu_use", lambda: next(uses))
    recorder = StepRecorder(
        FakeDevice(), tmp_path, num_before=1, num_after=1, accumulation_steps=1
    )
    recorder.enter_phase("first_step")
    for _ in range(4):
        recorder.count(num_tokens=1, num_positions=1, num_loss_tokens=1, num_rows=1)
        recorder.begin_step()
        recorder.end_micro_batch()
        recorder.end_step()
    assert recorder.measurement().cpu_taken_by_others_ratio == pytest.approx(4.0 / 20.0)


@pytest.mark.parametrize("by_micro_batch", [True, False])
def test_generations_count_once_per_step_or_per_micro_batch(
    by_micro_batch: bool, recorder: StepRecorder, clock: list[float]
) -> None:
    recorder.enter_phase("first_step")
    for generation_s in (9.0, 3.0):
        recorder.begin_step()
        for micro_batch in range(2):
            if by_micro_batch or micro_batch == 0:
                clock[0] += generation_s
                recorder.end_generation()
            clock[0] += 1.0
            count(recorder, 10)
            recorder.end_micro_batch()
        clock[0] += 0.5
        recorder.end_step()
    (step,) = recorder.measurement().steps
    # Of four micro-batches, as asked for.
    expected = 3.0 * 4 if by_micro_batch else 3.0
    assert step.generation_s(4) == expected
    assert step.time_s(4) == expected + 4 * 1.0 + 0.5
