"""Every trainer from the search to what it exports, under TRL's own command or as a script."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trl_kit import CARD

from autotune.estimate import Estimator
from autotune.executors.subprocess import SubprocessExecutor
from autotune.listener import Budget
from autotune.probe import trl_file
from autotune.probe.result import Outcome
from autotune.space.space import SearchSpace
from autotune.tuner import Tuner
from autotune.verify import verify_files
from autotune.worker import demo

pytestmark = pytest.mark.trl

TRAINERS = {
    "dpo": "preference",
    "kto": "unpaired",
    "reward": "preference",
    "grpo": "prompts",
    "rloo": "prompts",
    "online_dpo": "prompts",
    "distillation": "prompts",
}
SHORT = {
    "grpo": {"max_completion_length": "8", "num_generations": "2"},
    "rloo": {"max_completion_length": "8", "num_generations": "2"},
    "online_dpo": {"max_new_tokens": "8"},
    "distillation": {"max_completion_length": "8"},
}
"""Pins of the trainers that generate."""
NUM_ROWS = 40
every_trainer = pytest.mark.parametrize("trainer", TRAINERS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a small file for each trainer: short rows, so that a step takes little time."""
    folder = tmp_path_factory.mktemp("rows")
    found = {}
    for trainer, kind in TRAINERS.items():
        rows = sorted(demo.DATA[kind](), key=lambda row: len(json.dumps(row)))[:NUM_ROWS]
        path = folder / f"{trainer}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[trainer] = str(path)
    return found


def space_of(trainer: str, model: str) -> SearchSpace:
    """Return the trainer's space, with the model as its own teacher where it takes one."""
    space = SearchSpace.load(trainer)
    taught = {"teacher_model_name_or_path": model} if trainer == "distillation" else {}
    return replace(space, fixed={**space.fixed, **taught})


def tuner_for(trainer: str, model: str, dataset: str, folder: Path, **settings: Any) -> Tuner:
    return Tuner(
        model,
        dataset,
        trainer=trainer,
        space=space_of(trainer, model),
        global_batch=4,
        measured_steps=2,
        pins=SHORT.get(trainer, {}),
        run_dir=folder / "run",
        **settings,
    )


@every_trainer
def test_every_member_of_the_pareto_set_trains_under_trl(
    trainer: str,
    executor: SubprocessExecutor,
    made: dict[str, str],
    data: dict[str, str],
    tmp_path: Path,
) -> None:
    tuner = tuner_for(
        trainer, made["model"], data[trainer], tmp_path, device="cpu", executor=executor
    )
    report = tuner.search(Budget(trials=4))
    assert report.trials[0].outcome is Outcome.OK
    assert all(trial.outcome in (Outcome.OK, Outcome.UNSUPPORTED) for trial in report.trials)
    files = [trial.export(tmp_path / f"{trial.number}{trial.suffix}") for trial in report.pareto]
    checks = list(verify_files(files, num_steps=3, timeout_s=300))
    assert checks
    assert [check.detail for check in checks if not check.passed] == []


@every_trainer
def test_a_prediction_of_the_exported_file_is_the_searchs(
    trainer: str,
    virtual: SubprocessExecutor,
    made: dict[str, str],
    data: dict[str, str],
    tmp_path: Path,
) -> None:
    tuner = tuner_for(
        trainer, made["model"], data[trainer], tmp_path, device=CARD, executor=virtual
    )
    trial = tuner.search(Budget(trials=2)).pick(0)
    path = trial.export(tmp_path / f"baseline{trial.suffix}")
    command = "python baseline.py" if trial.suffix == ".py" else f"trl {trainer} --config"
    assert command in path.read_text()
    assert trl_file.read(path).trainer == trainer
    (card,) = Estimator(trl_file.read(path), (CARD,), executor=virtual).run().cards
    assert card.used_bytes == trial.peak_bytes
