"""Knobs of trainers that generate what they are trained on."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, IntRange, PowerOfTwo, Value
from autotune.space.knob import LEAST, Candidate, Knob, add, at_least, loads_alike
from autotune.space.knobs.batching import TRL_BATCH_SIZE, accumulation_steps


def _refuse_generations(value: Value, candidate: Candidate, context: Context) -> str | None:
    if context.global_batch % int(str(value)):
        return (
            f"{value} completions per prompt do not divide the global batch of"
            f" {context.global_batch} (give a --global-batch that is a multiple of it)"
        )
    return None


NUM_GENERATIONS = add(
    Knob(
        name="num_generations",
        baseline=8,
        defaults={"rloo": 2},
        changes="method",
        help=(
            "Completions per prompt. The global batch counts completions, so that more of them per"
            " prompt are fewer prompts per step."
        ),
        domain=Choice((2, 4, 8, 16)),
        accepts=IntRange(2, 1 << 12),
        needed_keys=("num_generations",),
        refuse=_refuse_generations,
    )
)


def _refuse_split(value: Value, candidate: Candidate, context: Context) -> str | None:
    steps = _micro_batches(candidate, context)
    if steps % int(str(value)):
        return f"a step of {steps} micro-batches can't be divided into {value} generations"
    per_prompt = int(
        candidate.get("num_generations", NUM_GENERATIONS.of(context.trainer).baseline) or 0
    )
    completions = context.global_batch // int(str(value))
    if completions % per_prompt:
        return f"{per_prompt} completions per prompt do not divide a generation of {completions}"
    return None


def _micro_batches(candidate: Candidate, context: Context) -> int:
    size = int(candidate.get("per_device_train_batch_size", TRL_BATCH_SIZE) or 0)
    return accumulation_steps(size, context)


def _write_split(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    if value == 1:
        return {}
    return {"steps_per_generation": _micro_batches(candidate, context) // int(str(value))}


GENERATIONS_PER_STEP = add(
    Knob(
        name="generations_per_step",
        baseline=1,
        # The same policy writes completions of the same prompts. But the loss weighs tokens by
        # those of their own generation, so that which are together matters where lengths differ.
        changes="tokens",
        help=(
            "Into how many generations an optimizer step is divided. More of them write fewer"
            " completions at a time: less memory for caches and logits while generating, and less"
            " speed."
        ),
        domain=Choice((1,)),
        accepts=PowerOfTwo(1, 64),
        # One generation for several steps is off-policy training, which is no matter of memory.
        keys=("steps_per_generation", "generation_batch_size", "num_iterations"),
        needed_keys=("steps_per_generation",),
        depends_on=("per_device_train_batch_size", "num_generations"),
        write=_write_split,
        refuse=_refuse_split,
        loads_at_least=loads_alike,
    )
)


def _head_without_effect(value: Value, candidate: Candidate, context: Context) -> str | None:
    if value == "on" and candidate.get("dtype", "float32") == "float32":
        return "the weights are float32 anyway"
    return None


CAST_LM_HEAD = add(
    Knob(
        name="cast_lm_head_to_fp32",
        baseline="off",
        changes={"off": "nothing", "on": "method"},
        help=(
            "Keeps the layer that computes logits in float32 beside weights of 16 bits: twice the"
            " memory of that layer, of its gradients and of its optimizer states, for log"
            "-probabilities that are closer to those of the generation."
        ),
        domain=Choice(("off", "on")),
        needed_keys=("cast_lm_head_to_fp32",),
        depends_on=("dtype",),
        write=lambda value, candidate, context: {"cast_lm_head_to_fp32": value == "on"},
        no_effect=_head_without_effect,
    )
)

MAX_COMPLETION_LENGTH = add(
    Knob(
        name="max_completion_length",
        baseline=512,
        changes="tokens",
        help=(
            "Longest completion, in tokens. A probe generates completions of this length: caches,"
            " logits and activations grow with it."
        ),
        domain=Choice((512,)),
        accepts=IntRange(1, 1 << 20),
        needed_keys=("max_completion_length",),
        memory_at_least=at_least,
        leanest=LEAST,
    )
)


def _refuse_new_tokens(value: Value, candidate: Candidate, context: Context) -> str | None:
    limit = int(candidate.get("max_length", TRL_ONLINE_DPO_LENGTH) or 0)
    if int(str(value)) < limit:
        return None
    return (
        f"{value} tokens of a completion fill max_length={limit}, so that prompts would be cut"
        " away altogether"
    )


TRL_ONLINE_DPO_LENGTH = 512

MAX_NEW_TOKENS = add(
    Knob(
        name="max_new_tokens",
        baseline=64,
        changes="tokens",
        help=(
            "Longest completion, in tokens, as max_completion_length of other trainers. A probe"
            " generates completions of this length."
        ),
        domain=Choice((64,)),
        accepts=IntRange(1, 1 << 20),
        needed_keys=("max_new_tokens",),
        depends_on=("max_length",),
        refuse=_refuse_new_tokens,
        memory_at_least=at_least,
        leanest=LEAST,
    )
)


def _write_cache(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    return {} if value == "default" else {"generation_kwargs": {"use_cache": value == "on"}}


GENERATION_CACHE = add(
    Knob(
        name="generation_cache",
        baseline="default",
        changes="nothing",
        help=(
            "Whether generating keeps the keys and values of all tokens so far, or computes them"
            " again for every new one: less memory, and far slower. TRL's default is on; online"
            " DPO's is off while it checkpoints."
        ),
        domain=Choice(("default", "on", "off")),
        keys=("cache_implementation", "generation_kwargs.use_cache"),
        needed_keys=("cache_implementation",),
        write=_write_cache,
        loads_at_least=loads_alike,
    )
)
