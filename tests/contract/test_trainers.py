"""What must hold for every trainer; one more is a class of its own and touches nothing."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autotune.executors.inprocess import InProcessExecutor
from autotune.listener import Budget
from autotune.probe import trl_file
from autotune.probe.result import Outcome
from autotune.report.model import Report
from autotune.space.knob import registry
from autotune.space.space import SearchSpace
from autotune.space.trainers import BUILTIN, has_keys
from autotune.space.trl_keys import known_keys
from autotune.tuner import Tuner
from autotune.verify import verify_files

pytest.importorskip("trl")

from datasets import Dataset
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from autotune.trainers import columns, preparing, raw
from autotune.trainers.base import load

pytestmark = pytest.mark.trl
every_trainer = pytest.mark.parametrize("name", BUILTIN)


@every_trainer
def test_it_has_a_space_of_its_own(name: str) -> None:
    space = SearchSpace.load(name)
    assert space.trainer == name
    assert space.description
    assert all(knob.is_for(name) for knob in space.knobs)
    # What its configuration has, its space varies or says why not.
    offered = {knob for knob, item in registry if item.is_for(name) and item.always}
    assert offered <= {knob.name for knob in space.knobs}


@every_trainer
def test_trl_knows_what_its_space_fixes(name: str) -> None:
    assert set(SearchSpace.load(name).fixed) <= known_keys(name)


@every_trainer
def test_its_keys_are_read_from_trl_as_trl_has_them(name: str) -> None:
    keys = {field.name for field in fields(load(name).config_class())}
    assert keys <= known_keys(name)
    assert has_keys(name, ("learning_rate",))
    assert not has_keys(name, ("no_such_key",))


@every_trainer
def test_it_says_which_columns_it_takes(name: str) -> None:
    assert columns.TAKES[name]
    for needed in columns.TAKES[name]:
        columns.require(name, [*needed, "other"])


# -- one more ------------------------------------------------------------------------------------


class OrpoAdapter(raw.RawRowsAdapter):
    """ORPO, which compares pairs without a reference model."""

    name: ClassVar[str] = "orpo"

    def config_class(self) -> type:
        return ORPOConfig

    def make_trainer(self, **kwargs: Any) -> Any:
        kwargs.pop("quantization_config")
        return ORPOTrainer(**kwargs)

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        opened = preparing.open_request(ORPOConfig, request)
        rows = preparing.open_rows(opened, request)
        columns.require(self.name, rows.column_names, [("prompt", "chosen", "rejected")])
        args = ORPOConfig(output_dir=request["folder"], **preparing.ON_HOST)
        tokens = ORPOTrainer(
            model=preparing.smallest_model(len(opened.tokenizer)),
            args=args,
            train_dataset=rows,
            processing_class=opened.tokenizer,
        ).train_dataset
        sequences = _sequences(tokens)
        profile = preparing.profile_of(
            (
                preparing.Row(sum(pair), lambda limit, p=pair: min(limit, sum(p)), pair)
                for pair in sequences
            ),
            [max(pair) for pair in sequences],
            extra_lengths=request.get("max_lengths", ()),
            kind="preference",
            sequences_per_row=2,
        )
        kept = raw.measured(rows, sequences, [0] * len(rows))
        return preparing.answer(opened, kept, profile, Path(request["folder"]))

    def is_kept(self, num_tokens: int, num_prompt: int, training_args: Any) -> bool:
        return True

    def row_lengths(self, dataset: Dataset, training_args: Any) -> list[int]:
        return [max(pair) for pair in _sequences(dataset)]

    def row_tokens(self, dataset: Dataset, training_args: Any) -> list[int]:
        return [sum(pair) for pair in _sequences(dataset)]

    def count(self, rows: Sequence[Any], batch: Any) -> Mapping[str, int]:
        ids = [batch[f"{part}_input_ids"] for part in ("chosen", "rejected")]
        masks = [batch[f"{part}_attention_mask"] for part in ("chosen", "rejected")]
        tokens = sum(int(mask.sum()) for mask in masks)
        positions = sum(item.numel() for item in ids)
        return {"num_tokens": tokens, "num_positions": positions, "num_loss_tokens": tokens}


def _sequences(tokens: Dataset) -> list[tuple[int, int]]:
    pairs = zip(tokens["chosen_input_ids"], tokens["rejected_input_ids"], strict=True)
    return [(len(chosen), len(rejected)) for chosen, rejected in pairs]


SPACE = f"""
schema: 1
trainer: {__name__}:OrpoAdapter
description: ORPO
knobs:
  checkpointing: [none, full]
  per_device_train_batch_size: [1, 2]
fixed:
  remove_unused_columns: false
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from autotune.worker import demo

    folder = tmp_path_factory.mktemp("demo")
    made = demo.make({"folder": str(folder), "data": "preference"})
    rows = [
        {name: row[name][0]["content"] for name in ("prompt", "chosen", "rejected")}
        for row in demo.preferences(24)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": made["model"], "dataset": str(path), "folder": str(folder)}


@pytest.mark.parametrize("device", ["cpu", "virtual:rtx-4090"])
def test_a_trainer_of_ones_own_is_searched(
    device: str, made: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "orpo.yaml"
    path.write_text(SPACE)
    space = SearchSpace.load(path)
    tuner = Tuner(
        made["model"],
        made["dataset"],
        trainer=space.trainer,
        space=space,
        device=device,
        executor=InProcessExecutor(device),
        global_batch=2,
        measured_steps=1,
        run_dir=tmp_path / "run",
    )
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    report = tuner.search(Budget(trials=2))
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits
    assert [trial.outcome for trial in report.trials] == [Outcome.OK] * 2
    assert all(trial.tokens_per_s.median > 0 for trial in report.trials)
    best = report.pick("balanced")
    assert "per_device_train_batch_size" in best.export(tmp_path / "best.yaml").read_text()
    assert Report.load(tmp_path / "run" / "report.json").pick("balanced").suffix == ".py"
    script = best.export(tmp_path / "best.py")
    assert trl_file.read(script).config == best.config
    assert trl_file.read(script).trainer == space.trainer
    if device == "cpu":
        (check,) = verify_files([script], num_steps=3, timeout_s=300)
        assert check.passed, check.detail
