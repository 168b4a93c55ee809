"""Knobs that trade memory for time and change nothing that is learnt."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, Value
from autotune.space.knob import Candidate, Knob, add, loads_alike
from autotune.space.knobs.precision import adapts

_EVERY_N = {"every_2_layers": 2, "every_4_layers": 4}
# `every_n_layers` goes into gradient_checkpointing_kwargs alone: SFT takes it from there under
# either name, and a use_reentrant beside it would make some trainers checkpoint every layer.
_CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": False},
    "full": {"gradient_checkpointing": True},
    "full_reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "selective": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"selective": True},
    },
    **{
        name: {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"every_n_layers": layers},
        }
        for name, layers in _EVERY_N.items()
    },
}
# What each way of checkpointing needs no less memory than. Layers kept by every_2 are a subset of
# those kept by every_4; selective keeps one tensor per layer more than full. selective and
# every_n are not comparable, nor is the reentrant implementation with anything but none.
_KEEPS_NO_LESS_THAN: dict[str, frozenset[str]] = {
    "none": frozenset(_CHECKPOINTING),
    "every_4_layers": frozenset({"every_4_layers", "every_2_layers", "full"}),
    "every_2_layers": frozenset({"every_2_layers", "full"}),
    "selective": frozenset({"selective", "full"}),
    "full": frozenset({"full"}),
    "full_reentrant": frozenset({"full_reentrant"}),
}


def checkpointing_keys(value: str) -> dict[str, Any]:
    """Return the TRL keys of a way of checkpointing."""
    return {
        key: dict(item) if isinstance(item, dict) else item
        for key, item in _CHECKPOINTING[value].items()
    }


def _refuse_checkpointing(value: Value, candidate: Candidate, context: Context) -> str | None:
    layers = context.model.num_layers
    interval = _EVERY_N.get(str(value))
    if interval is not None and layers is not None and interval >= layers:
        return f"the model has {layers} layers only"
    if value != "selective":
        return None
    if adapts(candidate):
        return (
            "selective checkpointing raises with adapters: TRL's wrapper is bypassed and torch"
            " does not know the key"
        )
    if candidate.get("attn_implementation", "sdpa") == "eager":
        return (
            "eager attention has no single operation whose result could be kept, so that it would"
            " be the same as full checkpointing"
        )
    return None


def _checkpointing_at_least(
    larger: Value, smaller: Value, candidate: Candidate, context: Context
) -> bool:
    if larger != smaller and candidate.get("activation_offloading", "off") == "on":
        # Kept activations leave the device, recomputed ones do not.
        return False
    return smaller in _KEEPS_NO_LESS_THAN.get(str(larger), ())


CHECKPOINTING = add(
    Knob(
        name="checkpointing",
        baseline="full",
        changes="nothing",
        help=(
            "What the forward pass keeps for the backward pass. none: everything. full: the input"
            " of each layer; the rest is computed twice (TRL's default). selective: also the"
            " result of attention. every_n_layers: all but every n-th layer. full_reentrant: full,"
            " in PyTorch's older implementation."
        ),
        domain=Choice(tuple(_CHECKPOINTING)),
        # transformers' newer names win over the ones TRL documents.
        keys=(
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "activation_checkpointing",
            "activation_checkpointing_kwargs",
        ),
        depends_on=("attn_implementation", "adaptation"),
        write=lambda value, candidate, context: checkpointing_keys(str(value)),
        refuse=_refuse_checkpointing,
        memory_at_least=_checkpointing_at_least,
        loads_at_least=loads_alike,
        leanest=("full", "full_reentrant", "every_2_layers", "selective"),
    )
)


def _offloading_inactive(candidate: Candidate, context: Context) -> str | None:
    kind = context.device.kind
    if kind == "cpu":
        return "activations are on the CPU already, and TRL raises on a machine without a GPU"
    if kind not in ("cuda", "xpu"):
        return f"TRL copies on a second stream, and {kind} has none"
    return None


OFFLOADING = add(
    Knob(
        name="activation_offloading",
        baseline="off",
        changes="nothing",
        help=(
            "Moves kept activations to the host during the forward pass and back for the backward"
            " pass: less device memory, more host memory and traffic."
        ),
        domain=Choice(("off", "on")),
        needed_keys=("activation_offloading",),
        write=lambda value, candidate, context: {"activation_offloading": value == "on"},
        active_if=_offloading_inactive,
        loads_at_least=loads_alike,
    )
)


def _allocator_inactive(candidate: Candidate, context: Context) -> str | None:
    kind = context.device.kind
    return None if kind == "cuda" else f"it tunes PyTorch's CUDA allocator, and this is {kind}"


def _write_allocator(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    if value == "default":
        return {}
    setting = "expandable_segments:True"
    # PyTorch 2.9 renamed the variable; older versions know the second name only.
    return {"env": {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}}


ALLOCATOR = add(
    Knob(
        name="allocator",
        baseline="default",
        changes="nothing",
        help=(
            "How PyTorch takes memory from the driver. expandable_segments wastes less to"
            " fragmentation when shapes differ from step to step."
        ),
        domain=Choice(("default", "expandable_segments")),
        keys=("env.PYTORCH_ALLOC_CONF", "env.PYTORCH_CUDA_ALLOC_CONF"),
        write=_write_allocator,
        active_if=_allocator_inactive,
        leanest=("expandable_segments",),
        ignored_when_inactive=True,
    )
)


def _cache_inactive(candidate: Candidate, context: Context) -> str | None:
    if context.device.is_virtual:
        return "it has no effect on what is predicted: emptying the cache is not modelled"
    return "a CPU has no cache to empty" if context.device.kind == "cpu" else None


EMPTY_CACHE = add(
    Knob(
        name="torch_empty_cache_steps",
        baseline="none",
        changes="nothing",
        help=(
            "Gives cached memory back every so many steps: less reserved memory between steps,"
            " slower steps. Only 1 frees it at every step."
        ),
        domain=Choice(("none", 1, 4, 16)),
        accepts=Choice(("none", *(1 << power for power in range(11)))),
        write=lambda value, candidate, context: {
            "torch_empty_cache_steps": None if value == "none" else value
        },
        active_if=_cache_inactive,
        loads_at_least=loads_alike,
        ignored_when_inactive=True,
    )
)
