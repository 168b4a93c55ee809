"""Virtual probes of a search's candidates on the card that stands for its real device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune import standin
from autotune.devices import host
from autotune.executors.base import Executor
from autotune.plan import PREDICTED_FIRST_WORST, PREDICTED_ROWS, Plan, predicted_steps
from autotune.probe.spec import ProbeSpec
from autotune.report.trial import Trial
from autotune.virtual.cards import Card

RATES_TIMEOUT_S = 30.0


def not_screened(plan: Plan) -> str:
    """Return why a search's candidates cannot be predicted first; empty if they can."""
    device = plan.context.device
    if device.kind not in ("cpu", "cuda"):
        return f"no card stands for a device of the kind {device.kind!r}"
    if plan.context.num_processes > 1:
        return "predictions are of one process"
    return ""


def without_device(config: Mapping[str, Any], plan: Plan) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a configuration without what is there for the real device, and its variables."""
    kept = {key: value for key, value in config.items() if key != "use_cpu"}
    of_device = host.process_env(plan.context.device.kind, plan.context.num_processes)
    env = {key: str(value) for key, value in (kept.pop("env", None) or {}).items()}
    env = {key: value for key, value in env.items() if key not in of_device}
    return {**kept, "env": env} if env else kept, env


def card_for(plan: Plan, executor: Executor, baseline: Trial | None) -> Card | None:
    """Return the card that stands for a search's device; None if nothing is known of such a one.

    Args:
        plan: The search's.
        executor: Measures how fast the processor is, where that is the device.
        baseline: Tells what a process takes before its model is loaded; None if not known.

    Raises:
        AutotuneError: If it cannot be measured.
    """
    device = plan.context.device
    if device.kind != "cpu":
        return standin.of_accelerator(device)
    request = {"process_env": host.process_env("cpu", plan.context.num_processes)}
    rates = executor.run_task("rates", request, timeout_s=RATES_TIMEOUT_S)
    loaded = None if baseline is None else _loaded_bytes(baseline)
    return standin.of_cpu(device, rates, standin.cpu_context_bytes(loaded, _weights_bytes(plan)))


def spec_for(plan: Plan, candidate: Mapping[str, Any], device: str, folder: Path) -> ProbeSpec:
    """Return the virtual probe of a candidate, without a limit, so that each gives a peak.

    Args:
        plan: The search's.
        candidate: Knob name to value.
        device: Name of the stand-in, ``virtual:FILE.toml``.
        folder: Of the probe; it is made.
    """
    request = plan.request
    config, process_env = without_device(plan.config(candidate), plan)
    folder.mkdir(parents=True)
    accumulation = int(config.get("gradient_accumulation_steps", 1))
    return ProbeSpec(
        probe_id=folder.name,
        folder=str(folder),
        trainer=request.trainer,
        config=config,
        device=device,
        data_folder=plan.data_folder,
        beyond_device=True,
        warmup_steps=0,
        measured_steps=min(request.measured_steps, predicted_steps(accumulation)),
        rows_per_step=PREDICTED_ROWS,
        first_worst_steps=PREDICTED_FIRST_WORST,
        representative=True,
        accumulation_steps=accumulation,
        phases=request.phases,
        process_env=process_env,
        timeout_s=request.probe_timeout_s,
        seed=request.seed,
        trust_remote_code=request.trust_remote_code,
    )


def write_card(card: Card, path: Path) -> str:
    """Write a stand-in to a file, and return the device name that stands for it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(standin.as_toml(card), encoding="utf-8")
    return f"virtual:{path}"


def _weights_bytes(plan: Plan) -> int:
    """Return what the baseline's weights take, in bytes."""
    dtype = str(plan.space.config(plan.space.baseline).get("dtype", "float32"))
    return plan.context.model.num_parameters * (4 if dtype == "float32" else 2)


def _loaded_bytes(baseline: Trial) -> int | None:
    if baseline.measurement is None or "load" not in baseline.measurement.phases:
        return None
    return baseline.measurement.phases["load"].resident_bytes
