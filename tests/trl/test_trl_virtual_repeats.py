"""Micro-batches copied in the trace, against the same ones run: every event is the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest
from copies_kit import LORA, NF4, VARIED, both_ways, fill_caches, two_steps
from transformers import GPT2Config, MixtralConfig, OPTConfig

from autotune.space.context import Context
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_gpu

EQUAL = (96,) * 64
NUM_RANDOM = 20


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    with kit.quiet():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repeats")


@pytest.fixture(scope="module", autouse=True)
def _filled_caches(folder: Path, tiny: str, equal: str) -> None:
    fill_caches(folder, tiny, equal)


@pytest.fixture(scope="module")
def equal(folder: Path) -> str:
    return kit.write_rows(folder / "equal", EQUAL)


@pytest.fixture(scope="module")
def varied(folder: Path) -> str:
    return kit.write_rows(folder / "varied", VARIED)


@pytest.fixture(scope="module")
def context() -> Context:
    """Return what a search for a card would know of the tiny model and the rows."""
    return kit.know(EQUAL, device=make_gpu(), global_batch=8)


@pytest.mark.trl
@pytest.mark.parametrize(
    ("batch_size", "num_spared"), [(8, 2), (4, 2), (2, 2)], ids=lambda item: str(item)
)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bf16": True},
        LORA,
        {**NF4, "bf16": True},
        {"gradient_checkpointing": False, "attn_implementation": "eager"},
    ],
    ids=str,
)
def test_equal_micro_batches_are_spared(
    config: dict[str, Any], batch_size: int, num_spared: int, tmp_path: Path, tiny: str, equal: str
) -> None:
    accumulation = 8 // batch_size
    found = both_ways(
        tmp_path,
        tiny,
        equal,
        {
            **config,
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": accumulation,
        },
        measured_steps=1 if accumulation == 1 else 0,
        rows_per_step=2,
    )
    assert found.num_spared == num_spared


@pytest.mark.trl
@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_random_candidates(
    seed: int, context: Context, tmp_path: Path, tiny: str, equal: str
) -> None:
    resolved = SearchSpace.load("sft").resolve(context, {"max_length": 96})
    source = random.Random(seed)
    candidate = resolved.draw(lambda name, legal, ordered: source.choice(legal))
    config = resolved.config(candidate)
    several = config.get("gradient_accumulation_steps", 1) > 1
    both_ways(tmp_path, tiny, equal, config, measured_steps=0 if several else 1, rows_per_step=2)


@pytest.mark.trl
@pytest.mark.parametrize("config", [{}, LORA, {"activation_offloading": True}], ids=str)
def test_rows_of_varying_length(
    config: dict[str, Any], tmp_path: Path, tiny: str, varied: str
) -> None:
    """The largest micro-batch comes first and last; the one between shows what repeats."""
    found = both_ways(
        tmp_path, tiny, varied, {**config, "per_device_train_batch_size": 8}, measured_steps=1
    )
    assert found.num_spared == 1


@pytest.mark.trl
@pytest.mark.parametrize(
    "config",
    [{}, {"bf16": True}, LORA, {**NF4, "bf16": True}, {**LORA, "activation_offloading": True}],
    ids=str,
)
def test_gradients_are_made_where_they_were_added_and_added_where_they_were_made(
    config: dict[str, Any], tmp_path: Path, tiny: str, varied: str
) -> None:
    """The largest micro-batch begins the first step and ends the last one."""
    found = two_steps(tmp_path, tiny, varied, config)
    assert (found.num_spared, found.num_all) == (1, 4)


@pytest.mark.trl
@pytest.mark.parametrize("config", [{}, LORA, {**LORA, "activation_offloading": True}], ids=str)
def test_one_typical_micro_batch_is_run_once(
    config: dict[str, Any], tmp_path: Path, tiny: str, folder: Path
) -> None:
    """It adds its gradients in the first step, and makes them in the last one."""
    alike = kit.write_rows(folder / f"alike{len(config)}", (96, 96) + 80 * (64,))
    found = two_steps(tmp_path, tiny, alike, config)
    assert (found.num_spared, found.num_all) == (2, 4)


@pytest.mark.trl
@pytest.mark.parametrize(
    "config",
    [
        {"fp16": True, "dtype": "float32"},
        {"loss_type": "nll", "neftune_noise_alpha": 5.0},
        {**LORA, "use_dora": True, "lora_modules_to_save": ["lm_head"]},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "max_grad_norm": 0.0},
    ],
    ids=str,
)
def test_settings_beyond_the_space(
    config: dict[str, Any], tmp_path: Path, tiny: str, varied: str
) -> None:
    found = two_steps(tmp_path, tiny, varied, config)
    assert (found.num_spared, found.num_all) == (1, 4)


@pytest.mark.trl
@pytest.mark.parametrize("kind", ["tied", "mixture", "gpt2"])
def test_other_architectures(kind: str, tmp_path: Path, varied: str) -> None:
    model = kit.write_model(tmp_path / kind, tie_word_embeddings=kind == "tied")
    shape = {"vocab_size": kit.VOCABULARY, "pad_token_id": 0, "eos_token_id": 1}
    if kind == "mixture":
        MixtralConfig(
            **shape,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            architectures=["MixtralForCausalLM"],
        ).save_pretrained(model)
    elif kind == "gpt2":
        GPT2Config(
            **shape, n_embd=64, n_layer=3, n_head=4, architectures=["GPT2LMHeadModel"]
        ).save_pretrained(model)
    found = two_steps(tmp_path, model, varied, {})
    assert (found.num_spared, found.num_all) == (1, 4)


@pytest.mark.trl
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_model_that_draws_its_layers_is_always_run(
    seed: int, tmp_path: Path, equal: str
) -> None:
    """LayerDrop: the same micro-batch runs other layers each time."""
    model = kit.write_model(tmp_path / "opt")
    OPTConfig(
        vocab_size=kit.VOCABULARY,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        layerdrop=0.5,
        pad_token_id=0,
        eos_token_id=1,
        architectures=["OPTForCausalLM"],
    ).save_pretrained(model)
    config = {**LORA, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
    found = both_ways(tmp_path, model, equal, {**config, "seed": seed}, measured_steps=2)
    assert (found.num_spared, found.num_thinned) == (0, 0)
