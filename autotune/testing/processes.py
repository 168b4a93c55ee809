"""Asking the kernel which processes are there (Linux)."""

from __future__ import annotations

import time
from pathlib import Path


def members(pgid: int) -> list[int]:
    """Return the pids of the live processes (no zombies) in a process group."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            state, group = _stat(int(folder.name))
            if group == pgid and state not in ("Z", "X", ""):
                found.append(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    return _stat(pid)[0] not in ("Z", "X", "")


def wait_until_gone(*pids: int, within_s: float) -> bool:
    """Return whether all processes have ended within that time."""
    deadline = time.monotonic() + within_s
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _stat(pid: int) -> tuple[str, int]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", -1
    # The command, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[2])
