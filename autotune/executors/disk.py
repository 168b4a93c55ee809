"""Errors of a disk that is full or may not be written: which one it is, and what to do."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.errors import ExecutorError
from autotune.units import MIB
from autotune.worker import tasks

FULL_BELOW_BYTES = 16 * MIB
"""What could not be written was deleted since, so that a full disk has a little space again."""


@contextmanager
def explaining_disk(folder: Path) -> Iterator[None]:
    """Turn a failure to write into an ExecutorError that says what to do."""
    try:
        yield
    except OSError as error:
        if tasks.is_disk_full(error):
            raise disk_full(folder) from error
        raise ExecutorError(
            f"The folder {folder} can't be written ({error}).",
            hint="Choose a run folder that you may write to.",
        ) from error


def disk_full(folder: Path) -> ExecutorError:
    """Return the error for a probe's folder on a disk without space."""
    return ExecutorError(
        f"The disk that holds {folder} is full.",
        hint="Free some space and resume the search; no candidate was judged by it.",
    )


def task_disk_full(
    name: str, folder: Path, request: Mapping[str, Any], error: OSError | None = None
) -> ExecutorError:
    """Return the error for a task that could not write.

    A task writes to several places: the folder that it was asked to fill, the hub's cache,
    temporary files. Those without space are named; all of them if there is some by now.

    Args:
        name: The task.
        folder: Takes its request and its answer; a temporary one, which is gone by now.
        request: What it was asked for.
        error: What went wrong in the task's own folder; None if its process only said "full".
    """
    if error is not None and not tasks.is_disk_full(error):
        return ExecutorError(
            f"The temporary folder {folder.parent} can't be written ({error.strerror or error}).",
            hint="Set TMPDIR to a folder that you may write to.",
        )
    places = {
        str(request.get("folder") or folder.parent): "",
        os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface"): " (HF_HOME)",
        str(folder.parent): " (TMPDIR)",
    }
    # A look without a run folder works in a temporary one, which is gone by now as well.
    if Path(str(request.get("folder"))).is_relative_to(folder.parent):
        places.pop(str(request.get("folder")), None)
    if error is not None:
        places = {str(folder.parent): " (TMPDIR)"}
    full = [place for place in places if _free_bytes(place) < FULL_BELOW_BYTES]
    named = " or ".join(f"{place}{places[place]}" for place in full or places)
    # Not --resume: before the data is prepared there is nothing to resume yet.
    return ExecutorError(
        f"The disk is full, so that the task {name!r} could not be done: {named}.",
        hint="Free some space there, or choose another place, and give the same command again; "
        "nothing that was measured is lost.",
    )


@contextmanager
def temporary_folder(prefix: str = "autotune-task-") -> Iterator[Path]:
    """Make a temporary folder, and take it away again.

    Raises:
        ExecutorError: If there is no place for one.
    """
    try:
        # Whoever gives up waiting leaves before the task has stopped writing.
        temporary = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise ExecutorError(
            f"A temporary folder can't be made ({error.strerror or error}).",
            hint="Free some space, or set TMPDIR to a folder that you may write to.",
        ) from error
    with temporary as name:
        yield Path(name)


def _free_bytes(place: str) -> float:
    """Return what is free on the disk of ``place``, which need not exist yet."""
    path = Path(place)
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return math.inf
