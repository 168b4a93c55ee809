"""Each rule of the knobs of precision: what is trained, dtypes, optimizers."""

from __future__ import annotations

from typing import Any

import pytest
from knob_kit import CPU, GPU, inactive, refusal, written

from autotune.space.knob import registry
from autotune.space.knobs.precision import context_keys
from autotune.testing.contexts import (
    PACKAGES,
    make_context,
    make_cpu,
    make_gpu,
    make_model,
)


@pytest.mark.parametrize(
    ("value", "missing", "quantized", "reason"),
    [
        ("full", (), False, None),
        ("full", ("peft", "bitsandbytes"), False, None),
        ("full", (), True, "need adapters"),
        ("lora", (), False, None),
        ("lora", (), True, None),
        ("lora", ("peft",), False, "peft"),
        ("lora", ("bitsandbytes",), False, None),
        ("lora_8bit", (), False, None),
        ("lora_8bit", ("bitsandbytes",), False, "bitsandbytes"),
        ("lora_4bit", ("bitsandbytes",), False, "bitsandbytes"),
        ("lora_4bit_nested", ("peft",), False, "peft"),
        ("lora_4bit", (), True, "already quantised"),
    ],
)
def test_adaptation(
    value: str, missing: tuple[str, ...], quantized: bool, reason: str | None
) -> None:
    left = {name: text for name, text in PACKAGES.items() if name not in missing}
    context = make_context(packages=left, model=make_model(quantized=quantized))
    found = refusal("adaptation", value, context)
    assert (found is None) if reason is None else (reason in str(found))


def test_adaptation_writes() -> None:
    keys = written("adaptation", "lora_4bit_nested")
    assert keys == {
        "use_peft": True,
        "load_in_8bit": False,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": True,
    }
    assert not any(written("adaptation", "full").values())


@pytest.mark.parametrize("name", ["lora_r", "lora_target_modules"])
def test_adapter_knobs_need_adapters(name: str) -> None:
    assert "adaptation is full" in str(inactive(name, adaptation="full"))
    assert "adaptation is full" in str(inactive(name))
    assert inactive(name, adaptation="lora_4bit") is None


def test_alpha_follows_the_rank() -> None:
    assert written("lora_r", 32) == {"lora_r": 32, "lora_alpha": 64}


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("default", {}),
        ("attention", {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
        ("all-linear", {"lora_target_modules": "all-linear"}),
    ],
)
def test_target_modules_write(value: str, keys: dict[str, Any]) -> None:
    assert written("lora_target_modules", value) == keys


@pytest.mark.parametrize(
    ("model_type", "refused"),
    [
        ("llama", set()),
        ("gpt2", {"attention"}),
        ("olmo9", {"default"}),
        ("phi3", {"default", "attention"}),
    ],
)
def test_target_modules_need_layers_of_that_name(model_type: str, refused: set[str]) -> None:
    context = make_context(model=make_model(model_type=model_type))
    values = registry.get("lora_target_modules").accepted.values
    assert {v for v in values if refusal("lora_target_modules", v, context)} == refused


def test_bfloat16_needs_the_device() -> None:
    old = make_context(device=make_gpu(supports_bf16=False, label="Old GPU"))
    assert "Old GPU does not support bfloat16" in str(refusal("dtype", "bfloat16", old))
    assert refusal("dtype", "float32", old) is None
    assert refusal("dtype", "bfloat16", GPU) is None


OLD_GPU = make_gpu(supports_bf16=False, label="Old GPU", capability=(7, 5))


@pytest.mark.parametrize(
    ("device", "adaptation", "reason"),
    [
        (OLD_GPU, "lora", None),
        (OLD_GPU, "lora_8bit", None),
        (OLD_GPU, "lora_4bit_nested", None),
        (OLD_GPU, "full", "gradient scaler refuses"),
        (make_gpu(name="virtual:t4", supports_bf16=False), "lora", None),
        (make_gpu(), "lora", "supports bfloat16"),
        (make_cpu(), "lora", "supports bfloat16"),
        (make_cpu(supports_bf16=False), "lora", "needs a CUDA device"),
        (make_cpu(kind="mps", supports_bf16=False), "lora", "this is mps"),
    ],
)
def test_float16_weights_are_for_adapters_where_there_is_no_bfloat16(
    device: Any, adaptation: str, reason: str | None
) -> None:
    found = refusal("dtype", "float16", make_context(device=device), adaptation=adaptation)
    assert (found is None) if reason is None else (reason in str(found))


def test_float16_weights_are_never_drawn_for_full_training() -> None:
    context = make_context(device=OLD_GPU)
    assert "gradient scaler" in str(refusal("dtype", "float16", context))  # TRL's default
    assert "peft" in str(
        refusal("dtype", "float16", make_context(device=OLD_GPU, packages={}), adaptation="lora")
    )


@pytest.mark.parametrize(
    ("device", "keys"),
    [
        (make_gpu(), {"bf16": True}),
        (make_cpu(), {"bf16": True}),
        (make_gpu(supports_bf16=False), {"bf16": False, "fp16": True}),
        (make_cpu(supports_bf16=False), {"bf16": False}),
        (make_cpu(kind="mps", supports_bf16=False), {"bf16": False}),
    ],
)
def test_mixed_precision_follows_the_device(device: Any, keys: dict[str, Any]) -> None:
    assert context_keys(make_context(device=device)) == keys


@pytest.mark.parametrize("value", ["adamw_8bit", "paged_adamw_8bit"])
def test_8bit_optimizers_need_bitsandbytes(value: str) -> None:
    bare = make_context(packages={})
    assert "bitsandbytes" in str(refusal("optim", value, bare))
    assert refusal("optim", value) is None
    assert refusal("optim", "adafactor", bare) is None


def test_paging_has_no_effect_on_a_cpu() -> None:
    no_effect = registry.get("optim").no_effect
    assert no_effect
    assert "no effect on a CPU" in str(no_effect("paged_adamw_8bit", {}, CPU))
    assert no_effect("paged_adamw_8bit", {}, GPU) is None
    assert no_effect("adamw_8bit", {}, CPU) is None


@pytest.mark.parametrize(
    ("value", "change"),
    [("adamw_torch", "nothing"), ("adamw_8bit", "method"), ("adafactor", "method")],
)
def test_optimizers_differ_in_what_they_change(value: str, change: str) -> None:
    assert registry.get("optim").change(value) == change
