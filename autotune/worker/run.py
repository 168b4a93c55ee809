"""One probe, from its spec to its result; the last resort for every exception."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.devices import base as devices
from autotune.probe.result import Outcome, ProbeResult, Timeline
from autotune.probe.spec import ProbeSpec
from autotune.trainers import base as trainers
from autotune.trainers.schedule import LAST_WORST_STEPS
from autotune.virtual.errors import REFUSALS
from autotune.worker.classify import classify
from autotune.worker.environment import environment
from autotune.worker.meters import StepRecorder


def run_probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the probe in ``request["spec"]`` and return its result, both as plain JSON.

    Args:
        request: ``spec``, and ``asked_at``: when the probe was asked for, in Unix seconds.
    """
    spec = ProbeSpec.from_dict(request["spec"])
    return {"result": _run(spec, float(request.get("asked_at") or time.time())).to_dict()}


def _run(spec: ProbeSpec, asked_at: float) -> ProbeResult:
    device: devices.DeviceBackend | None = None
    recorder: StepRecorder | None = None
    facts: dict[str, Any] = {}
    signatures: tuple[devices.OomSignature, ...] = ()
    measurement = None
    detail, error_type, trace = "", None, None
    try:
        os.environ.update(spec.process_env)
        device = devices.load(spec.device)
        signatures = device.oom_signatures()
        recorder = StepRecorder(
            device,
            Path(spec.folder),
            num_before=spec.first_worst_steps + spec.warmup_steps,
            num_after=LAST_WORST_STEPS,
            accumulation_steps=spec.accumulation_steps,
        )
        recorder.enter_phase("load")
        if spec.memory_budget_bytes is not None:
            device.limit_memory(spec.memory_budget_bytes)
        if spec.beyond_device:
            device.lift_limit()
        facts = environment(device)
        with device.placed():
            session = trainers.load(spec.trainer).build(spec, device)
            session.run(recorder)
            recorder.describe_run(**device.run_facts(num_points=spec.timeline_points))
        measurement = recorder.measurement()
        outcome = Outcome.OK
        # In the search's own process, whatever comes next is none of the probe's.
        device.lift_limit()
    except Exception as error:  # noqa: BLE001  the one place where every ending becomes a value
        if device is not None:
            device.lift_limit()
        trace = traceback.format_exc()
        phase = recorder.phase if recorder is not None else None
        kind = device.kind if device is not None else spec.device.partition(":")[0]
        outcome = classify(error, signatures, device_kind=kind, phase=phase)
        detail, error_type = _one_line(error), type(error).__qualname__
    return ProbeResult(
        probe_id=spec.probe_id,
        outcome=outcome,
        measurement=measurement,
        detail=detail,
        error_type=error_type,
        traceback=trace,
        phase=recorder.phase if recorder is not None else None,
        timeline=_timeline(recorder, asked_at),
        environment=facts,
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if text and isinstance(error, REFUSALS):
        return text  # the names of our own classes say nothing to a user
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _timeline(recorder: StepRecorder | None, asked_at: float) -> Timeline:
    entered = recorder.phase_entered_s if recorder is not None else {}
    now = time.time()
    load, steps = entered.get("load"), entered.get("first_step")
    return Timeline(
        start_s=None if load is None else load - asked_at,
        load_s=None if load is None else (steps or now) - load,
        steps_s=None if steps is None else now - steps,
        total_s=now - asked_at,
    )
