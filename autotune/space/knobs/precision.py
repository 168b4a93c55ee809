"""Knobs that decide what is learnt: adapters, quantisation, dtype, optimizer."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, IntRange, PowerOfTwo, Value
from autotune.space.knob import (
    LEAST,
    Candidate,
    Fidelity,
    Knob,
    Refusal,
    add,
    at_least,
    loads_alike,
)
from autotune.space.knobs.packages import missing
from autotune.space.weights import excess, remedies, smallest_dtype

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

_PEFT = ("peft",)
_BITSANDBYTES = ("bitsandbytes",)
_ADAPTATION_NEEDS: dict[Value, tuple[str, ...]] = {
    name: (*_PEFT, *_BITSANDBYTES) if keys["load_in_8bit"] or keys["load_in_4bit"] else _PEFT
    for name, keys in _ADAPTATIONS.items()
    if keys["use_peft"]
}
_OPTIM_NEEDS: dict[Value, tuple[str, ...]] = {
    "adamw_8bit": _BITSANDBYTES,
    "paged_adamw_8bit": _BITSANDBYTES,
}
_LARGEST_RANK = 64
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
    return {"bf16": False, "fp16": True} if context.device.trains_in_fp16 else {"bf16": False}


def _refuse_adaptation(value: Value, candidate: Candidate, context: Context) -> str | None:
    name = str(value)
    if name == "full":
        if context.model.quantized:
            return "the checkpoint is quantised, and quantised weights need adapters"
        return _too_large(name, context)
    if reason := missing(context, _PEFT):
        return reason
    if name != "lora" and context.model.quantized:
        return "the checkpoint is already quantised"
    if name != "lora" and not context.device.supports_bf16 and context.device.trains_in_fp16:
        # sft_trainer.py in TRL; PyTorch's issue 127176.
        return Refusal(
            f"{context.device.label} trains with fp16, and TRL gives quantised models adapters in"
            " bfloat16, whose gradients PyTorch's scaler refuses",
            remedies=remedies(context),
        )
    if reason := missing(context, _ADAPTATION_NEEDS[name]):
        return Refusal(reason, remedies=remedies(context))
    return _too_large(name, context)


def _too_large(adaptation: str, context: Context) -> Refusal | None:
    """Return why no dtype makes the weights small enough for the budget; None if one may."""
    return excess(context, adaptation, smallest_dtype(context, adaptation))


def _loads_adaptation(
    larger: Value, smaller: Value, candidate: Candidate, context: Context
) -> bool:
    # Adapters come on top of the same weights. Training all of them needs their gradients in
    # place of adapters, which are smaller.
    unquantised = ("full", "lora")
    return larger == smaller or (larger in unquantised and smaller in unquantised)


def _loads_rank(larger: Value, smaller: Value, candidate: Candidate, context: Context) -> bool:
    if larger is None:  # no adapters; gradients outweigh those of any rank that is searched
        return isinstance(smaller, int) and smaller <= _LARGEST_RANK
    return smaller is None or at_least(larger, smaller, candidate, context)


def _loads_targets(larger: Value, smaller: Value, candidate: Candidate, context: Context) -> bool:
    # all-linear takes in every layer that the others choose from.
    return larger is None or smaller is None or larger == "all-linear"


def _loads_dtype(larger: Value, smaller: Value, candidate: Candidate, context: Context) -> bool:
    # Beside quantised weights the others are cast on the way, which may take both copies.
    return larger == "float32" and candidate.get("adaptation", "full") in ("full", "lora")


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
    if value == "float16":
        reason = _refuse_float16(candidate, context)
        if reason is not None:
            return reason
    return excess(context, str(candidate.get("adaptation", "full")), str(value))


def _refuse_float16(candidate: Candidate, context: Context) -> str | None:
    device = context.device
    if device.supports_bf16:
        return (
            f"{device.label} supports bfloat16, which takes the same memory and needs no scaling"
            " of the loss"
        )
    if not device.trains_in_fp16:
        return f"training in float16 needs a CUDA device, and this is {device.kind}"
    if not adapts(candidate):
        return "PyTorch's gradient scaler refuses gradients in float16, which adaptation=full has"
    return missing(context, _PEFT)


def _refuse_optim(value: Value, candidate: Candidate, context: Context) -> str | None:
    return missing(context, _OPTIM_NEEDS.get(value, ()))


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
        needs=_ADAPTATION_NEEDS,
        loads_at_least=_loads_adaptation,
        leanest=("lora_4bit_nested", "lora_4bit", "lora_8bit", "lora"),
        fidelity=Fidelity(order=tuple(_ADAPTATIONS), weight=40),
    )
)

LORA_R = add(
    Knob(
        name="lora_r",
        baseline=16,
        changes="method",
        help="Rank of the adapters. lora_alpha follows as twice the rank, TRL's own ratio.",
        domain=PowerOfTwo(8, _LARGEST_RANK),
        accepts=IntRange(1, 4096),
        keys=("lora_r", "lora_alpha"),
        depends_on=("adaptation",),
        write=_write_rank,
        active_if=_needs_adapters,
        memory_at_least=at_least,
        loads_at_least=_loads_rank,
        leanest=LEAST,
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
        loads_at_least=_loads_targets,
        leanest=("default", "attention"),
    )
)

DTYPE = add(
    Knob(
        name="dtype",
        baseline="float32",
        changes="method",
        help=(
            "How weights are stored, and with them gradients and optimizer state. With 4-bit"
            " weights, also what they are computed in. float16 is for adapters on CUDA devices"
            " without bfloat16."
        ),
        domain=Choice(("float32", "bfloat16", "float16")),
        keys=("dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"),
        depends_on=("adaptation",),
        # Where a space is silent and TRL's float32 is too large, the search goes on with less.
        always=True,
        refuse=_refuse_dtype,
        loads_at_least=_loads_dtype,
        leanest=("bfloat16", "float16"),
        fidelity=Fidelity(order=("float32", ("bfloat16", "float16")), weight=30),
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
        needs=_OPTIM_NEEDS,
        no_effect=_optim_no_effect,
        # Optimizers make their states in the first step.
        loads_at_least=loads_alike,
        leanest=("adamw_8bit", "paged_adamw_8bit", "adafactor"),
        fidelity=Fidelity(
            order=(
                ("adamw_torch_fused", "adamw_torch"),
                ("adamw_8bit", "paged_adamw_8bit"),
                "adafactor",
            ),
            weight=20,
        ),
    )
)
