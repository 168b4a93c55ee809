"""What became of a probe, decided from what its process left behind."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.errors import ExecutorError
from autotune.executors.disk import disk_full, explaining_disk, task_disk_full
from autotune.executors.logs import EVENTS, STDERR, last_phase, tail, telling_line
from autotune.probe.result import Outcome, ProbeResult, Timeline, phase_name
from autotune.probe.spec import ProbeSpec
from autotune.units import format_gib
from autotune.worker import tasks
from autotune.worker.classify import classify_text

NEAR_LIMIT_RATIO = 0.9
"""Resident size over what there was, from which a kill counts as out-of-memory."""

OTHERS_RATIO = 0.5
"""Resident size over what there was, below which an out-of-memory kill was not for its sake."""

_LEFTOVERS = ("answer.json", "result.json", EVENTS, "stdout.log", STDERR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended, as seen from outside.

    Attributes:
        asked_at: When it was given its slot, in Unix seconds.
        exit_code: Exit status; None if a signal ended it or its end was not seen.
        signal: Number of the signal that ended it.
        timed_out_after_s: The limit it went over; None if it was not ended for that.
        server_lost: Whether the server that had started it died, so that nothing was seen.
        max_resident_bytes: Peak resident size.
        available_bytes: Host memory that was available when it started.
        oom_kills: Kills by the kernel's out-of-memory killer while it ran, as far as known.
        num_neighbours: Most probes that ran beside it.
    """

    asked_at: float
    exit_code: int | None = None
    signal: int | None = None
    timed_out_after_s: float | None = None
    server_lost: bool = False
    max_resident_bytes: int | None = None
    available_bytes: int | None = None
    oom_kills: int = 0
    num_neighbours: int = 0

    @property
    def words(self) -> str:
        """Return the end in words, such as ``killed by SIGSEGV``."""
        if self.server_lost:
            return "its server died, and the process with it"
        if self.signal is not None:
            return f"killed by {_signal_name(self.signal)}"
        return f"ended with exit code {self.exit_code}"

    def to_dict(self) -> dict[str, Any]:
        """Return what was seen as plain JSON values; what was not seen is left out."""
        values = {
            "exit_code": self.exit_code,
            "signal": None if self.signal is None else _signal_name(self.signal),
            "timed_out_after_s": self.timed_out_after_s,
            "server_lost": self.server_lost or None,
            "max_resident_bytes": self.max_resident_bytes,
            "available_bytes": self.available_bytes,
            "oom_kills": self.oom_kills or None,
        }
        return {name: value for name, value in values.items() if value is not None}


def write_request(spec: ProbeSpec, *, asked_at: float) -> None:
    """Make the probe's folder ready: nothing left of an earlier run, the request in place.

    Raises:
        ExecutorError: If the folder can't be written.
    """
    folder = Path(spec.folder)
    with explaining_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in _LEFTOVERS:
            (folder / name).unlink(missing_ok=True)
        for place in folder.glob("rank-*"):
            shutil.rmtree(place)
        tasks.write_json(folder / "spec.json", spec.to_dict())
        tasks.write_json(folder / "request.json", {"spec": spec.to_dict(), "asked_at": asked_at})


def conclude(
    spec: ProbeSpec,
    ending: Ending,
    how: Callable[[ProbeSpec, Ending], ProbeResult] | None = None,
) -> ProbeResult:
    """Return the result of an ended probe and leave it in its folder as ``result.json``.

    Args:
        spec: The probe's.
        ending: How its process ended.
        how: Decides what became of it; :func:`decide` by default.

    Raises:
        AutotuneError: The error that the probe ended with, if the search can't go on after it.
        ExecutorError: If the disk is full or the folder can't be written.
    """
    result = (how or decide)(spec, ending)
    result = replace(result, num_neighbours=ending.num_neighbours)
    timeline = replace(result.timeline, total_s=time.time() - ending.asked_at)
    result = replace(result, timeline=timeline)
    folder = Path(spec.folder)
    with explaining_disk(folder):
        tasks.write_json(folder / "result.json", result.to_dict())
    return result


def write_task(name: str, folder: Path, request: Mapping[str, Any]) -> None:
    """Leave a task's request in its folder.

    Raises:
        ExecutorError: If the folder can't be written.
    """
    try:
        tasks.write_json(folder / "request.json", dict(request))
    except OSError as error:
        raise task_disk_full(name, folder, request, error) from error


