"""Candidates predicted for a real device before they are probed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from autotune import objectives, screen, standin_probes
from autotune.errors import ExecutorError, JournalError
from autotune.plan import Plan
from autotune.probe import screened
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.screen import Screening, allowance_s
from autotune.search.pool import MOST
from autotune.testing.contexts import make_context, make_gpu
from autotune.testing.fakes import FakeExecutor, MemoryWall
from autotune.testing.searches import make_answers, make_fake_plan, make_loop

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

GIB = 1 << 30
ROOMY = MemoryWall(capacity_bytes=60 * GIB)
OBJECTIVES = (objectives.peak_memory(), objectives.tokens_per_s())


class Stage:
    """A search after its baseline, and what predicts its candidates."""

    def __init__(self, folder: Path, plan: Plan | None = None, **options: Any) -> None:
        self.folder = RunFolder(folder)
        self.plan = plan or make_fake_plan(folder, pins={"batching": "padded"})
        self.real = FakeExecutor(wall=ROOMY, answers=make_answers(self.plan.context))
        self.opened: list[FakeExecutor] = []
        self.heard: list[tuple[int, int]] = []
        self.options = options
        self.screening = self.again()

    def again(self, **earlier: Any) -> Screening:
        self.screening = Screening(
            self.plan,
            self.folder,
            OBJECTIVES,
            earlier=earlier,
            open_executor=self.open,
            on_screen=lambda done, of: self.heard.append((done, of)),
        )
        return self.screening

    def open(self, device: str, plan: Plan, folder: RunFolder) -> FakeExecutor:
        assert device.startswith("virtual:/")
        assert Path(device.removeprefix("virtual:")).exists()
        self.opened.append(FakeExecutor(**{"wall": ROOMY, **self.options}))
        return self.opened[-1]

    def run(self, num_trials: int | None = 30, **limits: Any) -> None:
        self.screening.run(
            self.real, self.trials(), num_trials, limits.pop("wall_time_s", None), **limits
        )

    def trials(self) -> list[Trial]:
        place = self.folder.path / "loop"
        place.mkdir(exist_ok=True)
        loop = make_loop(place, self.real, plan=self.plan, owner=str(len(self.real.submitted)))
        loop.run(1, None)
        return loop.trials

    @property
    def specs(self) -> list[ProbeSpec]:
        return [spec for executor in self.opened for spec in executor.submitted]


def test_the_allowance_is_a_share_of_what_the_probes_take() -> None:
    def share_of(seconds: float) -> object:
        return pytest.approx(screen.SHARE * seconds)

    assert allowance_s(20.0, num_trials=40, wall_time_s=None) == share_of(800.0)
    assert allowance_s(20.0, num_trials=40, wall_time_s=None, slots=4) == share_of(200.0)
    assert allowance_s(20.0, num_trials=None, wall_time_s=600.0) == share_of(600.0)
    assert allowance_s(20.0, num_trials=40, wall_time_s=100.0) == share_of(100.0)
    assert allowance_s(20.0, num_trials=1, wall_time_s=600.0) == share_of(20.0)
    spent = allowance_s(20.0, num_trials=40, wall_time_s=None, spent_s=30.0)
    assert spent == pytest.approx(screen.SHARE * 800.0 - 30.0)
    assert allowance_s(20.0, num_trials=40, wall_time_s=None, spent_s=99.0) == 0.0
    assert allowance_s(20.0, num_trials=None, wall_time_s=None) == 0.0
    assert allowance_s(20.0, num_trials=40, wall_time_s=None, share=0.5) == pytest.approx(400.0)


def test_a_small_space_is_predicted_as_a_whole_baseline_and_leanest_first(run: Path) -> None:
    stage = Stage(run)
    stage.run()
    size = stage.plan.space.size()
    guesses = stage.screening.guesses()
    assert len(guesses) == len(stage.specs) == size
    assert guesses[0].candidate == stage.plan.space.baseline
    assert guesses[1].candidate == stage.plan.space.leanest
    assert stage.heard[0] == (0, size)
    assert stage.heard[-1] == (size, size)
    assert sum(done == of for done, of in stage.heard) == 1
    assert stage.opened[0].is_shut_down
    assert stage.screening.notices == ()
    assert not (stage.folder.work / "screening").exists()
    # Predicted, they are no trials.
    assert {record["kind"] for _, record in stage.folder.records()} <= {"trial"}


def test_the_virtual_probes_are_those_of_the_real_plan_less_its_device(run: Path) -> None:
    stage = Stage(run)
    stage.run()
    for spec in stage.specs:
        assert "use_cpu" not in spec.config
        assert "env" not in spec.config
        assert spec.process_env == {}
        assert spec.beyond_device
        assert spec.representative
        assert spec.memory_budget_bytes is None
        assert spec.device == f"virtual:{stage.folder.work / 'stand-in.toml'}"
    real = stage.plan.config(stage.plan.space.baseline)
    assert real["use_cpu"] is True
    left = {key: value for key, value in real.items() if key not in ("use_cpu", "env")}
    assert stage.specs[0].config == left


def test_a_guess_has_the_studys_objectives_and_the_share_of_the_budget(run: Path) -> None:
    stage = Stage(run)
    stage.run()
    context = stage.screening.summary
    wall = ROOMY
    for guess, spec in zip(stage.screening.guesses(), stage.specs, strict=True):
        peak, rate = guess.values
        assert peak is not None
        assert rate is not None
        assert rate > 0
        held = peak - wall.peak_bytes(spec.config)
        assert 0 < held < GIB  # what the process takes without a model
        assert guess.load == pytest.approx(peak / stage.plan.budget_bytes)
    assert context["num_predicted"] == len(stage.specs)
    over = sum((guess.load or 0.0) > 1 for guess in stage.screening.guesses())
    assert context["num_too_large"] == over


def test_a_gpu_is_predicted_as_the_card_that_it_is(run: Path) -> None:
    device = make_gpu(label="NVIDIA H200", total_bytes=139 * GIB, free_bytes=139 * GIB)
    plan = make_fake_plan(run, context=make_context(device=device))
    stage = Stage(run, plan)
    stage.run()
    assert stage.screening.summary["stand_in"] == "NVIDIA H200"
    assert stage.screening.guesses()[0].values[0] == ROOMY.peak_bytes(stage.specs[0].config)
    assert [name for name, _ in stage.real.tasks] == []


def test_nothing_is_predicted_twice(run: Path) -> None:
    stage = Stage(run, fault=lambda spec: None)
    stage.run()
    once = stage.screening.guesses()
    stage.again(time_s=3.0)
    stage.run()
    assert len(stage.opened) == 1
    assert stage.screening.guesses() == once
    assert stage.screening.summary["num_predicted"] == len(once)
    assert stage.screening.spent_s >= 3.0


def test_an_interrupted_screening_goes_on_where_it_was(run: Path) -> None:
    def interrupted(spec: ProbeSpec) -> None:
        if spec.probe_id == "0005":
            raise KeyboardInterrupt

    stage = Stage(run, fault=interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage.run()
    assert stage.opened[0].is_shut_down
    assert 0 < stage.screening.summary["num_predicted"] < stage.plan.space.size()
    card = screened.read(run / screened.FILE_NAME).stand_in
    stage.options = {}
    stage.again()
    stage.real = FakeExecutor(wall=ROOMY, answers={})  # the processor is not measured again
    stage.run()
    assert len(stage.screening.guesses()) == stage.plan.space.size()
    digests = [stage.plan.space.digest(item.candidate) for item in stage.screening.guesses()]
    assert len(set(digests)) == len(digests)
    assert screened.read(run / screened.FILE_NAME).stand_in == card


def test_a_damaged_record_is_an_error_that_names_the_line(run: Path) -> None:
    stage = Stage(run)
    stage.run()
    path = run / screened.FILE_NAME
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:20]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(JournalError, match="line 3 is damaged"):
        stage.again()


def test_a_card_that_cannot_be_understood_is_an_error(run: Path) -> None:
    plan = make_fake_plan(run)
    screened.append_stand_in(run / screened.FILE_NAME, {"name": "a card"})
    stage = Stage(run, plan)
    with pytest.raises(JournalError, match="for which card"):
        stage.run()


@pytest.mark.parametrize("limits", [{"num_trials": 3}, {"num_trials": 99, "wall_time_s": 30.0}])
def test_too_short_a_search_predicts_nothing_and_says_so(
    run: Path, limits: dict[str, Any]
) -> None:
    stage = Stage(run)
    stage.run(**limits)
    assert stage.opened == []
    assert stage.screening.guesses() == []
    assert stage.screening.summary == {}
    (notice,) = stage.screening.notices
    assert f"{screen.SHARE:.0%} of the time that the probes should take" in notice


def test_a_search_that_is_over_or_nearly_so_predicts_nothing(run: Path) -> None:
    stage = Stage(run)
    stage.run(num_trials=1, wall_time_s=9999.0)
    assert stage.screening.notices == ()
    stage.run(num_trials=99, wall_time_s=9999.0, deadline_s=time.monotonic() + 1.0)
    assert "nearly used up" in stage.screening.notices[0]
    assert stage.opened == []


def test_time_that_is_used_up_ends_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])

    def slow(spec: ProbeSpec) -> None:
        now[0] += 2.0

    stage = Stage(run, fault=slow)
    trials = stage.trials()
    total_s = trials[0].results[-1].timeline.total_s
    assert total_s is not None
    stage.screening.run(stage.real, trials, 16, None)
    allowed = screen.SHARE * 16 * total_s
    assert 0 < len(stage.specs) < stage.plan.space.size()
    assert stage.screening.spent_s <= allowed
    assert stage.heard[-1] == (len(stage.specs), len(stage.specs))
    assert sum(done == of for done, of in stage.heard) == 1
    assert stage.opened[0].is_shut_down


def test_a_prediction_that_fails_is_recorded_and_says_nothing(run: Path) -> None:
    def refused(spec: ProbeSpec) -> Outcome | None:
        return Outcome.UNSUPPORTED if spec.config.get("use_peft") else None

    stage = Stage(run, fault=refused)
    stage.run()
    guesses = stage.screening.guesses()
    without = [guess for guess in guesses if guess.values == (None, None)]
    assert without
    assert all(guess.load is None for guess in without)
    assert all(guess.candidate["adaptation"] != "full" for guess in without)
    assert stage.screening.summary["num_failed"] == len(without)
    assert stage.screening.notices == ()


def test_where_every_prediction_fails_it_stops_soon(run: Path) -> None:
    stage = Stage(run, fault=lambda spec: Outcome.CRASHED)
    stage.run()
    assert len(stage.specs) == screen.MAX_FRUITLESS
    (notice,) = stage.screening.notices
    assert "the first 4 predictions failed" in notice
    assert "as the fake was told" in notice


def test_a_worker_that_cannot_be_started_does_not_end_the_search(run: Path) -> None:
    broken = ExecutorError("no worker.", hint="Look at its log.")
    stage = Stage(run, fault=lambda spec: broken)
    stage.run()
    (notice,) = stage.screening.notices
    assert notice.endswith("before they were probed: no worker. Look at its log.")
    assert stage.opened[0].is_shut_down


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_devices_that_no_card_stands_for_are_not_predicted(run: Path, kind: str) -> None:
    device = make_gpu(name=kind, kind=kind, label="A GPU", capability=None)
    stage = Stage(run, make_fake_plan(run, context=make_context(device=device)))
    stage.run()
    assert stage.opened == []
    assert kind in stage.screening.notices[0]


def test_a_search_in_several_processes_is_not_predicted(run: Path) -> None:
    device = make_gpu(num_devices=2)
    plan = make_fake_plan(run, context=make_context(device=device), processes=2)
    assert standin_probes.not_screened(plan) == "predictions are of one process"


def test_a_huge_space_is_sampled(run: Path) -> None:
    stage = Stage(run, make_fake_plan(run, space="sft"))
    assert stage.plan.space.size(MOST + 1) > MOST
    stage.run()
    assert 100 < len(stage.specs) <= MOST
    assert stage.specs[0].config["per_device_train_batch_size"] == 8


def test_what_a_killed_run_left_is_no_obstacle(run: Path) -> None:
    stage = Stage(run)
    for number in range(12):
        (run / "work" / "screening" / f"{number:04d}").mkdir(parents=True)
    stage.run()
    assert stage.screening.notices == ()
    assert stage.screening.guesses()
