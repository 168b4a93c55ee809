"""Micro-batches run with few layers, against all layers run: every event is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest
import torch
from copies_kit import DEEP, LORA, NF4, both_ways, two_steps
from transformers import Gemma3TextConfig, GPT2Config, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from autotune.virtual import cards
from autotune.virtual.api import session_for

pytestmark = [pytest.mark.trl, pytest.mark.usefixtures("filled_caches")]

CHECKPOINTING = [
    {"gradient_checkpointing": False},
    {},
    {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    {"gradient_checkpointing_kwargs": {"every_n_layers": 4}},
]


@pytest.mark.parametrize("offloading", [False, True], ids=["stays", "offloaded"])
@pytest.mark.parametrize("config", CHECKPOINTING, ids=str)
def test_every_way_of_checkpointing(
    config: dict[str, Any], offloading: bool, tmp_path: Path, deep: str, varied: str
) -> None:
    """Every micro-batch that has a shape of its own is thinned, but for a first one that must show
    that a period of several layers will do."""
    every_n = config.get("gradient_checkpointing_kwargs", {}).get("every_n_layers", 1)
    found = two_steps(
        tmp_path, deep, varied, {**config, "activation_offloading": offloading, **LORA}
    )
    assert (found.num_spared, found.num_all) == (1, 4)
    assert found.num_thinned == (3 if every_n == 1 else 2)


@pytest.mark.parametrize(
    "config",
    [
        {"bf16": True},
        {"fp16": True, "dtype": "float32"},
        {**LORA, "use_dora": True, "lora_modules_to_save": ["lm_head"]},
        {**NF4, "bf16": True, "use_bnb_nested_quant": True, "optim": "paged_adamw_8bit"},
        {**LORA, "load_in_8bit": True, "optim": "adamw_8bit"},
        {"loss_type": "nll", "optim": "adafactor", "attn_implementation": "eager"},
        {"packing": True, "max_length": 96, "attn_implementation": "flash_attention_2"},
    ],
    ids=str,
)
def test_other_settings(config: dict[str, Any], tmp_path: Path, deep: str, varied: str) -> None:
    found = both_ways(
        tmp_path, deep, varied, {**config, "per_device_train_batch_size": 8}, measured_steps=1
    )
    assert found.num_thinned == found.num_all - found.num_spared


@pytest.mark.parametrize("kind", ["gpt2", "mixture", "sliding", "tied"])
def test_other_architectures(kind: str, tmp_path: Path, varied: str) -> None:
    model = kit.write_model(
        tmp_path / kind, tie_word_embeddings=kind == "tied", num_hidden_layers=DEEP
    )
    shape = {
        "vocab_size": kit.VOCABULARY,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": DEEP,
    }
    if kind == "mixture":
        MixtralConfig(
            **shape, num_local_experts=4, architectures=["MixtralForCausalLM"]
        ).save_pretrained(model)
    elif kind == "gpt2":
        GPT2Config(
            vocab_size=kit.VOCABULARY,
            n_embd=64,
            n_layer=DEEP,
            n_head=4,
            pad_token_id=0,
            eos_token_id=1,
            architectures=["GPT2LMHeadModel"],
        ).save_pretrained(model)
    elif kind == "sliding":
        # One layer in two attends to the last 32 tokens alone.
        Gemma3TextConfig(
            **shape,
            head_dim=16,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"] * (DEEP // 2),
            architectures=["Gemma3ForCausalLM"],
        ).save_pretrained(model)
    found = two_steps(tmp_path, model, varied, {})
    assert (found.num_spared, found.num_all) == (1, 4)
    # The loss of a mixture takes something of every layer at once.
    assert found.num_thinned == {"mixture": 0, "sliding": 2}.get(kind, 3)


def test_a_layer_that_differs_is_run(
    tmp_path: Path, deep: str, varied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the middle, which nothing tells from the others before it runs."""
    usual = LlamaDecoderLayer.forward

    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = usual(self, hidden, *args, **kwargs)
        return result + hidden.exp() if self.is_odd else result

    def construct(self: Any, config: Any, layer_idx: int) -> None:
        build(self, config, layer_idx)
        self.is_odd = layer_idx == DEEP // 2

    build = LlamaDecoderLayer.__init__
    monkeypatch.setattr(LlamaDecoderLayer, "__init__", construct)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    found = two_steps(tmp_path, deep, varied, {})
    assert (found.num_spared, found.num_thinned) == (1, 0)


def test_a_model_that_counts_its_layers_is_run_in_full(
    tmp_path: Path, deep: str, varied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails with fewer; what it predicts is the same, though not in the same order."""
    usual = LlamaDecoderLayer.forward
    seen: list[int] = []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.self_attn.layer_idx)
        if len(seen) > 1 and seen[-1] - seen[-2] > 1:
            raise IndexError("a layer is missing")
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    spec = kit.make_spec(
        tmp_path / "counted", deep, varied, {"gradient_checkpointing": False}, representative=True
    )
    card = session_for(cards.find("a100-sxm-80gb"))
    repeats = kit.Repeats(card.trace)
    spared = kit.run_on(card, spec, repeats)
    assert repeats.depth is not None
    assert repeats.depth.num_thinned == 0
    monkeypatch.undo()
    whole = kit.run_on(session_for(cards.find("a100-sxm-80gb")), spec)
    assert kit.figures(spared) == kit.figures(whole)
