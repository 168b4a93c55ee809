"""Models whose prediction needs a word of caution, or cannot be made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig
from trl_kit import predicted

from autotune.executors.subprocess import SubprocessExecutor

pytestmark = pytest.mark.trl


def folder_with(config: dict[str, Any], tokenizer: str, folder: Path) -> str:
    """Return a model folder that holds a configuration and a tokenizer, no weights."""
    shutil.copytree(
        tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_mixture_of_experts_comes_with_a_word_of_caution(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
    ).to_dict()
    model = folder_with(config, made["model"], tmp_path / "moe")
    keys = {"model_name_or_path": model, "per_device_train_batch_size": 2}
    found = predicted(virtual, tmp_path / "moe.yaml", keys, assume_length=64)
    assert found.cards[0].fits
    text = " ".join(found.notes)
    assert "mixture of 8 experts" in text
    assert "not checked on a card" in text
    assert "bitsandbytes quantises no others" in text


def test_a_dense_model_comes_without(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    keys = {"model_name_or_path": made["model"], "per_device_train_batch_size": 2}
    found = predicted(virtual, tmp_path / "dense.yaml", keys, assume_length=64)
    assert "experts" not in " ".join(found.notes)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("kind", ["another name", "own code"])
def test_a_class_that_transformers_does_not_name_is_found_as_trl_finds_it(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path, kind: str, quantised: bool
) -> None:
    config = json.loads((Path(made["model"]) / "config.json").read_text())
    is_own = kind == "own code"
    if is_own:
        config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
        config["auto_map"] = {
            "AutoConfig": "own.OwnConfig",
            "AutoModelForCausalLM": "own.OwnForCausalLM",
        }
    else:
        config["architectures"] = ["LLaMAForCausalLM"]
    model = folder_with(config, made["model"], tmp_path / "model")
    if is_own:
        (tmp_path / "model" / "own.py").write_text(OWN_CODE)
    keys: dict[str, Any] = {"per_device_train_batch_size": 2}
    if quantised:
        keys |= {"use_peft": True, "load_in_4bit": True, "lora_target_modules": "all-linear"}
    keys["model_name_or_path"] = made["model"]
    (usual,) = predicted(virtual, tmp_path / "usual.yaml", keys, assume_length=64).cards
    keys |= {"model_name_or_path": model, "trust_remote_code": is_own}
    trusted = {"trust_remote_code": is_own}
    (found,) = predicted(virtual, tmp_path / "m.yaml", keys, assume_length=64, **trusted).cards
    assert found.fits, found.verdict()
    assert found.used_bytes == usual.used_bytes


def test_weights_stored_in_a_cards_own_format_are_not_predicted_as_others(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    config = json.loads((Path(made["model"]) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = folder_with(config, made["model"], tmp_path / "fp8")
    keys = {"model_name_or_path": model, "use_peft": True}
    (found,) = predicted(virtual, tmp_path / "fp8.yaml", keys, assume_length=64).cards
    assert found.verdict().startswith("CANNOT BE TOLD")
    assert "quantised by fp8 cannot run on a virtual" in found.verdict()
