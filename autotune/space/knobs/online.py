"""Knobs of trainers that generate what they are trained on."""

from __future__ import annotations

from autotune.space.context import Context
from autotune.space.domains import Choice, IntRange, Value
from autotune.space.knob import LEAST, Candidate, Knob, add, at_least


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
        baseline=256,
        changes="tokens",
        help=(
            "Longest completion, in tokens. A probe generates completions of this length: caches,"
            " logits and activations grow with it."
        ),
        domain=Choice((256,)),
        accepts=IntRange(1, 1 << 20),
        needed_keys=("max_completion_length",),
        memory_at_least=at_least,
        leanest=LEAST,
    )
)
