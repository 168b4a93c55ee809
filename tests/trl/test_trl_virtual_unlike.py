"""Models whose layers look alike and are not: they are predicted as if all layers were run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest
import torch
from copies_kit import DEEP, both_ways, two_steps
from transformers import (
    Cohere2Config,
    DeepseekV3Config,
    DoryConfig,
    FalconConfig,
    Gemma3nTextConfig,
    GPTNeoConfig,
    Lfm2Config,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.llama import modeling_llama

pytestmark = [pytest.mark.trl, pytest.mark.usefixtures("filled_caches")]

FULL, SLIDING = "full_attention", "sliding_attention"
BASE = {
    "vocab_size": kit.VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
}
SHAPE = {**BASE, "num_hidden_layers": DEEP, "intermediate_size": 160, "num_key_value_heads": 2}


def write(path: Path, config: PretrainedConfig, architecture: str) -> str:
    """Write a model of another kind with the tiny model's tokenizer."""
    model = kit.write_model(path)
    config.architectures = [architecture]
    config.save_pretrained(model)
    return model


def make_stock(function: Any, like: Any) -> Any:
    """Let a function pass for a library's."""
    function.__module__ = like.__module__
    return function


# -- what a first, padded micro-batch hides ------------------------------------------------------


@pytest.mark.parametrize("full", [(0, 12, 23), (0, 1, 10, 11, 22, 23)])
def test_sliding_layers_that_a_mask_makes_alike(full: tuple[int, ...], tmp_path: Path) -> None:
    """Where rows are padded, both kinds of layers take a mask; where not, only one does."""
    rows = kit.write_rows(tmp_path / "rows", 3 * (96,) + (88,) + 60 * (72,))
    types = [FULL if layer in full else SLIDING for layer in range(DEEP)]
    window = {"head_dim": 16, "sliding_window": 32, "use_sliding_window": True}
    config = Qwen3Config(**SHAPE, **window, layer_types=types)
    model = write(tmp_path / "model", config, "Qwen3ForCausalLM")
    assert two_steps(tmp_path, model, rows, {}).num_thinned == 0


# -- models that take their layers in another way ------------------------------------------------


def test_slices_of_the_layers(tmp_path: Path, varied: str) -> None:
    """A slice of a short list may be empty, without an error."""
    config = DoryConfig(
        **{**SHAPE, "num_hidden_layers": 36},
        head_dim=16,
        n_input_layers=16,
        n_output_layers=12,
        n_recurrent_loops=2,
        layer_types=[FULL] * 36,
    )
    model = write(tmp_path / "model", config, "DoryForCausalLM")
    assert two_steps(tmp_path, model, varied, {}).num_thinned == 0


@pytest.mark.parametrize("share", [0.03, 0.3])
def test_layers_that_are_dropped_at_random(share: float, tmp_path: Path, varied: str) -> None:
    config = OPTConfig(
        **BASE,
        num_hidden_layers=DEEP,
        ffn_dim=160,
        word_embed_proj_dim=64,
        max_position_embeddings=512,
        layerdrop=share,
    )
    model = write(tmp_path / "model", config, "OPTForCausalLM")
    found = two_steps(tmp_path, model, varied, {})
    assert (found.num_spared, found.num_thinned) == (0, 0)


def test_a_module_that_two_layers_share(
    tmp_path: Path, deep: str, varied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = modeling_llama.LlamaModel.__init__

    def construct(self: Any, config: Any) -> None:
        build(self, config)
        self.layers[12].mlp = self.layers[11].mlp

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", construct)
    assert two_steps(tmp_path, deep, varied, {}).num_thinned == 0


@pytest.mark.parametrize("num_layers", [5, DEEP])
def test_a_model_that_looks_at_its_layers_class(
    num_layers: int, tmp_path: Path, varied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that tell when they begin and end are of another class: it is run without them."""
    model = kit.write_model(tmp_path / "model", num_hidden_layers=num_layers)
    usual = modeling_llama.LlamaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            assert isinstance(layer, modeling_llama.LlamaDecoderLayer)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", make_stock(forward, usual))
    found = two_steps(tmp_path, model, varied, {})
    assert (found.num_spared, found.num_thinned) == (1, 0)


# -- code that no library has --------------------------------------------------------------------

OWN_CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class OwnLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        hidden_states = super().forward(hidden_states, *args, **kwargs)
        number = self.self_attn.layer_idx
        return hidden_states + hidden_states.exp() if number == NUMBER else hidden_states


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for number in range(len(self.model.layers)):
            self.model.layers[number] = OwnLayer(config, number)
"""


@pytest.mark.parametrize("number", [12, 20])
def test_a_models_own_code_may_do_anything(number: int, tmp_path: Path, varied: str) -> None:
    """One layer in the middle does more than the others, as only its number tells."""
    model = kit.write_model(tmp_path / "model", num_hidden_layers=DEEP)
    path = Path(model) / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnForCausalLM",
    }
    path.write_text(json.dumps(config))
    (Path(model) / "own.py").write_text(OWN_CODE.replace("NUMBER", str(number)))
    found = both_ways(
        tmp_path,
        model,
        varied,
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        measured_steps=0,
        rows_per_step=2,
        trust_remote_code=True,
    )
    assert (found.num_spared, found.num_thinned) == (1, 0)


# -- the libraries' models -----------------------------------------------------------------------

OTHERS: dict[str, Callable[[], tuple[PretrainedConfig, str]]] = {
    "every fourth without positions": lambda: (SmolLM3Config(**SHAPE), "SmolLM3ForCausalLM"),
    "sliding three in four": lambda: (
        Cohere2Config(**SHAPE, sliding_window=32),
        "Cohere2ForCausalLM",
    ),
    "parallel": lambda: (FalconConfig(**BASE, num_hidden_layers=DEEP), "FalconForCausalLM"),
    "first ones dense": lambda: (
        DeepseekV3Config(
            **{**SHAPE, "num_key_value_heads": 4},
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=3,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        ),
        "DeepseekV3ForCausalLM",
    ),
    "convolutions between": lambda: (
        Lfm2Config(**SHAPE, layer_types=["conv", "conv", FULL, "conv"] * 6),
        "Lfm2ForCausalLM",
    ),
    "global and local": lambda: (
        GPTNeoConfig(
            vocab_size=kit.VOCABULARY,
            hidden_size=64,
            num_layers=DEEP,
            num_heads=4,
            attention_types=[[["global", "local"], DEEP // 2]],
            window_size=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        ),
        "GPTNeoForCausalLM",
    ),
    "shared keys and values": lambda: (
        Gemma3nTextConfig(
            **SHAPE,
            head_dim=16,
            sliding_window=32,
            num_kv_shared_layers=8,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=kit.VOCABULARY,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * DEEP,
        ),
        "Gemma3nForCausalLM",
    ),
}


@pytest.mark.parametrize(("number", "kind"), list(enumerate(OTHERS)), ids=list(OTHERS))
def test_layers_of_many_kinds(number: int, kind: str, tmp_path: Path, varied: str) -> None:
    config, architecture = OTHERS[kind]()
    model = write(tmp_path / "model", config, architecture)
    with torch.random.fork_rng(devices=[]):
        two_steps(tmp_path, model, varied, {"gradient_checkpointing": number % 2 == 0})
