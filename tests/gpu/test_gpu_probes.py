"""Real probes on a card: peaks, a budget that is hit, memory that comes back, verify."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.executors.subprocess import SubprocessExecutor
from autotune.export import export
from autotune.plan import Plan, describe
from autotune.probe.result import Outcome, ProbeResult
from autotune.units import GIB, MIB
from autotune.verify import verify_files

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

pytestmark = pytest.mark.gpu

SLACK_BYTES = 64 * MIB
"""What the driver's figure of a card's free memory may differ by from one look to the next."""


@pytest.fixture(scope="module")
def plan(
    executor: SubprocessExecutor,
    made: dict[str, str],
    device: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Plan:
    from trl_kit import plan_of

    folder = tmp_path_factory.mktemp("plan")
    asked: dict[str, Any] = {"device": device, "global_batch": 8, "measured_steps": 3}
    return plan_of(executor, folder, made["model"], made["dataset"], **asked)


def run(executor: SubprocessExecutor, plan: Plan, folder: Path, **changes: Any) -> ProbeResult:
    from trl_kit import probe

    return probe(executor, plan, folder, plan.space.baseline, **{"timeout_s": 170.0, **changes})


@pytest.fixture(scope="module")
def baseline(
    executor: SubprocessExecutor, plan: Plan, tmp_path_factory: pytest.TempPathFactory
) -> ProbeResult:
    result = run(executor, plan, tmp_path_factory.mktemp("probes") / "baseline")
    assert result.outcome is Outcome.OK, result.detail
    return result


def test_a_probe_measures_the_card(baseline: ProbeResult, plan: Plan) -> None:
    measurement = baseline.measurement
    assert measurement is not None
    assert (measurement.source, measurement.device_kind) == ("measured", "cuda")
    assert set(measurement.phases) == {"load", "first_step", "later_steps"}
    for peak in measurement.phases.values():
        assert 0 < peak.allocated_bytes <= peak.reserved_bytes < peak.used_bytes
    # The weights, their gradients and two states, in float32.
    assert measurement.peak_of("allocated_bytes") > 16 * plan.context.model.num_parameters
    assert measurement.peak_bytes == measurement.peak_of("used_bytes")
    assert measurement.peak_bytes < plan.context.device.total_bytes
    assert len(measurement.steps) == 3
    assert measurement.tokens_per_s.median > 0
    assert baseline.environment["device"] == plan.context.device.label


def test_a_small_budget_ends_as_device_oom(
    executor: SubprocessExecutor, plan: Plan, baseline: ProbeResult, tmp_path: Path
) -> None:
    measurement = baseline.measurement
    assert measurement is not None
    used, load = measurement.peak_bytes, measurement.phases["load"]
    # Kernels that are loaded later, beside the allocator's memory, do not count against it.
    context = load.used_bytes - load.reserved_bytes
    budget = context + measurement.peak_of("reserved_bytes") // 4
    result = run(executor, plan, tmp_path / "small", memory_budget_bytes=budget)
    assert result.outcome is Outcome.DEVICE_OOM
    assert result.measurement is None
    assert "out of memory" in result.detail.lower()
    # The next one has a card of its own again.
    again = run(executor, plan, tmp_path / "enough", memory_budget_bytes=used + SLACK_BYTES)
    assert again.outcome is Outcome.OK, again.detail
    assert again.measurement.peak_bytes <= used + 2 * SLACK_BYTES


def test_memory_is_back_after_a_probe(
    executor: SubprocessExecutor, plan: Plan, device: str, tmp_path: Path
) -> None:
    before = describe(device, executor)["device"]["free_bytes"]
    assert run(executor, plan, tmp_path / "probe").outcome is Outcome.OK
    after = describe(device, executor)["device"]["free_bytes"]
    assert after >= before - SLACK_BYTES


def test_the_meters_read_known_allocations(executor: SubprocessExecutor, device: str) -> None:
    kept, freed = 256 * MIB, 128 * MIB
    request = {"device": device, "kept_bytes": kept, "freed_bytes": freed}
    found = executor.run_task("gpu_worker_tasks:known_allocations", request, timeout_s=120)
    before, peak, after = (found[name] for name in ("before", "peak", "after"))
    grown = {key: peak[key] - before[key] for key in ("allocated_bytes", "reserved_bytes")}
    assert grown == {"allocated_bytes": kept + freed, "reserved_bytes": kept + freed}
    assert peak["used_bytes"] - peak["reserved_bytes"] > 0
    # A new phase starts from what is in use: the cache stays reserved, what was freed is free.
    assert after["allocated_bytes"] == peak["allocated_bytes"] - freed
    assert after["reserved_bytes"] == peak["reserved_bytes"]


def test_a_limit_is_hit_as_out_of_memory(executor: SubprocessExecutor, device: str) -> None:
    request = {"device": device, "budget_bytes": 2 * GIB, "fits_bytes": 256 * MIB}
    found = executor.run_task("gpu_worker_tasks:beyond_the_limit", request, timeout_s=120)
    assert found == {"outcome": "device_oom", "fits_bytes": 256 * MIB}


def test_the_allocators_history_is_replayed(
    executor: SubprocessExecutor, plan: Plan, tmp_path: Path
) -> None:
    from trl_kit import spec_of

    spec = spec_of(plan, tmp_path / "recorded", plan.space.baseline, device=plan.request.device)
    request = {"spec": spec.to_dict(), "process_env": dict(spec.process_env)}
    answer = executor.run_task("gpu_tasks:record_probe", request, timeout_s=170)
    result, replay = ProbeResult.from_dict(answer["result"]), answer["replay"]
    assert result.outcome is Outcome.OK, result.detail
    assert replay["num_events"] > 1000
    assert replay["num_unknown_frees"] == 0
    assert replay["recorded_peak_reserved_bytes"] == result.measurement.peak_of("reserved_bytes")
    assert abs(replay["reserved_error_pct"]) < 1


def test_verify_tells_the_peaks_of_trl(
    plan: Plan, baseline: ProbeResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from report_factory import make_measurement, make_result, make_trial

    # trl takes all cards that it sees, and the probe was on one.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)
    file = tmp_path / "trial-0001.yaml"
    export(plan.config(plan.space.baseline), {}, file)
    # Only what is predicted is set against the card's own peaks.
    predicted = make_measurement(source="predicted", phases=baseline.measurement.phases)
    trial = make_trial(1, results=(make_result(predicted),), source="predicted")
    (check,) = verify_files([file], trials={file: trial}, timeout_s=170)
    assert check.passed, check.detail
    assert 0 < check.peak_allocated_bytes <= check.peak_reserved_bytes
    names = [comparison.name for comparison in check.comparisons]
    assert names[:2] == ["allocated peak", "reserved peak"]
    # Weights as they are in the file, batches as they come: not far from the probe's.
    assert check.peak_allocated_bytes < 1.5 * baseline.measurement.peak_of("allocated_bytes")
