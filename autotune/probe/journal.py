"""Append-only JSON lines with a schema number: what a search found, safe against every crash.

A line is written, flushed and synced before anything else happens with what it says. A last line
that was cut off by a crash is dropped when read; damage anywhere else is an error that names the
line, since silently skipping it would lose a result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import JournalError
from autotune.probe import typed

SCHEMA = 1


def append(path: Path, kind: str, value: Mapping[str, Any]) -> None:
    """Add one record.

    Raises:
        JournalError: If it cannot be written, such as on a full disk.
    """
    line = json.dumps({"schema": SCHEMA, "kind": kind, **value}) + "\n"
    try:
        drop_torn_line(path)
        with path.open("a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise JournalError(
            f"{path.name} cannot be written: {error.strerror or error}.",
            hint="Free space on the disk and continue with --resume; finished probes are kept.",
        ) from error


def read(path: Path) -> list[dict[str, Any]]:
    """Return all whole records, oldest first; see :func:`read_numbered`."""
    return [record for _, record in read_numbered(path)]


def damaged(path: Path, line: int, reason: str = "") -> JournalError:
    """Return the error for a line that holds no record that can be understood."""
    return JournalError(
        f"{path}, line {line} is damaged{f': {reason}' if reason else ''}.",
        hint="Delete that line to go on without its result; each probe's own result.json "
        "is kept under probes/.",
    )


def read_numbered(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return all whole records, oldest first, each with its line; empty if there is no file.

    Raises:
        JournalError: If a line other than the last cannot be read, or the schema is newer.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise JournalError(
            f"{path} cannot be read: {error.strerror or error}.",
            hint="Mend what keeps it from being read, and continue with --resume.",
        ) from error
    records = []
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = typed.loads(line)
            schema = int(record["schema"])
        except (ValueError, KeyError, TypeError) as error:
            if number == last and number == len(lines) - 1:
                break  # no newline after it: the write was cut off
            raise damaged(path, number + 1) from error
        if schema > SCHEMA:
            raise JournalError(
                f"{path} was written by a newer version (schema {schema}).",
                hint="Update autotune to read it.",
            )
        records.append((number + 1, record))
    return records


def drop_torn_line(path: Path) -> None:
    """End the last line, or remove it if it was cut off, so that the next record has its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        whole = file.read()
        start = whole.rfind(b"\n") + 1
        try:
            json.loads(whole[start:])
        except ValueError:
            file.truncate(start)
        else:
            file.write(b"\n")
