"""How vLLM divides its share of a card, against figures worked out by hand."""

from __future__ import annotations

import types
from typing import Any

import pytest

from autotune.units import GIB
from autotune.virtual import engine
from autotune.virtual.errors import NotOnCard, NotVirtual

# Llama 3.1 8B. A block is 16 tokens x 2 x 8 heads x 128 x 2 bytes x 32 layers: 2 MiB.
LLAMA = engine.Shape(
    num_parameters=8_030_261_248,
    windows=(None,) * 32,
    kv_heads=8,
    head_size=128,
    hidden_size=4096,
    intermediate_size=14_336,
    vocab_size=128_256,
)
BLOCK_BYTES = 2_097_152


def reserve(**changes: Any) -> engine.Reservation:
    asked: dict[str, Any] = {
        "total_bytes": 80 * GIB,
        "utilization": 0.3,
        "max_model_len": 4096,
        "num_sequences": 64,
        "sleeps": False,
    }
    return engine.reserve(LLAMA, **{**asked, **changes})


def config_of(**fields: Any) -> Any:
    known = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "vocab_size": 128_256,
        **fields,
    }
    text = types.SimpleNamespace(**known)
    text.get_text_config = lambda: text
    return text


def test_the_cache_is_what_is_left_of_the_share() -> None:
    found = reserve()
    assert found.requested_bytes == 25_769_803_776  # 0.3 of 80 GiB
    assert found.weights_bytes == 16_060_522_496
    # 4096 tokens x (3 x 14,336 + 2 x 4096) x 2 bytes: more than drawing 64 tokens takes.
    assert found.transient_bytes == 419_430_400
    left = 25_769_803_776 - 16_060_522_496 - 386_924_544 - 419_430_400
    assert left == 8_902_926_336
    assert found.num_blocks == 4245 == left // BLOCK_BYTES
    assert found.kv_cache_bytes == 4245 * BLOCK_BYTES


def test_awake_it_holds_its_share_but_for_what_comes_and_goes() -> None:
    found = reserve()
    rest = found.requested_bytes - found.transient_bytes - found.awake_bytes
    assert 0 <= rest < BLOCK_BYTES


def test_asleep_only_graphs_stay() -> None:
    assert reserve(sleeps=True).training_bytes == engine.GRAPHS_BYTES
    assert reserve(sleeps=False).training_bytes == reserve().awake_bytes


def test_drawing_for_many_sequences_takes_more_than_their_pass() -> None:
    # 512 x 128,256 tokens x 18 bytes
    assert reserve(num_sequences=512).transient_bytes == 1_182_007_296


def test_a_sequence_of_the_greatest_length_must_find_room() -> None:
    # 4244 usable blocks hold 67,904 tokens.
    assert reserve(max_model_len=67_904).num_blocks == 4245
    with pytest.raises(NotOnCard, match="67,905 tokens"):
        reserve(max_model_len=67_905)


def test_weights_must_find_room() -> None:
    with pytest.raises(NotOnCard, match=r"leave 0\.000 GiB for the KV cache \(modelled\)"):
        reserve(utilization=0.1)


def test_as_many_are_generated_at_once_as_the_cache_holds() -> None:
    found = reserve(num_sequences=512)
    usable = found.num_blocks - 1
    assert engine.at_once(LLAMA, found, 1024) == usable // 64
    assert engine.at_once(LLAMA, reserve(num_sequences=8), 1024) == 8
    assert engine.at_once(LLAMA, reserve(), 10**6) == 1


def test_a_window_bounds_what_a_layer_keeps_and_reads() -> None:
    shape = engine.shape_of(
        config_of(
            layer_types=["sliding_attention", "full_attention"], sliding_window=1024, head_dim=64
        ),
        1000,
    )
    page = 16 * 2 * 8 * 64 * 2
    assert shape.page_bytes == page
    # The window, less one, and a pass of 4096: 5119 tokens, 320 blocks and one that it begins in.
    assert shape.request_bytes(100_000) == (321 + 6250) * page
    assert shape.read_bytes(100_000) == (1024 + 100_000) * page // 16
    assert shape.read_bytes(10) == 20 * page // 16


def test_a_configuration_is_read_as_transformers_writes_it() -> None:
    assert engine.shape_of(config_of(), 8_030_261_248) == LLAMA
    plain = engine.shape_of(config_of(num_key_value_heads=None, intermediate_size=None), 1)
    assert (plain.kv_heads, plain.intermediate_size) == (32, 16_384)
    assert engine.shape_of(config_of(sliding_window=4096), 1).windows == (4096,) * 32
    shared = config_of(layer_types=["full_attention"] * 4, num_kv_shared_layers=1)
    assert engine.shape_of(shared, 1).windows == (None,) * 3


@pytest.mark.parametrize(
    "fields", [{"kv_lora_rank": 512}, {"layer_types": ["linear_attention", "full_attention"]}]
)
def test_other_caches_are_not_modelled(fields: dict[str, Any]) -> None:
    with pytest.raises(NotVirtual, match="not modelled"):
        engine.shape_of(config_of(**fields), 1)


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"num_key_value_heads": None}, 32),
        ({"num_key_value_heads": 2}, 2),
        ({"num_key_value_heads": None, "multi_query": True}, 1),
        (
            {
                "num_key_value_heads": None,
                "multi_query": True,
                "new_decoder_architecture": True,
                "num_kv_heads": 4,
            },
            4,
        ),
        (
            {
                "num_key_value_heads": None,
                "attn_config": types.SimpleNamespace(kv_n_heads=2),
            },
            2,
        ),
    ],
)
def test_heads_of_the_cache_have_several_names(changes: dict[str, Any], kv_heads: int) -> None:
    assert engine.shape_of(config_of(**changes), 1000).kv_heads == kv_heads


def test_a_token_passes_the_experts_that_are_chosen() -> None:
    assert engine.shape_of(config_of(), 1000).active_ratio == 1.0
    mixture = config_of(num_experts=64, num_experts_per_tok=8)
    assert engine.shape_of(mixture, 1000).active_ratio == 0.125


def test_a_configuration_that_is_not_understood_is_refused() -> None:
    with pytest.raises(NotVirtual, match="is not understood"):
        engine.shape_of(config_of(intermediate_size=[64, 128]), 1000)
    with pytest.raises(NotVirtual, match="is not understood"):
        engine.shape_of(config_of(num_attention_heads=None), 1000)
