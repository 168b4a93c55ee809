"""Online DPO: what is generated, counted and taken."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest
import torch

from autotune.space.context import DataProfile
from autotune.space.space import SearchSpace
from autotune.trainers.base import load

pytestmark = [pytest.mark.trl, pytest.mark.usefixtures("quick")]

TOLERANCE = 0.005
SLACK_BYTES = 2048
NUM_ROWS = 40
SHORT = {"max_new_tokens": 8, "max_length": 64}


def rows() -> list[dict[str, Any]]:
    """Return prompts of 5 to 20 words."""
    draw = random.Random(11)
    return [
        {"prompt": " ".join(f"w{draw.randrange(2, 900)}" for _ in range(draw.randint(5, 20)))}
        for _ in range(NUM_ROWS)
    ]


@pytest.fixture(scope="module")
def prepared(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("prepared")
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    named = {"path": "json", "data_files": str(path), "split": "train"}
    fixed = SearchSpace.load("online_dpo").fixed
    return load("online_dpo").prepare(
        {
            "trainer": "online_dpo",
            "config": {"model_name_or_path": tiny, "datasets": [named], **fixed, **SHORT},
            "folder": str(folder),
            "max_lengths": [],
        }
    )


def spec_for(path: Path, tiny: str, answer: Mapping[str, Any], **config: Any) -> Any:
    keys = {**SearchSpace.load("online_dpo").fixed, **SHORT, **config}
    return kit.make_spec(path, tiny, answer["data_folder"], keys, trainer="online_dpo")


def test_the_profile_is_of_prompts_with_whole_completions(prepared: dict[str, Any]) -> None:
    data = DataProfile.from_dict(prepared["data"])
    lengths = [len(row["prompt"].split()) for row in rows()]
    assert data.num_rows == NUM_ROWS
    assert data.longest == max(lengths) + SHORT["max_new_tokens"]
    assert sum(data.column_counts["prompt"].values()) == NUM_ROWS


def test_ways_of_checkpointing_that_are_dropped_are_found_out(prepared: dict[str, Any]) -> None:
    refused = prepared["refusals"]["checkpointing"]
    assert {"full_reentrant", "selective", "every_2_layers", "every_4_layers"} <= set(refused)


def test_a_generation_begins_each_micro_batch(
    tmp_path: Path, tiny: str, prepared: dict[str, Any]
) -> None:
    spec = spec_for(tmp_path, tiny, prepared, gradient_accumulation_steps=2)
    steps, _ = kit.run_virtual(spec)
    assert len(steps.after_bytes) == 2
    assert steps.num_generations == 4


def test_a_reference_model_is_a_second_copy_of_the_weights(
    tmp_path: Path, tiny: str, prepared: dict[str, Any]
) -> None:
    whole = kit.run_virtual(spec_for(tmp_path / "whole", tiny, prepared))[0].loaded_bytes
    lora = kit.run_virtual(spec_for(tmp_path / "lora", tiny, prepared, use_peft=True))[0]
    assert whole == pytest.approx(2 * lora.loaded_bytes, rel=0.1)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_checkpointing": {"gradient_checkpointing": False},
    "cache": {"generation_kwargs": {"use_cache": True}},
    "lora": {"use_peft": True},
    "lora_no_checkpointing": {"use_peft": True, "gradient_checkpointing": False},
    # TRL takes 4-bit weights on the CPU for sharded ones. On a card it takes over checkpointing of
    # theirs, and generates with a cache (prepare_peft_model in trl/experimental/utils.py).
    "nf4": {
        "use_peft": True,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "generation_kwargs": {"use_cache": True},
    },
    "sgd": {"optim": "sgd", "gradient_accumulation_steps": 2},
    "adafactor": {"optim": "adafactor"},
    "cut_prompts": {"max_length": 16},
    "ipo": {"loss_type": "ipo", "per_device_train_batch_size": 2},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_pretend_device_counts_what_real_tensors_take(
    kind: str, tmp_path: Path, tiny: str, prepared: dict[str, Any]
) -> None:
    config = CONFIGS[kind]
    real, _ = kit.run_real(spec_for(tmp_path / "real", tiny, prepared, **config))
    virtual, _ = kit.run_virtual(spec_for(tmp_path / "virtual", tiny, prepared, **config))
    kit.compare(real, virtual, tolerance=TOLERANCE, slack_bytes=SLACK_BYTES)


def test_a_cache_for_generating_changes_nothing_that_is_learnt(
    tmp_path: Path, tiny: str, prepared: dict[str, Any]
) -> None:
    norms = {}
    for use_cache in (False, True):
        keys = {"generation_kwargs": {"use_cache": use_cache}, "learning_rate": 1e-3}
        torch.manual_seed(3)  # of the random weights
        with kit.built(spec_for(tmp_path / str(use_cache), tiny, prepared, **keys)) as session:
            trainer = session._trainer
            trainer.train()
            norms[use_cache] = [
                (log["grad_norm"], log["logps/chosen"])
                for log in trainer.state.log_history
                if "grad_norm" in log
            ]
    assert len(norms[True]) == 2
    assert norms[True] == [pytest.approx(pair, rel=1e-3) for pair in norms[False]]
