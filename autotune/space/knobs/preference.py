"""Knobs of trainers that compare with a reference model."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, Value
from autotune.space.knob import Candidate, Knob, add
from autotune.space.knobs.batching import KTO_LOSS


def _write_precompute(value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
    return {"precompute_ref_log_probs": value == "on"}


PRECOMPUTE = add(
    Knob(
        name="precompute_ref_log_probs",
        baseline="off",
        changes="nothing",
        help=(
            "Computes the reference model's log-probabilities of all rows before the training, so"
            " that no second copy of the weights is kept and no second forward pass runs. Costs a"
            " forward pass over the data at the start."
        ),
        domain=Choice(("off", "on")),
        keys=("precompute_ref_log_probs", "precompute_ref_batch_size"),
        needed_keys=("precompute_ref_log_probs",),
        write=_write_precompute,
    )
)


LOSS_OF_KTO = add(
    Knob(
        name="loss_type",
        baseline=KTO_LOSS,
        changes={KTO_LOSS: "nothing"},
        help=(
            "KTO's loss. kto estimates a KL term, for which the model and its reference see each"
            " prompt once more, with another row's completion; apo_zero_unpaired has none, and a"
            " micro-batch may be one row."
        ),
        domain=Choice((KTO_LOSS, "apo_zero_unpaired")),
        needed_keys=("loss_type",),
        # Others' losses have the key as well, and take the same memory whatever they are.
        trainers=("kto",),
    )
)
