"""Reading configurations that anyone may have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import PrerequisiteError, UsageError
from autotune.probe import trl_config, trl_file, trl_yaml
from autotune.testing.contexts import make_profile


def test_what_launches_processes_is_left_out() -> None:
    config, env, notes = trl_config.for_one_card(
        {
            "model_name_or_path": "a/b",
            "num_processes": 1,
            "accelerate_config": "single_gpu",
            "use_cpu": True,
            "auto_find_batch_size": True,
            "env": {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": 3},
        },
        "x.yaml",
    )
    assert config == {
        "model_name_or_path": "a/b",
        "auto_find_batch_size": False,
        "env": {"OMP_NUM_THREADS": "1"},
    }
    assert env == {"OMP_NUM_THREADS": "1"}
    assert len(notes) == 3


@pytest.mark.parametrize(
    "config",
    [
        {"deepspeed": "zero3.json"},
        {"fsdp": "full_shard"},
        {"num_processes": 2},
        {"num_machines": "2"},
        {"accelerate_config": "multi_gpu"},
        {"use_fsdp": True},
    ],
    ids=str,
)
def test_several_cards_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="several cards"):
        trl_config.for_one_card(config, "x.yaml")
    trl_config.for_one_card(dict.fromkeys(config), "x.yaml")


@pytest.mark.parametrize(
    ("value", "number"), [(4, 4), ("4", 4), (4.0, 4), (None, None), ("four", 8), (True, 8)]
)
def test_numbers_are_read_as_far_as_they_are_some(value: object, number: int | None) -> None:
    assert trl_config.number({"x": value}, "x", 8) == number


@pytest.mark.parametrize(
    ("config", "share"),
    [
        ({}, 0.75),  # TRL cuts at 1024
        ({"max_length": None}, 1.0),
        ({"max_length": 512}, 0.5),
        ({"max_length": 512, "packing": True}, 0.5),
        ({"max_length": 512, "packing": True, "packing_strategy": "wrapped"}, 1.0),
        ({"max_length": 512, "truncation_mode": "keep_end"}, None),
        ({"max_length": 2048, "truncation_mode": "keep_end"}, 1.0),
    ],
    ids=str,
)
def test_the_share_of_tokens_follows_what_is_cut(
    config: dict[str, object], share: float | None
) -> None:
    data = make_profile([512, 1536])
    found = trl_config.coverage(config, data)
    assert found == (None if share is None else pytest.approx(share))


def test_assumed_rows_fill_several_micro_batches() -> None:
    assert trl_config.rows_enough({"per_device_train_batch_size": 2}, 100) == 8
    packed = {"per_device_train_batch_size": 2, "packing": True, "max_length": 400}
    assert trl_config.rows_enough(packed, 100) == 32
    assert trl_config.rows_enough(packed, 500) == 8


def test_a_comment_names_command_and_card(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    header = {"device": "NVIDIA H200 (virtual)", "trainer": "sft", "source": "predicted"}
    path.write_text(trl_yaml.render({"max_length": 8}, header, file_name="x.yaml"))
    read = trl_file.read(path)
    assert (read.config, read.trainer, read.card) == ({"max_length": 8}, "sft", "NVIDIA H200")
    path.write_text("max_length: 8\n")
    read = trl_file.read(path)
    assert (read.trainer, read.card) == ("sft", None)
    with pytest.raises(PrerequisiteError, match="there is no file"):
        trl_file.read(tmp_path / "gone.yaml")


@pytest.mark.parametrize(("value", "is_told"), [(4, True), (None, False)])
def test_that_emptying_the_cache_is_not_predicted_is_told(
    value: int | None, is_told: bool
) -> None:
    config = {"model_name_or_path": "a/b", "torch_empty_cache_steps": value}
    _, _, notes = trl_config.for_one_card(config, "x.yaml")
    assert any("torch_empty_cache_steps: not predicted" in note for note in notes) is is_told
