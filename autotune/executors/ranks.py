"""What became of a probe in several processes, decided from what each of them left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.executors import evidence
from autotune.executors.evidence import Ending
from autotune.executors.logs import EVENTS, STDERR, tail, telling_line
from autotune.probe.result import Outcome, ProbeResult, Timeline
from autotune.probe.spec import ProbeSpec
from autotune.probe.together import together
from autotune.worker import tasks

_OUT_OF_MEMORY = (Outcome.DEVICE_OOM, Outcome.HOST_OOM)
_UNSEEN: Mapping[str, Any] = {
    "exit_code": None,
    "signal": None,
    "max_resident_bytes": None,
    "ended_at": None,
}
"""Of a rank whose launcher did not live to tell."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """One rank's failure, and when it was seen, in Unix seconds."""

    rank: int
    result: ProbeResult
    at: float


def decide(spec: ProbeSpec, ending: Ending) -> ProbeResult:
    """Return the one outcome of a probe whose processes were launched together.

    Out of memory on any of them is that; else the first failure decides, since those that follow
    it are mostly of processes that lost their peers.

    Args:
        spec: The probe's.
        ending: Of the process that launched the others.

    Raises:
        AutotuneError: An error that one of them answered with.
        ExecutorError: If the disk was full.
    """
    answer = tasks.read_answer(Path(spec.folder))
    endings = [_UNSEEN] * spec.processes if answer is None else answer["ranks"]
    results = [_of_rank(spec, rank, seen, ending) for rank, seen in enumerate(endings)]
    failures = [
        _Failure(rank, result, _failed_at(spec, rank, seen))
        for rank, (result, seen) in enumerate(zip(results, endings, strict=True))
        if result is not None and result.outcome is not Outcome.OK
    ]
    if failures:
        first = min(failures, key=_order)
        return _as_one(spec, first.result, rank=first.rank)
    missing = [rank for rank, item in enumerate(results) if item is None]
    if missing and answer is None:
        return _unlaunched(spec, ending, missing)
    if missing:
        return _silent(spec, ending, str((answer or {})["launcher"]), missing)
    finished = [item for item in results if item is not None]
    measured = [item.measurement for item in finished if item.measurement is not None]
    return replace(
        finished[0],
        measurement=together(measured),
        evidence={**ending.to_dict(), "processes": spec.processes},
    )


def _order(failure: _Failure) -> tuple[int, float]:
    outcome = failure.result.outcome
    if outcome in _OUT_OF_MEMORY:
        return 0, failure.at
    # Nobody but the kernel or a user kills; the others only lose their peer by it.
    return (1 if outcome is Outcome.LOST else 2), failure.at


def _of_rank(
    spec: ProbeSpec, rank: int, seen: Mapping[str, Any], launcher: Ending
) -> ProbeResult | None:
    """Return what became of one rank; None if it was ended because of another, or is not known."""
    own = _spec_of(spec, rank)
    by_itself = seen["exit_code"] is not None or seen["signal"] is not None
    if not by_itself and tasks.read_answer(Path(own.folder)) is None:
        return None
    return evidence.decide(
        own,
        replace(
            launcher,
            exit_code=seen["exit_code"],
            signal=seen["signal"],
            max_resident_bytes=seen["max_resident_bytes"],
        ),
    )


def _failed_at(spec: ProbeSpec, rank: int, seen: Mapping[str, Any]) -> float:
    try:
        return (tasks.rank_folder(Path(spec.folder), rank) / "answer.json").stat().st_mtime
    except OSError:
        return float(seen["ended_at"] or 0.0)


def _unlaunched(spec: ProbeSpec, ending: Ending, missing: Sequence[int]) -> ProbeResult:
    """Return what became of a probe whose launcher left no answer: a time limit, above all.

    Of the ranks that left none either, the one that got least far tells where it was.
    """
    slowest = min(missing, key=lambda rank: _size(Path(_spec_of(spec, rank).folder) / EVENTS))
    result = evidence.decide(_spec_of(spec, slowest), ending)
    return _as_one(spec, result, rank=slowest)


def _silent(spec: ProbeSpec, ending: Ending, launcher: str, missing: Sequence[int]) -> ProbeResult:
    """Return the result where a rank is missing and none has failed."""
    last_words = tail(Path(spec.folder) / STDERR)
    numbers = ", ".join(str(rank) for rank in missing)
    why = launcher or f"process {numbers} of {spec.processes} left no result"
    said = "" if launcher else telling_line(last_words)
    return ProbeResult(
        probe_id=spec.probe_id,
        outcome=Outcome.CRASHED,
        detail=f"accelerate launch: {why}" + (f": {said}" if said else ""),
        traceback=last_words or None,
        evidence=ending.to_dict(),
        timeline=Timeline(),
    )


def _as_one(spec: ProbeSpec, result: ProbeResult, *, rank: int) -> ProbeResult:
    return replace(
        result,
        probe_id=spec.probe_id,
        measurement=None,
        detail=f"process {rank} of {spec.processes}: {result.detail}",
        evidence={**result.evidence, "processes": spec.processes, "rank": rank},
    )


def _spec_of(spec: ProbeSpec, rank: int) -> ProbeSpec:
    return replace(spec, folder=str(tasks.rank_folder(Path(spec.folder), rank)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
