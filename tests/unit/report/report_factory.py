"""Synthetic trials and reports with chosen figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.probe.result import (
    Measurement,
    MemoryPeak,
    Outcome,
    ProbeResult,
    StepRecord,
    Timeline,
)
from autotune.report.model import Report
from autotune.report.pareto import pareto_set
from autotune.report.trial import Trial
from autotune.space.context import DataProfile
from autotune.units import GIB

ENVIRONMENT = {"device": "Test Card", "driver": "1.0", "packages": {"trl": "1.16.0"}}


def make_step(rate: float, *, num_tokens: int = 1000, num_rows: int = 8) -> StepRecord:
    """Return a step that trains ``rate`` tokens/s, a fifth of its positions being padding."""
    time_s = num_tokens / rate
    return StepRecord(
        micro_times_s=(time_s * 0.75,),
        optimizer_time_s=time_s * 0.25,
        num_tokens=num_tokens,
        num_positions=num_tokens * 5 // 4,
        num_loss_tokens=num_tokens // 2,
        num_rows=num_rows,
    )


def make_measurement(
    rates: Sequence[float] = (1000.0, 1010.0, 990.0, 1005.0, 995.0),
    peak_gib: float = 10.0,
    **values: Any,
) -> Measurement:
    peak_bytes = round(peak_gib * GIB)
    defaults: dict[str, Any] = {
        "source": "measured",
        "device_kind": "cuda",
        "accumulation_steps": 1,
        "steps": tuple(make_step(rate) for rate in rates),
        "phases": {
            "load": MemoryPeak(used_bytes=peak_bytes // 4, resident_bytes=2 * GIB),
            "first_step": MemoryPeak(used_bytes=peak_bytes, resident_bytes=3 * GIB),
        },
        "worst_batch": (8, 1024),
        "rows_per_epoch": 16000.0,
    }
    return Measurement(**{**defaults, **values})


def make_result(
    measurement: Measurement | None = None,
    *,
    outcome: Outcome = Outcome.OK,
    probe_id: str = "0000",
    **values: Any,
) -> ProbeResult:
    defaults: dict[str, Any] = {
        "environment": ENVIRONMENT,
        "timeline": Timeline(start_s=1.0, load_s=4.0, steps_s=6.0, total_s=11.5),
    }
    return ProbeResult(
        probe_id=probe_id, outcome=outcome, measurement=measurement, **{**defaults, **values}
    )


def make_trial(
    number: int,
    rate: float = 1000.0,
    peak_gib: float = 10.0,
    *,
    spread: float = 0.02,
    num_probes: int = 1,
    changed: dict[str, Any] | None = None,
    measurement_values: dict[str, Any] | None = None,
    **values: Any,
) -> Trial:
    """Return an ``ok`` trial whose rate has the given interquartile range over its median."""
    rates = [rate * (1 + spread * shift) for shift in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    measurement = make_measurement(rates, peak_gib, **(measurement_values or {}))
    changed = changed if changed is not None else ({"knob": number} if number else {})
    defaults: dict[str, Any] = {
        "candidate": {"knob": number, **changed},
        "changed": changed,
        "config": {"model_name_or_path": "m", "per_device_train_batch_size": 4, **changed},
        "outcome": Outcome.OK,
        "results": tuple(
            make_result(measurement, probe_id=f"{number:04d}-{index}")
            for index in range(num_probes)
        ),
        "feasible": True,
        "violations": {"memory_budget": -0.2},
        "digest": f"d{number}",
    }
    return Trial(number=number, **{**defaults, **values})


def make_failure(number: int, outcome: Outcome = Outcome.DEVICE_OOM, **values: Any) -> Trial:
    defaults: dict[str, Any] = {
        "candidate": {"knob": number},
        "changed": {"knob": number} if number else {},
        "config": {"model_name_or_path": "m"},
        "outcome": outcome,
        "results": (
            make_result(
                outcome=outcome,
                probe_id=f"{number:04d}",
                detail="CUDA out of memory. Tried to allocate 2.00 GiB\nmore",
                error_type="torch.OutOfMemoryError",
                phase="first_step",
            ),
        ),
    }
    return Trial(number=number, **{**defaults, **values})


def make_report(trials: Sequence[Trial], **values: Any) -> Report:
    defaults: dict[str, Any] = {
        "trainer": "sft",
        "model": "org/model",
        "dataset": "org/data",
        "pareto_numbers": tuple(item.number for item in pareto_set(trials)),
        "created_at": "2026-01-02T03:04:05+00:00",
        "finished": True,
        "device": {"name": "cuda:0", "kind": "cuda", "label": "Test Card", "driver": "1.0"},
        "budget_bytes": 16 * GIB,
        "budget_source": "the device's free memory",
        "global_batch": 32,
        "versions": {"trl-autotune": "0.1.0", "torch": "2.13.0", "trl": "1.16.0"},
        "wall_time_s": 125.0,
        "probe_work_s": 100.0,
        "command": "autotune search org/model org/data",
    }
    return Report(trials=tuple(trials), **{**defaults, **values})


def make_profile() -> DataProfile:
    """Return a profile of ten rows whose tokens all carry loss."""
    counts = {10: 4, 50: 3, 200: 2, 1000: 1}
    limits = (64, 256, 1024)
    return DataProfile(
        num_rows=10,
        num_tokens=1590,
        num_loss_tokens=1590,
        length_counts=counts,
        max_lengths=limits,
        loss_tokens_kept=tuple(
            sum(min(length, limit) * count for length, count in counts.items()) for limit in limits
        ),
        rows_cut=(3, 1, 0),
        rows_dropped=(0, 0, 0),
        format="messages",
        fingerprint="f" * 8,
        num_empty_rows=1,
    )


def mixed_trials() -> tuple[Trial, ...]:
    """Return trials of every kind a report must show."""
    return (
        make_trial(0, 1000, 10.0, num_probes=2),
        make_trial(1, 1500, 12.0, changed={"per_device_train_batch_size": 8}, num_probes=2),
        make_trial(
            2,
            700,
            4.0,
            changed={
                "gradient_checkpointing": True,
                "optim": "paged_adamw_8bit",
                "use_liger_kernel": True,
                "max_length": None,
            },
            measurement_values={"num_alloc_retries": 2},
        ),
        make_trial(
            3, 2000, 15.0, changed={"max_length": 512}, changes=("tokens",), coverage=0.8765
        ),
        make_trial(4, 900, 14.0),
        make_failure(5),
        make_failure(6, results=(), skipped_because="out of memory is implied by trial 5"),
        make_trial(7, 2500, 17.0, feasible=False, violations={"memory_budget": 0.0625}),
        make_failure(8, Outcome.CRASHED),
    )
