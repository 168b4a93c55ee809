"""Each rule of each built-in knob, one by one."""

from __future__ import annotations

from typing import Any

import pytest
from knob_kit import inactive, packages, refusal, written

from autotune.errors import SpaceError
from autotune.space.domains import Choice, IntRange
from autotune.space.knob import Knob, registry
from autotune.testing.contexts import (
    make_context,
    make_cpu,
    make_gpu,
    make_model,
    make_profile,
)

# -- batching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padding_free", "bfd", "bfd_split"])
@pytest.mark.parametrize("model_type", ["opt", "bloom", "mpt"])
def test_models_without_position_masks_are_not_flattened(layout: str, model_type: str) -> None:
    context = make_context(model=make_model(model_type=model_type, keeps_documents_apart={}))
    assert "attend to each other" in str(refusal("batching", layout, context))
    assert refusal("batching", "padded", context) is None
    assert refusal("batching", "wrapped", context) is None


@pytest.mark.parametrize("layout", ["padding_free", "bfd", "bfd_split"])
def test_a_failed_document_test_counts_for_its_attention_only(layout: str) -> None:
    apart = {"sdpa": False, "eager": True}
    context = make_context(model=make_model(keeps_documents_apart=apart))
    assert refusal("batching", layout, context)  # sdpa is TRL's default
    assert refusal("batching", layout, context, attn_implementation="sdpa")
    assert refusal("batching", layout, context, attn_implementation="eager") is None
    assert refusal("batching", layout, context, attn_implementation="flash_attention_2") is None
    assert refusal("batching", "padded", context) is None


def test_padding_free_cannot_exceed_the_positions() -> None:
    context = make_context(model=make_model(max_positions=2048))
    assert "3000 tokens" in str(refusal("batching", "padding_free", context))
    assert refusal("batching", "bfd", context) is None


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("padded", {"packing": False, "padding_free": False}),
        ("padding_free", {"packing": False, "padding_free": True, "max_length": None}),
        ("bfd", {"packing": True, "packing_strategy": "bfd", "padding_free": True}),
        ("bfd_split", {"packing": True, "packing_strategy": "bfd_split", "padding_free": True}),
        ("wrapped", {"packing": True, "packing_strategy": "wrapped", "padding_free": False}),
    ],
)
def test_batching_writes(layout: str, keys: dict[str, Any]) -> None:
    assert written("batching", layout) == keys


def test_wrapped_says_that_documents_mix() -> None:
    assert "documents deliberately attend to each other" in registry.get("batching").help


# -- max_length ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "positions", "expected"),
    [
        # 0.5, 0.75, 0.9, 0.95 and 1.0 of ten rows; TRL's 1024 lies below the longest.
        (
            (100, 200, 300, 400, 500, 700, 900, 1500, 1900, 3000),
            None,
            (512, 1024, 1536, 2048, 3072),
        ),
        # Everything fits below TRL's default: one length that is enough, and the default.
        ((100, 200, 300, 690, 700), None, (320, 768, 1024)),
        ((40,), None, (40, 1024)),
        # Capped by the model; TRL's default stays, the rules decide on it.
        ((100, 700), 512, (112, 512, 1024)),
        ((5000, 6000), 4096, (1024, 4096)),
    ],
)
def test_default_lengths(
    lengths: tuple[int, ...], positions: int | None, expected: tuple[int, ...]
) -> None:
    context = make_context(lengths=lengths, model=make_model(max_positions=positions))
    assert registry.get("max_length").values(context) == expected


