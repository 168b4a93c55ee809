"""A worker task that trains as a spec says and returns every step's loss.

Knobs that claim to change nothing are held to it: the same rows from the same weights must give
the same losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.devices import base as devices
from autotune.probe.spec import ProbeSpec

NUM_STEPS = 4


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Train ``request["spec"]`` with real weights, on all rows in the data's own order.

    Returns:
        ``losses``: One loss per optimizer step, the accumulation as exported.
    """
    # The training stack belongs into the worker.
    from autotune.trainers.hf import Sample, prepared_rows
    from autotune.trainers.sft import SftAdapter

    class Plain(SftAdapter):
        def load_rows(self, spec: ProbeSpec, training_args: Any) -> Sample:
            rows = prepared_rows(spec).select_columns(["input_ids", "labels"])
            return Sample(rows=rows, rows_ratio=1.0, tokens_ratio=1.0)

        def session(self, trainer: Any, *_: Any) -> Any:
            return trainer

    spec = ProbeSpec.from_dict(
        {
            **request["spec"],
            "weights": "real",
            "overlay": {
                "gradient_accumulation_steps": request["spec"]["accumulation_steps"],
                "max_steps": NUM_STEPS,
                "learning_rate": 1e-3,
                "lr_scheduler_type": "constant",
            },
        }
    )
    trainer: Any = Plain().build(spec, devices.load(spec.device))
    trainer.train()
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
