"""Knobs of trainers that compare with a reference model."""

from __future__ import annotations

from typing import Any

from autotune.space.context import Context
from autotune.space.domains import Choice, Value
from autotune.space.knob import Candidate, Knob, add


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
