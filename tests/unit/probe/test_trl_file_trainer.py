"""Which trainer a configuration is for: what was asked, what the file says, what its keys tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.probe import trl_file

pytest.importorskip("trl")

BASE = "model_name_or_path: m\ndataset_name: d\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("keys", "trainer"),
    [
        ("", "sft"),
        ("learning_rate: 1.0e-5\n", "sft"),
        ("packing: true\n", "sft"),
        ("precompute_ref_log_probs: true\ntruncation_mode: keep_end\n", "dpo"),
        ("desirable_weight: 1.0\n", "kto"),
        ("center_rewards_coefficient: 0.01\n", "reward"),
        ("num_generations: 4\nscale_rewards: none\n", "grpo"),
        ("max_new_tokens: 8\n", "online_dpo"),
        # A slip is told as one, by the trainer that the others are of.
        ("max_lenght: 8\n", "sft"),
        ("packing: true\nmax_lenght: 8\n", "sft"),
        ("max_new_tokens: 8\nmax_lenght: 8\n", "online_dpo"),
    ],
)
def test_keys_tell_it(keys: str, trainer: str, tmp_path: Path) -> None:
    assert trl_file.read(write(tmp_path, BASE + keys)).trainer == trainer


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ("precompute_ref_log_probs: true\n", ["dpo", "kto"]),
        ("num_generations: 4\nreward_funcs: [a.b]\n", ["grpo", "rloo"]),
    ],
)
def test_keys_of_several_trainers(keys: str, names: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, BASE + keys)
    with pytest.raises(UsageError, match="does not say which trainer") as caught:
        trl_file.read(path)
    assert all(f"--trainer {name}" in caught.value.hint for name in names)
    assert trl_file.read(path, names[1]).trainer == names[1]


def test_what_was_asked_for_comes_first_and_the_comment_second(tmp_path: Path) -> None:
    path = write(tmp_path, f"# run it with  trl rloo --config my.yaml\n{BASE}packing: true\n")
    assert trl_file.read(path).trainer == "rloo"
    assert trl_file.read(path, "grpo").trainer == "grpo"


def test_a_comment_names_a_trainer_without_a_command(tmp_path: Path) -> None:
    path = write(tmp_path, f"# Written by autotune.\n#   trainer  my.code:Class\n{BASE}")
    assert trl_file.read(path).trainer == "my.code:Class"
