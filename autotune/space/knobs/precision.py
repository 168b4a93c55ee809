"""Knobs that decide what is learnt: adapters, quantisation, dtype, optimizer."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, IntRange, PowerOfTwo, Value
from autotune.space.knob import Candidate, Knob, add, at_least
from autotune.space.knobs.packages import missing

_ADAPTATIONS: dict[str, dict[str, Any]] = {
    "full": {"use_peft": False, "load_in_8bit": False, "load_in_4bit": False},
    "lora": {"use_peft": True, "load_in_8bit": False, "load_in_4bit": False},
    "lora_8bit": {"use_peft": True, "load_in_8bit": True, "load_in_4bit": False},
    "lora_4bit": {
        "use_peft": True,
        "load_in_8bit": False,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": False,
    },
    "lora_4bit_nested": {
        "use_peft": True,
        "load_in_8bit": False,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": True,
    },
}

_ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
# Attention of these models is fused or named otherwise: the list above would match nothing, which
# raises, or only a part, which would not be what was asked for.
_OTHER_NAMES = frozenset(
    {
        "bloom", "codegen", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
        "mpt", "opt", "phi3",
    }
)  # fmt: skip
# peft 0.21 knows which modules to adapt for these; for any other model type it raises.
_PEFT_KNOWS = frozenset(
    {
        "bloom", "btlm", "chatglm", "codegen", "falcon", "gemma", "gemma2", "gemma3_text",
        "gemma4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "llama", "llama4",
        "mistral", "mixtral", "mpt", "nemotron_h", "opt", "phi", "qwen2", "qwen3", "rwkv",
        "rwkv7", "stablelm",
    }
)  # fmt: skip


def context_keys(context: Context) -> dict[str, Any]:
    """Return the TRL keys that the device decides: mixed precision.

    TRL turns bfloat16 autocast on unless it is told otherwise, and then raises where the device
    has no bfloat16.
    """
    if context.device.supports_bf16:
        return {"bf16": True}
    # Accepted elsewhere, fp16 has no effect on a CPU and no gradient scaler on mps.
    return {"bf16": False, "fp16": True} if context.device.kind == "cuda" else {"bf16": False}


def _refuse_adaptation(value: Value, candidate: Candidate, context: Context) -> str | None:
    name = str(value)
    if name == "full":
        if context.model.quantized:
            return "the checkpoint is quantised, and quantised weights need adapters"
        return None
    if reason := missing(context, "peft"):
        return reason
    if name == "lora":
        return None
    if context.model.quantized:
        return "the checkpoint is already quantised"
    return missing(context, "bitsandbytes")


def adapts(candidate: Candidate) -> bool:
    """Whether the candidate trains adapters; TRL's default is to train all weights."""
    return candidate.get("adaptation", "full") != "full"


def _needs_adapters(candidate: Candidate, context: Context) -> str | None:
    return None if adapts(candidate) else "it needs adapters, and adaptation is full"


def _write_rank(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    assert isinstance(value, int)
    # The update is scaled by alpha / r. Keeping TRL's own ratio, 32 / 16, lets a learning rate
    # carry over from one rank to the next.
    return {"lora_r": value, "lora_alpha": 2 * value}


def _write_targets(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    if value == "default":
        return {}
    modules = list(_ATTENTION_MODULES) if value == "attention" else "all-linear"
    return {"lora_target_modules": modules}


def _refuse_targets(value: Value, candidate: Candidate, context: Context) -> str | None:
    model_type = context.model.model_type
    if value == "attention" and model_type in _OTHER_NAMES:
        names = ", ".join(_ATTENTION_MODULES)
        return f"the attention layers of {model_type} are not called {names}"
    if value == "default" and model_type not in _PEFT_KNOWS:
        return f"peft has no default for {model_type} and raises"
    return None


def _refuse_dtype(value: Value, candidate: Candidate, context: Context) -> str | None:
    if value == "bfloat16" and not context.device.supports_bf16:
        return f"{context.device.label} does not support bfloat16"
    return None


def _refuse_optim(value: Value, candidate: Candidate, context: Context) -> str | None:
    return missing(context, "bitsandbytes") if str(value).endswith("_8bit") else None


def _optim_no_effect(value: Value, candidate: Candidate, context: Context) -> str | None:
    if str(value).startswith("paged_") and context.device.kind == "cpu":
        return "its paging has no effect on a CPU, where it is the same as the optimizer without"
    return None


ADAPTATION = add(
    Knob(
        name="adaptation",
        baseline="full",
        changes="method",
        help=(
            "What is trained: all weights (full), or adapters (lora) on weights kept as they are,"
            " in 8 bits, in 4 bits, or in 4 bits with quantised scales (nested)."
        ),
        domain=Choice(tuple(_ADAPTATIONS)),
        keys=(
            "use_peft",
            "load_in_8bit",
            "load_in_4bit",
            "bnb_4bit_quant_type",
            "use_bnb_nested_quant",
            "model_init_kwargs.quantization_config",
        ),
        write=lambda value, candidate, context: dict(_ADAPTATIONS[str(value)]),
        refuse=_refuse_adaptation,
    )
)

LORA_R = add(
    Knob(
        name="lora_r",
        baseline=16,
        changes="method",
        help="Rank of the adapters. lora_alpha follows as twice the rank, TRL's own ratio.",
        domain=PowerOfTwo(8, 64),
        accepts=IntRange(1, 4096),
        keys=("lora_r", "lora_alpha"),
        depends_on=("adaptation",),
        write=_write_rank,
        active_if=_needs_adapters,
        memory_at_least=at_least,
    )
)

LORA_TARGETS = add(
    Knob(
        name="lora_target_modules",
        baseline="default",
        changes="method",
        help=(
            "Which layers get adapters: peft's default for the architecture, the four attention"
            " projections, or all linear layers but the output head."
        ),
        domain=Choice(("default", "attention", "all-linear")),
        keys=("lora_target_modules", "lora_target_parameters"),
        depends_on=("adaptation",),
        write=_write_targets,
        active_if=_needs_adapters,
        refuse=_refuse_targets,
    )
)

DTYPE = add(
    Knob(
        name="dtype",
        baseline="float32",
        changes="method",
        help=(
            "How weights are stored, and with them gradients and optimizer state. With 4-bit"
            " weights, also what they are computed in."
        ),
        domain=Choice(("float32", "bfloat16")),
        keys=("dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"),
        refuse=_refuse_dtype,
    )
)

OPTIM = add(
    Knob(
        name="optim",
        baseline="adamw_torch_fused",
        changes={"adamw_torch_fused": "nothing", "adamw_torch": "nothing"},
        help=(
            "The optimizer. The 8-bit ones hold 2 instead of 8 bytes of state per weight"
            " (embeddings stay at 8), paged ones move state to the host under pressure, adafactor"
            " holds next to none; all of these change what is learnt."
        ),
        domain=Choice(
            (
                "adamw_torch_fused",
                "adamw_torch",
                "adamw_8bit",
                "paged_adamw_8bit",
                "adafactor",
            )
        ),
        refuse=_refuse_optim,
        no_effect=_optim_no_effect,
    )
)