def task_answer(
    name: str, folder: Path, ending: Ending, *, request: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the answer that a task left.

    Args:
        name: The task.
        folder: Took its answer and its logs.
        ending: How its process ended.
        request: What it was asked for.

    Raises:
        AutotuneError: The error that the task answered with.
        ExecutorError: If it left no answer.
    """
    answer = tasks.read_answer(folder)
    if answer is not None:
        return answer
    if ending.exit_code == tasks.EXIT_DISK_FULL:
        raise task_disk_full(name, folder, request)
    words = ending.words
    if ending.timed_out_after_s is not None:
        words = f"not done after {ending.timed_out_after_s:g} s"
    said = tail(folder / STDERR, 2000).strip()
    raise ExecutorError(f"The task {name!r} failed: {words}" + (f"\n{said}" if said else "."))


def decide(spec: ProbeSpec, ending: Ending) -> ProbeResult:
    """Return what became of a probe.

    A whole answer is believed however the process ended after it; without one, how it ended and
    what it printed last decide.

    Raises:
        AutotuneError: The error that the probe answered with.
        ExecutorError: If the disk was full.
    """
    folder = Path(spec.folder)
    result = _answered(spec, tasks.read_answer(folder))
    if result is not None:
        if _lost_a_helper(result, ending):
            detail = f"the kernel's out-of-memory killer ended a helper process ({result.detail})"
            result = replace(result, outcome=Outcome.HOST_OOM, detail=detail)
        return replace(result, evidence={**ending.to_dict(), **result.evidence})
    if ending.exit_code == tasks.EXIT_DISK_FULL:
        raise disk_full(folder)
    last_words = tail(folder / STDERR)
    phase = last_phase(folder)
    outcome, detail = _explain(spec, ending, last_words=last_words, phase=phase)
    return ProbeResult(
        probe_id=spec.probe_id,
        outcome=outcome,
        detail=detail,
        traceback=last_words or None,
        phase=phase,
        evidence=ending.to_dict(),
        timeline=Timeline(),
    )


def _answered(spec: ProbeSpec, answer: Mapping[str, Any] | None) -> ProbeResult | None:
    try:
        result = ProbeResult.from_dict((answer or {})["result"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if (result.outcome is Outcome.OK) != (result.measurement is not None):
        return None
    return replace(result, probe_id=spec.probe_id)


def _lost_a_helper(result: ProbeResult, ending: Ending) -> bool:
    """Whether a data-loader process was taken by the kernel, which PyTorch reports as an error."""
    return (
        result.outcome is Outcome.CRASHED
        and ending.oom_kills > 0
        and "killed by signal" in result.detail
    )


def _explain(
    spec: ProbeSpec, ending: Ending, *, last_words: str, phase: str | None
) -> tuple[Outcome, str]:
    where = f" in {phase_name(phase)}" if phase else " before any phase"
    if ending.timed_out_after_s is not None:
        detail = f"not done after {ending.timed_out_after_s:g} s, ended{where}"
        return Outcome.TIMEOUT, f"{detail}; a higher --probe-timeout gives it more"
    if ending.server_lost:
        return Outcome.LOST, f"{ending.words}{where}"
    if ending.signal == signal.SIGKILL:
        resident = format_gib(ending.max_resident_bytes)
        if _was_for_others(ending):
            return (
                Outcome.LOST,
                f"{ending.words}{where}: the kernel ended it for want of memory, but it had only"
                f" {resident} of the {format_gib(ending.available_bytes)} that were available when"
                " it began, so that other work took the rest; end that and search again",
            )
        proof = _memory_proof(spec, ending)
        if proof:
            return Outcome.HOST_OOM, f"{ending.words}{where}: {proof}"
        return (
            Outcome.LOST,
            f"{ending.words}{where}, with no sign of memory pressure ({resident} resident)",
        )
    kind = spec.device.partition(":")[0]
    has_budget = spec.memory_budget_bytes is not None
    outcome = (
        Outcome.CRASHED
        if ending.exit_code == 0
        else classify_text(last_words, device_kind=kind, has_budget=has_budget)
    )
    why = "it left no result" if ending.exit_code == 0 else telling_line(last_words)
    return outcome, f"{ending.words}{where}" + (f": {why}" if why else "")


def _was_for_others(ending: Ending) -> bool:
    """Whether the kernel wanted memory that other processes took, and no verdict can be given."""
    resident, available = ending.max_resident_bytes, ending.available_bytes
    if resident is None or not available or not ending.oom_kills:
        return False
    return resident < OTHERS_RATIO * available


def _memory_proof(spec: ProbeSpec, ending: Ending) -> str:
    """Return why a SIGKILL was for want of memory; empty if nothing says so."""
    if ending.oom_kills > 0:
        return f"the kernel counts {ending.oom_kills} out-of-memory kill(s) meanwhile"
    limits = {"available on the host": ending.available_bytes}
    if spec.device.partition(":")[0] == "cpu":
        limits["in the budget"] = spec.memory_budget_bytes
    resident = ending.max_resident_bytes
    for name, limit in limits.items():
        if limit and resident is not None and resident >= NEAR_LIMIT_RATIO * limit:
            return f"{format_gib(resident)} were resident of {format_gib(limit)} {name}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
