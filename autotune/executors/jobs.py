"""What the dispatcher runs: a job, in a slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.executors.connection import ServerConnection
from autotune.executors.evidence import Ending


@dataclass(frozen=True, slots=True)
class Slot:
    """One place to run.

    Attributes:
        device: Device name as the probe sees it.
        env: Environment variables that show it that device alone.
    """

    device: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One task to run in a process of its own.

    Attributes:
        task: Name of the worker's task.
        timeout_s: Wall-clock limit from the start of the process.
        process_env: What must be set before torch is imported.
        begin: Told the slot and the time; makes the folder ready and returns it.
        finish: Turns the ending into what the future gives.
    """

    task: str
    timeout_s: float
    process_env: Mapping[str, str]
    begin: Callable[[Slot, float], Path]
    finish: Callable[[Ending], Any]
    future: Future[Any] = field(default_factory=Future)
    id: str = ""
    folder: Path | None = None
    slot: Slot | None = None
    server: ServerConnection | None = None
    asked_at: float = 0.0
    pid: int | None = None
    deadline_s: float | None = None
    timed_out: bool = False
    num_neighbours: int = 0
