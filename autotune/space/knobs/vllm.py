"""Knobs of generation by vLLM beside the trainer, on the same card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.space.context import Context, DeviceInfo
from autotune.space.domains import Choice, FloatRange, Value
from autotune.space.knob import Candidate, Knob, add, at_least
from autotune.space.knobs.online import MAX_COMPLETION_LENGTH
from autotune.space.knobs.packages import unmet
from autotune.units import format_gib

_TRAINERS = ("grpo", "rloo")
"""Whose engine is modelled and tested; others of TRL can have one as well."""

NAMES = ("use_vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization")
"""The knobs of this module."""

_NEEDS = ("vllm>=0.22,<0.32",)
"""What trl 1.16 takes (``is_vllm_available`` in trl/import_utils.py: 0.22.0 to 0.31.0)."""

_CAPABILITY = (7, 5)
"""Least compute capability (vLLM 0.31.0, docs/getting_started/installation/gpu.cuda.inc.md)."""


_WEIGHT_BYTES = 2
"""Least bytes of a weight: vLLM takes 16-bit types (``_resolve_auto_dtype`` in its
config/model.py), and what quantises the trainer's is refused beside it."""


def why_inactive(device: DeviceInfo, packages: Mapping[str, str]) -> str | None:
    """Return why vLLM cannot generate there; None if it can.

    Args:
        device: Where probes run.
        packages: Distribution name to installed version.
    """
    if device.kind != "cuda":
        return f"TRL's vLLM needs a CUDA device, and this is {device.kind}"
    if device.capability is not None and device.capability < _CAPABILITY:
        shown, least = (".".join(map(str, pair)) for pair in (device.capability, _CAPABILITY))
        return f"vLLM needs compute capability {least}, and this is {shown}"
    # What is installed here says nothing of the machine that has the card; vLLM is modelled.
    return None if device.is_virtual else unmet(packages, _NEEDS)


def _inactive(candidate: Candidate, context: Context) -> str | None:
    return why_inactive(context.device, context.packages)


def _refuse_vllm(value: Value, candidate: Candidate, context: Context) -> str | None:
    if value == "off":
        return None
    if reason := why_inactive(context.device, context.packages):
        return reason
    if candidate.get("adaptation", "full") == "lora_8bit":
        return "TRL raises: vLLM does not quantise to 8 bits as it loads"
    if str(candidate.get("adaptation", "full")).startswith("lora_4bit") or context.model.quantized:
        return (
            "TRL hands vLLM quantised weights without their scales, which merging adapters"
            " changes, so that vLLM would read them wrongly"
        )
    return None


def _write_vllm(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    if value == "off":
        return {"use_vllm": False}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": _longest(candidate, context),
    }


def _longest(candidate: Candidate, context: Context) -> int:
    """Return the longest prompt and completion together, in tokens.

    vLLM's cache must hold one sequence of the greatest length; TRL's default is the model's, of
    which a card has rarely room beside a trainer.
    """
    data = context.data
    asked = candidate.get("max_completion_length", MAX_COMPLETION_LENGTH.baseline)
    prompts = data.column_counts.get("prompt")
    longest = data.longest if not prompts else max(data.longest, max(prompts) + int(str(asked)))
    return min(longest, context.model.max_positions or longest)


USE_VLLM = add(
    Knob(
        name="use_vllm",
        baseline="off",
        changes="method",
        help=(
            "Who writes the completions. off: the model itself, by transformers. colocate: vLLM,"
            " in the trainer's process and on its card, with a copy of the weights and a KV cache;"
            " TRL corrects for the probabilities that differ. vllm_max_model_length follows from"
            " the data."
        ),
        domain=Choice(("off", "colocate")),
        # A server or several cards per engine are other set-ups, which no probe of one card runs.
        keys=("use_vllm", "vllm_mode", "vllm_max_model_length", "vllm_tensor_parallel_size"),
        needed_keys=("use_vllm", "vllm_mode", "vllm_max_model_length"),
        trainers=_TRAINERS,
        depends_on=("adaptation",),
        write=_write_vllm,
        active_if=_inactive,
        refuse=_refuse_vllm,
        needs={"colocate": _NEEDS},
    )
)


def _without_vllm(candidate: Candidate, context: Context) -> str | None:
    if reason := why_inactive(context.device, context.packages):
        return reason
    if candidate.get("use_vllm", "off") == "off":
        return "it needs vLLM, and use_vllm is off"
    return None


def _sleeps_at_least(
    larger: Value, smaller: Value, candidate: Candidate, context: Context
) -> bool:
    return larger == smaller or larger == "off"


def _refuse_share(value: Value, candidate: Candidate, context: Context) -> str | None:
    """Return why a share cannot work, by the weights alone: the trainer's copy and vLLM's."""
    assert isinstance(value, float)
    total, weights = context.device.total_bytes, context.model.num_parameters * _WEIGHT_BYTES
    share, limit = int(value * total), context.budget_bytes or total
    if share <= weights:
        return (
            f"that is {format_gib(share)}, and vLLM's copy of the weights alone takes"
            f" {format_gib(weights)} of it"
        )
    if share + weights > limit:
        return (
            f"that is {format_gib(share)}, which beside at least {format_gib(weights)} of the"
            f" trainer's weights exceeds {format_gib(limit)}"
        )
    return None


SLEEP = add(
    Knob(
        name="vllm_enable_sleep_mode",
        baseline="off",
        changes="nothing",
        help=(
            "Whether vLLM gives its weights and KV cache back while the trainer trains. The peak"
            " is then the larger one of generating and training, not their sum."
        ),
        domain=Choice(("off", "on")),
        needed_keys=("vllm_enable_sleep_mode",),
        trainers=_TRAINERS,
        depends_on=("use_vllm",),
        write=lambda value, candidate, context: {"vllm_enable_sleep_mode": value == "on"},
        active_if=_without_vllm,
        memory_at_least=_sleeps_at_least,
        leanest=("on",),
    )
)
UTILIZATION = add(
    Knob(
        name="vllm_gpu_memory_utilization",
        baseline=0.3,
        changes="nothing",
        help=(
            "Share of the card's memory that vLLM takes while it generates: weights, KV cache and"
            " CUDA graphs. More of it generates more sequences at once; what is left is the"
            " trainer's."
        ),
        domain=Choice((0.2, 0.3, 0.45, 0.6)),
        accepts=FloatRange(0.01, 0.99),
        needed_keys=("vllm_gpu_memory_utilization",),
        trainers=_TRAINERS,
        depends_on=("use_vllm",),
        active_if=_without_vllm,
        refuse=_refuse_share,
        memory_at_least=at_least,
    )
)