def test_at_most_one_default_length_beyond_the_longest_row_and_trl_s() -> None:
    for longest in range(8, 3000, 37):
        context = make_context(lengths=(longest // 2 + 1, longest))
        values = registry.get("max_length").values(context)
        assert sum(value >= longest and value != 1024 for value in values) <= 1
        assert 1024 in values


def test_coverage_bounds_only_layouts_that_cut() -> None:
    context = make_context(min_coverage=0.9)
    reason = str(refusal("max_length", 512, context, batching="padded"))
    assert "less than the 90% of --min-coverage" in reason
    assert refusal("max_length", 512, context, batching="bfd")
    assert refusal("max_length", 512, context, batching="bfd_split") is None
    assert refusal("max_length", 512, context, batching="wrapped") is None
    assert "keeps 89.97% of" in str(refusal("max_length", 2048, context, batching="padded"))
    assert refusal("max_length", 2560, context, batching="padded") is None
    assert refusal("max_length", 512) is None


def test_lengths_below_the_table_are_refused_not_guessed() -> None:
    assert "no coverage is known" in str(refusal("max_length", 4, batching="padded"))
    assert refusal("max_length", 4, batching="wrapped") is None


def test_positions_bound_what_rows_can_reach() -> None:
    short = make_context(lengths=(100, 300), model=make_model(max_positions=512))
    assert refusal("max_length", 1024, short) is None  # no row gets there
    assert refusal("max_length", 1024, short, batching="bfd") is None  # positions start anew
    assert refusal("max_length", 1024, short, batching="wrapped")
    long = make_context(lengths=(100, 3000), model=make_model(max_positions=512))
    assert "512 positions" in str(refusal("max_length", 1024, long))


def test_max_length_is_inactive_without_truncation() -> None:
    assert "max_length: null" in str(inactive("max_length", batching="padding_free"))
    assert inactive("max_length", batching="bfd") is None
    assert inactive("max_length") is None


# -- padding and micro-batch ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padding_free", "bfd", "bfd_split", "wrapped"])
def test_padding_needs_a_padded_batch(layout: str) -> None:
    assert layout in str(inactive("pad_to_multiple_of", batching=layout))
    assert inactive("pad_to_multiple_of", batching="padded") is None


def test_padding_is_written_out() -> None:
    assert written("pad_to_multiple_of", "none") == {"pad_to_multiple_of": None}
    assert written("pad_to_multiple_of", 64) == {"pad_to_multiple_of": 64}


@pytest.mark.parametrize(
    ("global_batch", "num_processes", "value", "steps"),
    [(16, 1, 8, 2), (16, 1, 16, 1), (16, 4, 4, 1), (16, 4, 1, 4), (12, 1, 4, 3)],
)
def test_accumulation_follows(
    global_batch: int, num_processes: int, value: int, steps: int
) -> None:
    context = make_context(global_batch=global_batch, num_processes=num_processes)
    assert refusal("per_device_train_batch_size", value, context) is None
    assert written("per_device_train_batch_size", value, context) == {
        "per_device_train_batch_size": value,
        "gradient_accumulation_steps": steps,
    }


@pytest.mark.parametrize(
    ("global_batch", "num_processes", "value"), [(16, 1, 3), (16, 1, 32), (16, 4, 8), (15, 2, 1)]
)
def test_micro_batches_must_add_up(global_batch: int, num_processes: int, value: int) -> None:
    context = make_context(global_batch=global_batch, num_processes=num_processes)
    assert "do not add up" in str(refusal("per_device_train_batch_size", value, context))


# -- attention and kernels -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "device", "installed", "reason"),
    [
        ("sdpa", make_cpu(), {}, None),
        ("eager", make_cpu(), {}, None),
        ("flash_attention_2", make_cpu(), {"flash_attn": "2.8.3"}, "CUDA device"),
        ("flash_attention_2", make_gpu(), {}, "flash-attn>=2.3.3 is not installed"),
        ("flash_attention_2", make_gpu(), {"flash_attn": "2.2.0"}, "but 2.2.0 is installed"),
        ("flash_attention_2", make_gpu(), {"flash_attn": "2.8.3"}, None),
        ("flash_attention_2", make_gpu(capability=(7, 5)), {"flash_attn": "2.8.3"}, "7.5"),
        ("flash_attention_2", make_gpu(capability=(8, 0)), {"flash_attn": "2.8.3"}, None),
        ("flash_attention_3", make_gpu(), {"flash_attn": "2.8.3"}, "flash-attn-3"),
        ("flash_attention_3", make_gpu(), {"flash_attn_3": "3.0.0"}, None),
        ("flash_attention_3", make_gpu(capability=(8, 0)), {"flash_attn_3": "3.0.0"}, "9.0"),
        ("kernels-community/flash-attn2", make_gpu(), {}, "kernels>=0.18.2,<0.19"),
        ("kernels-community/flash-attn2", make_gpu(), {"kernels": "0.19.1"}, "0.19.1"),
        ("kernels-community/flash-attn2", make_gpu(), {"kernels": "0.18.2"}, None),
        ("kernels-community/flash-attn2", make_cpu(), {"kernels": "0.18.2"}, "CUDA device"),
        (
            "kernels-community/vllm-flash-attn3",
            make_gpu(capability=(8, 6)),
            {"kernels": "0.18.5"},
            "9.0",
        ),
    ],
)
def test_attention(value: str, device: Any, installed: dict[str, str], reason: str | None) -> None:
    context = make_context(device=device, packages=packages(**installed))
    found = refusal("attn_implementation", value, context)
    assert (found is None) if reason is None else (reason in str(found))


def test_package_names_are_normalised() -> None:
    context = make_context(device=make_gpu(), packages={"Flash_Attn": "2.8.3.post1"})
    assert refusal("attn_implementation", "flash_attention_2", context) is None


def test_hub_kernels() -> None:
    assert refusal("use_kernels", "off") is None
    assert "kernels" in str(refusal("use_kernels", "on"))
    context = make_context(packages=packages(kernels="0.18.3"))
    assert refusal("use_kernels", "on", context) is None
    assert written("use_kernels", "on") == {"model_init_kwargs": {"use_kernels": True}}
    assert written("use_kernels", "off") == {}


def test_compile_is_written_out() -> None:
    assert written("torch_compile", "off") == {"torch_compile": False}
    assert written("torch_compile", "on") == {"torch_compile": True}


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("none", {"gradient_checkpointing": False}),
        ("full", {"gradient_checkpointing": True}),
        (
            "full_reentrant",
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
        ),
        (
            "selective",
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
        ),
        (
            "every_4_layers",
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"every_n_layers": 4},
            },
        ),
    ],
)
def test_checkpointing_writes(value: str, keys: dict[str, Any]) -> None:
    first, second = written("checkpointing", value), written("checkpointing", value)
    assert first == keys
    for key in first:
        if isinstance(first[key], dict):
            assert first[key] is not second[key]


