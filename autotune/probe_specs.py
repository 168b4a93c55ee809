"""What a candidate's probe runs, by a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import JournalError
from autotune.plan import Plan
from autotune.probe.spec import ProbeSpec
from autotune.runfolder import RunFolder


def probe_spec(
    plan: Plan, run: RunFolder, probe_id: str, candidate: Mapping[str, Any]
) -> ProbeSpec:
    """Return what a candidate's probe runs, and make its folder.

    Raises:
        JournalError: If the folder cannot be made.
    """
    request, config = plan.request, plan.config(candidate)
    folder = run.probe_folder(probe_id)
    number = 0
    while folder.exists():  # left by a run that was killed; its files are kept
        number += 1
        folder = run.probe_folder(f"{probe_id}.{number}")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise JournalError(
            f"{folder} cannot be made: {error.strerror or error}.",
            hint="Free space on the disk and continue with --resume.",
        ) from error
    accumulation = int(config.get("gradient_accumulation_steps", 1))
    warmup_steps, measured_steps = plan.steps(accumulation)
    return ProbeSpec(
        probe_id=folder.name,
        folder=str(folder),
        trainer=request.trainer,
        config=config,
        device=plan.context.device.name,
        data_folder=plan.data_folder,
        weights=request.weights,
        memory_budget_bytes=plan.budget_bytes if plan.enforced else None,
        warmup_steps=warmup_steps,
        measured_steps=measured_steps,
        rows_per_step=plan.rows_per_step,
        first_worst_steps=plan.first_worst_steps,
        representative=plan.context.device.is_virtual,
        accumulation_steps=accumulation,
        phases=request.phases,
        process_env={key: str(value) for key, value in config.get("env", {}).items()},
        timeout_s=request.probe_timeout_s,
        seed=request.seed,
        trust_remote_code=request.trust_remote_code,
        processes=plan.context.num_processes,
        accelerate=plan.accelerate(candidate),
    )
