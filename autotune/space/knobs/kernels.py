"""Knobs that choose the code that computes: attention, hub kernels, compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, Value
from autotune.space.knob import Candidate, Knob, add, loads_alike
from autotune.space.knobs.packages import missing

# What transformers 5.24 accepts; a later range is read as unsupported by the probe.
_KERNELS = ("kernels>=0.18.2,<0.19",)
_ATTENTION_NEEDS: Mapping[Value, tuple[str, ...]] = {
    "flash_attention_2": ("flash-attn>=2.3.3",),
    "flash_attention_3": ("flash-attn-3",),
    "kernels-community/flash-attn2": _KERNELS,
    "kernels-community/vllm-flash-attn3": _KERNELS,
}
_HUB_PREFIX = "kernels-community/"
_HUB_ONLY = "its code is fetched from the Hub, and predicted memory is flash_attention_2's"


def _refuse_attention(value: Value, candidate: Candidate, context: Context) -> str | None:
    name, device = str(value), context.device
    if name in ("sdpa", "eager"):
        return None
    if device.kind != "cuda":
        return f"it needs a CUDA device, and this is {device.kind}"
    if device.is_virtual:
        # What is installed here says nothing of the machine that has the card.
        reason = _HUB_ONLY if name.startswith(_HUB_PREFIX) else None
    else:
        reason = missing(context, _ATTENTION_NEEDS[name])
    if reason or device.capability is None:
        return reason
    shown = ".".join(str(number) for number in device.capability)
    if name.endswith(("attention_3", "attn3")):
        if device.capability[0] != 9:
            return f"FlashAttention 3 is built for compute capability 9.0, and this is {shown}"
    elif device.capability < (8, 0):
        return f"FlashAttention needs compute capability 8.0, and this is {shown}"
    return None


def _refuse_kernels(value: Value, candidate: Candidate, context: Context) -> str | None:
    if value == "on" and context.device.is_virtual:
        return "which kernels the Hub has for a card is known on that card only"
    return missing(context, _KERNELS) if value == "on" else None


ATTENTION = add(
    Knob(
        name="attn_implementation",
        baseline="sdpa",
        changes="nothing",
        help=(
            "The attention code. sdpa is PyTorch's; on flattened batches it builds a mask of T x T"
            " bytes, T being all tokens of the batch, which the flash variants do not. eager"
            " materialises all attention weights. kernels-community/* are fetched from the Hub."
        ),
        domain=Choice(
            (
                "sdpa",
                "eager",
                "flash_attention_2",
                "flash_attention_3",
                "kernels-community/flash-attn2",
                "kernels-community/vllm-flash-attn3",
            )
        ),
        keys=("attn_implementation", "model_init_kwargs.attn_implementation"),
        refuse=_refuse_attention,
        needs=_ATTENTION_NEEDS,
        loads_at_least=loads_alike,
    )
)

USE_KERNELS = add(
    Knob(
        name="use_kernels",
        baseline="off",
        changes="nothing",
        help=(
            "Replaces layers with kernels from the Hub where one exists for the device. Needs the"
            " package kernels and a download."
        ),
        domain=Choice(("off", "on")),
        keys=("model_init_kwargs.use_kernels",),
        write=lambda value, candidate, context: (
            {"model_init_kwargs": {"use_kernels": True}} if value == "on" else {}
        ),
        refuse=_refuse_kernels,
        needs={"on": _KERNELS},
    )
)


def _refuse_compile(value: Value, candidate: Candidate, context: Context) -> str | None:
    if value == "on" and context.device.is_virtual:
        return "compiled code can't be run on a card that is not there"
    return None


def _write_compile(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    return {"torch_compile": value == "on"}


TORCH_COMPILE = add(
    Knob(
        name="torch_compile",
        baseline="off",
        changes="nothing",
        help=(
            "Compiles the model with torch.compile. The first step takes tens of seconds and more,"
            " so that a short probe says little of its rate; raise the time limit with it."
        ),
        domain=Choice(("off", "on")),
        # A backend or mode turns compilation on by itself.
        keys=("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        write=_write_compile,
        refuse=_refuse_compile,
    )
)
