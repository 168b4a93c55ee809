"""What ``--dry-run`` shows: the space as this machine, model and data leave it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.report.model import SIZE_LIMIT
from autotune.screen import SHARE
from autotune.units import counted, format_duration, format_gib

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.listener import Budget
    from autotune.plan import Plan

FINALISTS = 8


def planned(plan: Plan, budget: Budget) -> dict[str, Any]:
    """Return what a search would do, as plain JSON."""
    size = plan.space.size(SIZE_LIMIT)
    trials = size if budget.trials is None else min(budget.trials, size)
    # A prediction repeated is the same prediction.
    confirmations = 0 if plan.context.device.is_virtual else FINALISTS
    # Predicting beforehand takes a share of the time that the trials would.
    screened = 0.0 if plan.context.device.is_virtual else SHARE * trials
    worst_s: float = (trials + screened + confirmations) * plan.request.probe_timeout_s
    if budget.wall_time_s is not None:
        worst_s = min(worst_s, 1.25 * budget.wall_time_s + plan.request.probe_timeout_s)
    context = plan.context
    values = plan.space.values()
    knobs = [
        {"name": knob.name, "values": list(values[knob.name]), "help": knob.help}
        for knob in plan.space.knobs
    ]
    return {
        "model": context.model.to_dict(),
        "device": context.device.to_dict(),
        "budget_bytes": plan.budget_bytes,
        "budget_source": plan.budget_source,
        "global_batch": context.global_batch,
        "processes": context.num_processes,
        "space": plan.request.space.name,
        "num_candidates": size,
        "num_candidates_is_exact": size < SIZE_LIMIT,
        "trials": trials,
        "confirmations": confirmations,
        "worst_case_time_s": worst_s,
        "predicted": context.device.is_virtual,
        "knobs": knobs,
        "inactive": [{"knob": name, "reason": reason} for name, reason in plan.space.inactive],
        "removed": [
            {"knob": name, "value": value, "reason": reason}
            for name, value, reason in plan.space.removed
        ],
        "notices": list(plan.notices),
        "baseline": plan.space.baseline,
        "baseline_config": plan.config(plan.space.baseline),
        "baseline_accelerate_config": plan.accelerate(plan.space.baseline),
    }


def print_planned(facts: dict[str, Any], console: Console) -> None:
    """Print it for people."""
    size = counted(facts["num_candidates"], "candidate")
    if not facts["num_candidates_is_exact"]:
        size = size.replace(" ", " or more ")
    lines = [
        f"model: {facts['model']['architecture']}, "
        f"{facts['model']['num_parameters']:,} parameters",
        f"device: {facts['device']['label']}",
        *([f"processes: {facts['processes']}"] if facts["processes"] > 1 else []),
        f"budget: {format_gib(facts['budget_bytes'])} ({facts['budget_source']})",
        f"space {facts['space']}: {size}",
        "",
    ]
    for knob in facts["knobs"]:
        values = ", ".join(_shown(value) for value in knob["values"])
        lines.append(f"  {knob['name']}: {values or 'not searched here'}")
    if facts["inactive"] or facts["removed"]:
        lines += ["", "not searched:"]
        lines += [f"  {item['knob']}: {item['reason']}" for item in facts["inactive"]]
        lines += [
            f"  {item['knob']}={_shown(item['value'])}: {item['reason']}"
            for item in facts["removed"]
        ]
    lines += [f"note: {notice}" for notice in facts["notices"]]
    lines += ["", _duration_line(facts)]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _duration_line(facts: dict[str, Any]) -> str:
    """Return how long the search may take, in words."""
    trials, bound = counted(facts["trials"], "trial"), format_duration(facts["worst_case_time_s"])
    if facts["predicted"]:
        # Where no time is measured, the limit is one for a prediction that hangs.
        return (
            f"{trials}, all predicted: usually seconds each. The bound is {bound}, if every"
            " one ran into its time limit."
        )
    again = f"{trials} and up to {counted(facts['confirmations'], 'confirmation')}"
    return f"{again} take at most {bound}, if every probe ran into its time limit"


def _shown(value: object) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
