"""One configuration predicted by itself, with the real trainer, against a search's prediction."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import ScriptArguments
from trl_kit import CARD, predicted, virtual_tuner

from autotune.errors import AutotuneError, UnknownNameError, UsageError
from autotune.estimate import Estimator
from autotune.executors.subprocess import SubprocessExecutor
from autotune.listener import Budget
from autotune.probe import trl_config, trl_file
from autotune.probe.result import Outcome

pytestmark = pytest.mark.trl


def test_an_estimate_is_what_a_search_predicts(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    report = virtual_tuner(virtual, made, tmp_path / "run").search(Budget(3))
    for trial in report.trials:
        assert trial.outcome is Outcome.OK, trial.results[-1].detail
        searched = trial.measurement
        file = trial.export(tmp_path / f"{trial.number}.yaml")
        found = Estimator(trl_file.read(file), (CARD,), executor=virtual).run()
        (card,) = found.cards
        alone = card.measurement
        assert alone is not None
        assert card.fits
        assert found.coverage == trial.coverage
        assert alone.phases == searched.phases
        assert alone.worst_batch == searched.worst_batch
        assert alone.tokens_per_s.median == pytest.approx(searched.tokens_per_s.median)
        assert alone.makeup["at_peak"] == searched.makeup["at_peak"]
        assert len(alone.makeup["timeline"]["points"]) == 240


def test_a_file_written_by_hand(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    config = {
        "model_name_or_path": made["model"],
        "datasets": [{"path": "json", "data_files": made["dataset"], "split": "train"}],
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "dataloader_num_workers": 2,
        "dataloader_prefetch_factor": 2,
        "eval_strategy": "steps",
        "dataset_test_split": "train",
        "eval_steps": 10,
        "report_to": "wandb",
        "use_cpu": True,
        "streaming": True,
        "tf32": True,
    }
    plain = predicted(virtual, tmp_path / "plain.yaml", config).cards[0]
    assert plain.fits
    assert plain.measurement is not None
    assert plain.measurement.accumulation_steps == 8
    assert "eval" in plain.measurement.phases
    env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    grown = predicted(virtual, tmp_path / "env.yaml", {**config, "env": env}).cards[0]
    assert grown.measurement is not None
    # The setting is of the allocator: it reserves otherwise for the same tensors.
    assert grown.measurement.peak_of("reserved_bytes") < plain.measurement.peak_of(
        "reserved_bytes"
    )


def test_rows_are_assumed_and_cards_differ(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "rtx-4090"\nmemory_bytes = 600_000_000\n')
    config = {"model_name_or_path": made["model"], "per_device_train_batch_size": 2}
    found = predicted(virtual, tmp_path / "model.yaml", config, CARD, str(mine), assume_length=300)
    enough, little = found.cards
    assert enough.fits
    assert enough.measurement is not None
    assert little.measurement is not None
    assert enough.measurement.worst_batch == (2, 300)
    assert found.coverage == 1.0
    assert little.outcome is Outcome.DEVICE_OOM
    # Without the card's limit it is the same run.
    assert little.used_bytes == enough.used_bytes > little.memory_bytes
    assert "DOES NOT FIT: it would need" in little.verdict()


@pytest.mark.parametrize(
    ("keys", "rows", "sequences"),
    [
        ({"max_length": 8192}, 4097, "4,097"),
        ({"max_length": 8192}, 4096, ""),
        ({"max_length": 512}, 4097, ""),
        ({"max_length": 8192, "packing": True}, 64, "8,192"),
    ],
)
def test_sequences_beyond_the_models_positions_are_noted(
    virtual: SubprocessExecutor,
    made: dict[str, str],
    tmp_path: Path,
    keys: dict[str, Any],
    rows: int,
    sequences: str,
) -> None:
    config = {"model_name_or_path": made["model"], "per_device_train_batch_size": 1, **keys}
    found = predicted(virtual, tmp_path / "long.yaml", config, assume_length=rows)
    notes = [note for note in found.notes if "max_position_embeddings" in note]
    wanted = f"sequences of {sequences} tokens are longer than the 4,096 that"
    assert [note.startswith(wanted) for note in notes] == ([True] if sequences else [])


def test_what_trl_refuses_is_said(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    config = {"model_name_or_path": made["model"], "per_device_train_batch_size": "four"}
    with pytest.raises(UsageError, match="invalid int value: 'four'") as caught:
        predicted(virtual, tmp_path / "four.yaml", config, assume_length=8)
    assert "`fixed:`" not in caught.value.hint
    assert caught.value.message.startswith(f"{tmp_path / 'four.yaml'}, line ")
    config = {"model_name_or_path": made["model"], "dataset_name": str(tmp_path / "nowhere")}
    with pytest.raises(Exception, match="data set") as missing:
        predicted(virtual, tmp_path / "missing.yaml", config)
    assert "--assume-length" in missing.value.hint


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("dtype", "bf16", "bfloat16"),
        ("optim", "adamw_torch_fusd", "adamw_torch_fused"),
        ("lr_scheduler_type", "cosin", "cosine"),
        ("packing_strategy", "bfdd", "bfd"),
        ("eval_strategy", "step", "steps"),
    ],
)
def test_of_a_few_values_the_nearest_is_named(
    key: str,
    value: str,
    near: str,
    virtual: SubprocessExecutor,
    made: dict[str, str],
    tmp_path: Path,
) -> None:
    config = {"model_name_or_path": made["model"], key: value}
    with pytest.raises(UnknownNameError) as caught:
        predicted(virtual, tmp_path / "slip.yaml", config, assume_length=8)
    message = caught.value.message
    assert re.search(rf"slip.yaml, line \d+: unknown value of {key} '{value}'\.", message)
    assert caught.value.hint.startswith(f"Did you mean '{near}'")


@pytest.mark.parametrize("dtype", ["float64", "auto", "bfloat16"])
def test_any_dtype_of_pytorch_is_let_through(
    dtype: str, virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    config = {"model_name_or_path": made["model"], "dtype": dtype}
    (card,) = predicted(virtual, tmp_path / "dtype.yaml", config, assume_length=64).cards
    assert "dtype" not in card.detail


@pytest.mark.parametrize(
    ("keys", "verdict", "hint"),
    [
        ({"attn_implementation": "nonsense"}, "DOES NOT RUN: ", "Change it in "),
        (
            {"use_peft": True, "lora_target_modules": ["nope"]},
            "DOES NOT RUN: Target modules",
            "Change it in ",
        ),
        (
            {"attn_implementation": "flash_attention_3"},
            "DOES NOT RUN: FlashAttention 3 is built",
            "The card lacks it",
        ),
        (
            {"torch_compile": True},
            "CANNOT BE TOLD (unsupported): torch.compile",
            "No other card would help",
        ),
    ],
    ids=lambda item: next(iter(item)) if isinstance(item, dict) else "",
)
def test_a_hint_says_who_refuses(
    keys: dict[str, object],
    verdict: str,
    hint: str,
    virtual: SubprocessExecutor,
    made: dict[str, str],
    tmp_path: Path,
) -> None:
    config = {"model_name_or_path": made["model"], **keys}
    (card,) = predicted(virtual, tmp_path / "file.yaml", config, assume_length=64).cards
    assert card.verdict().startswith(verdict)
    assert card.hint.startswith(hint)
    assert "Error: " not in card.verdict()


def test_a_data_file_in_the_place_of_a_data_set_is_told_apart_from_a_missing_one(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a row"}\n')
    keys = {"model_name_or_path": made["model"], "dataset_name": str(rows)}
    with pytest.raises(AutotuneError, match="is a data file") as caught:
        predicted(virtual, tmp_path / "file.yaml", keys)
    shown = caught.value.hint.partition("write:\n")[2].partition("\n  Without")[0]
    named = yaml.safe_load(textwrap.dedent(shown))
    assert named["datasets"] == [{"path": "json", "data_files": str(rows), "split": "train"}]
    right = {**named, "model_name_or_path": made["model"], "per_device_train_batch_size": 1}
    assert predicted(virtual, tmp_path / "right.yaml", right).cards[0].fits
    assert "\n  Without the data: --assume-length N." in caught.value.hint


def test_evaluation_without_a_split_for_it_is_refused_as_trl_ends(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    mixture = {"datasets": [{"path": "json", "data_files": made["dataset"], "split": "train"}]}
    config = {"model_name_or_path": made["model"], **mixture, "eval_strategy": "steps"}
    with pytest.raises(UsageError, match="trl ends with KeyError: 'test'") as caught:
        predicted(virtual, tmp_path / "mixture.yaml", config)
    assert "test_split_size" in caught.value.hint
    assert "--assume-length" not in caught.value.hint
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text('{"text": "a row"}\n')
    config = {"model_name_or_path": made["model"], "dataset_name": str(rows)}
    with pytest.raises(UsageError, match="no split 'test'") as caught:
        predicted(virtual, tmp_path / "named.yaml", {**config, "eval_strategy": "epoch"})
    assert "It has: train. Name one with dataset_test_split" in caught.value.hint


def test_rows_can_be_kept_for_evaluation(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    mixture = {"datasets": [{"path": "json", "data_files": made["dataset"], "split": "train"}]}
    config = {"model_name_or_path": made["model"], **mixture, "eval_strategy": "steps"}
    found = predicted(virtual, tmp_path / "held.yaml", {**config, "test_split_size": 0.1})
    assert "eval" in found.cards[0].measurement.phases
    assumed = predicted(virtual, tmp_path / "assumed.yaml", config, assume_length=64)
    assert any("KeyError: 'test'" in note for note in assumed.notes)


def test_trl_has_the_default_split_that_is_named() -> None:
    assert ScriptArguments(dataset_name="x").dataset_test_split == trl_config.TRL_TEST_SPLIT


def test_a_mask_that_flash_attention_would_spare_is_noted(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    config = {
        "model_name_or_path": made["model"],
        "packing": True,
        "max_length": 4096,
        "bf16": False,
        "fp16": True,
    }
    found = predicted(virtual, tmp_path / "p.yaml", config, "l4", "t4", assume_length=4096)
    (note,) = [note for note in found.notes if "attention mask" in note]
    assert "flash_attention_2 has none; NVIDIA L4 can run it" in note
