"""What a worker process can be asked to do, and the plain-JSON frame around it.

A task is a function from a request to an answer, both plain JSON. Its folder holds
``request.json`` before and ``answer.json`` after; the answer is written to a temporary name and
renamed, so that a half-written one is never read.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from autotune import errors

TASKS = {
    "probe": "autotune.worker.run:run_probe",
    "launch": "autotune.worker.ranks:launch",
    "rank": "autotune.worker.ranks:check_and_run",
    "prepare": "autotune.worker.prepare:prepare",
    "describe": "autotune.worker.prepare:describe",
    "rates": "autotune.worker.rates:measure",
    "check_virtual": "autotune.worker.prepare:check_virtual",
    "demo": "autotune.worker.demo:make",
}
PID = "pid"
"""In a rank's folder: its process id."""

EXIT_DISK_FULL = 74
"""Exit code of a process that could not write its answer for want of disk space."""


def rank_folder(folder: Path, rank: int) -> Path:
    """Return the folder of one of a probe's processes."""
    return folder / f"rank-{rank}"


def rank_pids(folder: Path) -> set[int]:
    """Return the process ids that a probe's processes have left; empty if it has only one."""
    found = set()
    for path in folder.glob(f"rank-*/{PID}"):
        with suppress(OSError, ValueError):
            found.add(int(path.read_text()))
    return found


def load(name: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the task called ``name``, or the function named ``module:function``."""
    module_name, _, attribute = TASKS.get(name, name).partition(":")
    return getattr(import_module(module_name), attribute)  # type: ignore[no-any-return]


def run(name: str, folder: Path) -> None:
    """Run a task on the request in ``folder`` and leave its answer there.

    An :class:`AutotuneError` is an answer too: the parent raises it again.
    """
    request = json.loads((folder / "request.json").read_text())
    try:
        answer = {"ok": load(name)(request)}
    except errors.AutotuneError as error:
        answer = {
            "error": {
                "type": type(error).__name__,
                "message": error.message,
                "hint": error.hint,
            }
        }
    write_json(folder / "answer.json", answer)


def read_answer(folder: Path) -> dict[str, Any] | None:
    """Return a task's answer; None if it left none that can be read.

    Raises:
        AutotuneError: The error that the task ended with.
    """
    try:
        answer = json.loads((folder / "answer.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(answer, dict):
        return None
    if "error" in answer:
        fields = answer["error"]
        kind = getattr(errors, fields["type"], errors.AutotuneError)
        raise errors._rebuild(kind, fields["message"], fields["hint"])
    return answer.get("ok")


def is_disk_full(error: BaseException) -> bool:
    """Return whether ``error`` says that there is no disk space left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def ran_out_of_disk(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, says that there is no disk space left.

    Libraries wrap it: ``datasets`` raises its own error from the one of the system.
    """
    seen: set[int] = set()
    item: BaseException | None = error
    while item is not None and id(item) not in seen:
        if is_disk_full(item):
            return True
        seen.add(id(item))
        item = item.__cause__ or item.__context__
    return False


def write_json(path: Path, value: object) -> None:
    """Write ``value`` so that ``path`` holds either the old or the whole new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
