"""The report of a search, made from its plan and its trials."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autotune.objectives import Objective
from autotune.plan import Plan
from autotune.report import warnings as report_warnings
from autotune.report.lengths import equal_bins
from autotune.report.model import SIZE_LIMIT, Report, probe_work_s
from autotune.report.pareto import pareto_set
from autotune.report.trial import Trial


def compose(
    plan: Plan,
    trials: Sequence[Trial],
    objectives: Sequence[Objective],
    *,
    sampler: str,
    wall_time_s: float,
    num_slots: int,
    notices: tuple[str, ...],
    screening: Mapping[str, Any],
    command: str,
    resume_with: str,
    finished: bool = False,
    interrupted: bool = False,
) -> Report:
    """Return the report of a search; see :class:`Report` for what is in it.

    Args:
        plan: What was fixed.
        trials: Those so far, in any order.
        objectives: What was optimised.
        sampler: Name of the sampler.
        wall_time_s: From the start of the search until now.
        num_slots: Probes that ran at a time, at most.
        notices: What the user should know about the set-up.
        screening: What was predicted before it was probed.
        command: The command line that started it.
        resume_with: The command line that goes on with it.
        finished: Whether the search used up its budget or its space.
        interrupted: Whether it was stopped by the user.
    """
    numbers = tuple(trial.number for trial in pareto_set(trials, objectives))
    data = plan.context.data
    return Report(
        trainer=plan.request.trainer,
        model=plan.request.model,
        dataset=plan.request.dataset,
        trials=tuple(sorted(trials, key=lambda trial: trial.number)),
        pareto_numbers=numbers,
        created_at=now(),
        finished=finished,
        interrupted=interrupted,
        device=plan.context.device.to_dict(),
        model_facts=plan.context.model.to_dict(),
        data={
            "format": data.format,
            "fingerprint": data.fingerprint,
            "num_rows": data.num_rows,
            "num_empty_rows": data.num_empty_rows,
            "num_tokens": data.num_tokens,
            "num_loss_tokens": data.num_loss_tokens,
            "longest": data.longest,
            "mean_length": data.mean_length,
            "median_length": data.quantile(0.5),
            "length_counts": equal_bins(data.length_counts),
        },
        budget_bytes=plan.budget_bytes,
        budget_source=plan.budget_source,
        global_batch=plan.context.global_batch,
        min_coverage=plan.request.least_coverage,
        space=plan.request.space.name,
        space_digest=plan.request.space.digest,
        num_candidates=plan.space.size(SIZE_LIMIT),
        inactive_knobs=tuple(plan.space.inactive),
        removed_values=tuple(
            (f"{name}={value}", reason) for name, value, reason in plan.space.removed
        ),
        lean_pins=plan.lean_pins,
        notices=notices,
        warnings=report_warnings.collect(trials, pareto=numbers, resume_with=resume_with),
        objectives=tuple(item.name for item in objectives),
        seed=plan.request.seed,
        sampler=sampler,
        weights=plan.request.weights,
        versions=versions(plan.environment),
        wall_time_s=wall_time_s,
        probe_work_s=probe_work_s(trials),
        num_slots=num_slots,
        command=command,
        script=plan.script,
        screening=screening,
    )


def versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return package to version, our own and Python's among them."""
    try:
        own = version("trl-autotune")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "trl-autotune": own,
        "python": str(environment.get("python", "")),
        **environment.get("packages", {}),
    }


def now() -> str:
    """Return the time, ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
