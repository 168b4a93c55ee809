"""A look at everything a search depends on, each with a verdict and a remedy."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autotune import objectives
from autotune.errors import AutotuneError
from autotune.executors import base as executors
from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import describe
from autotune.space import knob
from autotune.space.context import DeviceInfo
from autotune.space.knobs import vllm
from autotune.units import GIB, format_gib
from autotune.virtual import cards

NEEDED = ("optuna", "torch", "transformers", "trl", "peft", "accelerate", "datasets")
OPTIONAL = {
    "bitsandbytes": "8-bit and 4-bit bases, 8-bit optimizers",
    "kernels": "kernels from the hub: use_kernels, attention kernels",
    "flash-attn": "flash_attention_2",
    "vllm": "use_vllm of GRPO and RLOO ('.[vllm]' in a checkout)",
    "matplotlib": "--plot of autotune lengths and estimate",
    "optuna-dashboard": "looking at a study in the browser",
}
MIN_DISK_BYTES = GIB
CHECK_TIMEOUT_S = 120.0
MARKS = {"ok": "ok  ", "absent": "--  ", "broken": "warn", "problem": "FAIL"}
LEGEND = "ok: there. --: optional and not there. warn: left out. FAIL: no search can run."


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        passed: Whether a search can run with it as it is.
        detail: What was found.
        hint: What to do; empty if nothing.
        state: ``ok``; ``absent``: optional and not there; ``broken``: there, and left out;
            ``problem``: no search can run.
    """

    name: str
    passed: bool
    detail: str
    hint: str = ""
    state: str = ""

    def __post_init__(self) -> None:
        if not self.state:
            object.__setattr__(self, "state", "ok" if self.passed else "problem")

    def line(self) -> str:
        """Return one line for people."""
        hint = f"  ->  {self.hint}" if self.hint else ""
        return f"{MARKS[self.state]} {self.name}: {self.detail}{hint}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def examine(device: str) -> list[Finding]:
    """Return all findings; starts a worker on ``device`` to see what it sees."""
    findings = [_python(), *_packages(), _disk(), *_plugins()]
    if all(finding.passed for finding in findings):
        findings += _worker(device)
    return findings


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding(name="python", passed=sys.version_info >= (3, 11), detail=found)


def _packages() -> list[Finding]:
    findings = []
    for name in NEEDED:
        found = _installed(name)
        findings.append(
            Finding(
                name=name,
                passed=found is not None,
                detail=found or "missing",
                hint="" if found else "pip install 'trl-autotune[trl]' ('.[trl]' in a checkout)",
            )
        )
    for name, purpose in OPTIONAL.items():
        found = _installed(name)
        detail = found or f"not installed; optional, for {purpose}"
        state = "ok" if found else "absent"
        findings.append(Finding(name=name, passed=True, detail=detail, state=state))
    return findings


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    return Finding(
        name="disk",
        passed=free >= MIN_DISK_BYTES,
        detail=f"{format_gib(free)} free here",
        hint="" if free >= MIN_DISK_BYTES else "free at least 1 GiB, or use --run-dir elsewhere",
    )


def _plugins() -> list[Finding]:
    findings = []
    for registry in (
        knob.registry,
        objectives.registry,
        executors.registry,
    ):
        registry.names()  # loads them
        for name, reason in registry.broken.items():
            findings.append(_broken(f"{registry.kind} {name}", reason))
    return findings


def _broken(name: str, reason: str) -> Finding:
    return Finding(
        name=f"plug-in {name}",
        passed=True,
        detail=f"cannot be loaded and is left out: {reason}",
        hint="update or uninstall the package that brings it",
        state="broken",
    )


def _worker(device: str) -> list[Finding]:
    executor = SubprocessExecutor(devices=(device,))
    try:
        seen = describe(device, executor)
        virtual = _virtual(executor)
    except AutotuneError as error:
        return [Finding(name="worker", passed=False, detail=error.message, hint=error.hint)]
    finally:
        executor.shutdown()
    found = seen["device"]
    bf16 = "with bfloat16" if found["supports_bf16"] else "without bfloat16"
    return [
        *(_broken(name, reason) for name, reason in seen["broken_plugins"].items()),
        Finding(name="worker", passed=True, detail="starts and answers"),
        Finding(
            name="device",
            passed=True,
            detail=f"{found['name']} ({found['label']}), {format_gib(found['free_bytes'])} of "
            f"{format_gib(found['total_bytes'])} free, {bf16}",
        ),
        virtual,
        _vllm(DeviceInfo.from_dict(found), seen["packages"]),
    ]


def _vllm(device: DeviceInfo, packages: Mapping[str, str]) -> Finding:
    """Return whether vLLM's knobs are searched on the device, or why not."""
    name, reason = "knobs of vLLM", vllm.why_inactive(device, packages)
    if reason is None:
        how = "modelled, as is all of vLLM there" if device.is_virtual else "measured"
        return Finding(name=name, passed=True, detail=f"searched, and {how}, in GRPO and RLOO")
    return Finding(
        name=name,
        passed=True,
        detail=f"{', '.join(vllm.NAMES)} are not searched here: {reason}",
        hint="on --device virtual:CARD they are, modelled",
        state="absent",
    )


def _virtual(executor: SubprocessExecutor) -> Finding:
    """Return whether probes can run on cards that are not there."""
    name, num_cards = "virtual cards", len(cards.catalogue())
    try:
        executor.run_task("check_virtual", {}, timeout_s=CHECK_TIMEOUT_S)
    except AutotuneError as error:
        return Finding(
            name=name,
            passed=True,
            detail=f"probes on them cannot run here: {error.message}",
            hint=error.hint,
            state="absent",
        )
    return Finding(
        name=name,
        passed=True,
        detail=f"probes on them run here; {num_cards} cards are known (autotune gpus)",
    )