@pytest.mark.parametrize("adaptation", ["lora", "lora_8bit", "lora_4bit", "lora_4bit_nested"])
def test_selective_raises_with_adapters(adaptation: str) -> None:
    assert "adapters" in str(refusal("checkpointing", "selective", adaptation=adaptation))
    assert refusal("checkpointing", "full", adaptation=adaptation) is None


def test_selective_has_no_effect_with_eager_attention() -> None:
    assert refusal("checkpointing", "selective", attn_implementation="eager")
    assert refusal("checkpointing", "selective", attn_implementation="sdpa") is None
    assert refusal("checkpointing", "selective") is None


@pytest.mark.parametrize(
    ("value", "layers", "legal"),
    [
        ("every_2_layers", 2, False),
        ("every_2_layers", 3, True),
        ("every_4_layers", 4, False),
        ("every_4_layers", 5, True),
        ("every_4_layers", None, True),
    ],
)
def test_every_n_needs_more_layers(value: str, layers: int | None, legal: bool) -> None:
    context = make_context(model=make_model(num_layers=layers))
    assert (refusal("checkpointing", value, context) is None) is legal


@pytest.mark.parametrize(
    ("name", "kind", "active"),
    [
        ("activation_offloading", "cpu", False),
        ("activation_offloading", "mps", False),
        ("activation_offloading", "cuda", True),
        ("activation_offloading", "xpu", True),
        ("allocator", "cpu", False),
        ("allocator", "mps", False),
        ("allocator", "cuda", True),
        ("torch_empty_cache_steps", "cpu", False),
        ("torch_empty_cache_steps", "mps", True),
    ],
)
def test_device_knobs(name: str, kind: str, active: bool) -> None:
    context = make_context(device=make_cpu(kind=kind))
    assert (inactive(name, context) is None) is active


def test_what_a_prediction_does_not_model_is_not_searched_on_a_virtual_card() -> None:
    card = make_context(device=make_gpu(name="virtual:a100-40gb"))
    assert card.device.is_virtual
    assert "no effect on what is predicted" in str(inactive("torch_empty_cache_steps", card))
    assert inactive("torch_empty_cache_steps", make_context(device=make_gpu())) is None


def test_device_knobs_write() -> None:
    assert written("activation_offloading", "on") == {"activation_offloading": True}
    assert written("activation_offloading", "off") == {"activation_offloading": False}
    setting = "expandable_segments:True"
    assert written("allocator", "expandable_segments") == {
        "env": {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}
    }
    assert written("allocator", "default") == {}
    assert written("torch_empty_cache_steps", "none") == {"torch_empty_cache_steps": None}
    assert written("torch_empty_cache_steps", 4) == {"torch_empty_cache_steps": 4}


# -- Knob itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "no name"},
        {"changes": "everything"},
        {"changes": {"a": "everything"}},
        {"domain": None},
        {"domain": None, "default_values": lambda context, quantiles: (1,)},
        {"accepts": IntRange(1, 2)},
    ],
)
def test_bad_knobs_raise(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "name": "mine",
        "domain": Choice(("a", "b")),
        "baseline": "a",
        "changes": "nothing",
        "help": "Mine.",
    }
    assert Knob(**values).keys == ("mine",)
    with pytest.raises(SpaceError):
        Knob(**{**values, **changes})


def test_profile_of_the_test_kit() -> None:
    profile = make_profile((10, 20, 40))
    assert profile.coverage(16) == (10 + 16 + 16) / 70
    assert profile.coverage(40) == 1.0
