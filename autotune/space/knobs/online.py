"""Knobs of trainers that generate what they are trained on."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, IntRange, Value
from autotune.space.knob import LEAST, Candidate, Knob, add, at_least, loads_alike


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
