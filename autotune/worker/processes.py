"""Process groups: joining one, ending one, and knowing that nothing of it is left."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PREFER_AS_OOM_VICTIM = "800"

_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; end now if it has already."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> bool:
    """Become the parent of all descendants whose own parent ends; False where that can't be.

    Only then can the end of a probe's own children be waited for.
    """
    return _prctl is not None and _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def offer_to_oom_killer() -> None:
    """Make the kernel prefer this process as a victim over the search and the desktop."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_PREFER_AS_OOM_VICTIM)


def signal_group(leader_pid: int, number: signal.Signals) -> None:
    """Send a signal to the group led by a child that has not been reaped."""
    try:
        os.killpg(leader_pid, number)
    except ProcessLookupError:
        # Not yet a leader. The pid is still ours, for it has not been reaped.
        with suppress(ProcessLookupError):
            os.kill(leader_pid, number)
    except PermissionError:
        pass  # macOS: only a zombie is left


def group_exists(pgid: int) -> bool:
    """Return whether any process, zombies included, is in the group."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def reap_group(pgid: int) -> bool:
    """Reap dead children in the group; return whether none of our children is left in it."""
    while True:
        try:
            pid, _ = os.waitpid(-pgid, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False


def own_children() -> set[int]:
    """Return the pids of this process's children, adopted ones included; empty if unknown."""
    pids: set[int] = set()
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                pids.update(int(pid) for pid in (task / "children").read_text().split())
    return pids


def reap(pid: int) -> bool:
    """Reap one child if it is dead; return whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
