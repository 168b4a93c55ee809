"""The loop of a search that goes on where another ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from loop_kit import ROOMY

from autotune.runfolder import RunFolder
from autotune.testing.fakes import FakeExecutor
from autotune.testing.searches import make_loop
from autotune.tuner import load_trials

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def test_a_resumed_loop_goes_on_numbering_and_repeats_nothing(tmp_path: Path) -> None:
    first = make_loop(tmp_path, FakeExecutor(wall=ROOMY), sampler="random")
    first.run(10, None)
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor, sampler="random", trials=load_trials(RunFolder(tmp_path)))
    loop.run(16, None)
    assert len(executor.submitted) == 6
    numbers = [trial.number for trial in loop.trials]
    assert numbers == list(range(len(numbers)))
    digests = [trial.digest for trial in loop.trials]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_missing_baseline_is_probed_again_first_and_alone(slots: int, tmp_path: Path) -> None:
    make_loop(tmp_path, FakeExecutor(wall=ROOMY), sampler="random").run(6, None)
    left = [trial for trial in load_trials(RunFolder(tmp_path)) if trial.number != 0]
    executor = FakeExecutor(wall=ROOMY, slots=slots)
    loop = make_loop(tmp_path, executor, sampler="random", trials=left)
    loop.run(9, None)
    baselines = [spec for spec in executor.submitted if spec.probe_id.startswith("0000")]
    assert executor.submitted[:1] == baselines
    assert sorted(trial.number for trial in loop.trials) == list(range(len(loop.trials)))
    assert loop.num_probed == 9


def test_a_missing_baseline_is_probed_whatever_was_used_up(tmp_path: Path) -> None:
    make_loop(tmp_path, FakeExecutor(wall=ROOMY), sampler="random").run(6, None)
    left = [trial for trial in load_trials(RunFolder(tmp_path)) if trial.number != 0]
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor, sampler="random", trials=left)
    loop.run(len(left), time.monotonic() - 1.0)
    assert [spec.probe_id.partition(".")[0] for spec in executor.submitted] == ["0000"]


def test_folders_of_a_killed_run_are_kept(tmp_path: Path) -> None:
    left = RunFolder(tmp_path).probe_folder("0000")
    left.mkdir(parents=True)
    (left / "stderr.log").write_text("last words")
    executor = FakeExecutor(wall=ROOMY)
    loop = make_loop(tmp_path, executor)
    loop.run(1, None)
    assert executor.submitted[0].probe_id == "0000.1"
    assert Path(executor.submitted[0].folder).name == "0000.1"
    assert (left / "stderr.log").read_text() == "last words"
