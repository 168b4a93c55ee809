"""Files that users name: what would be waited for, or has no end, is not opened."""

from __future__ import annotations

import stat
from pathlib import Path

from autotune.errors import UsageError

_HANDED_OVER = ("/dev/fd/", "/dev/stdin", "/proc/")
"""Where a shell leaves the pipes that it hands over, as in ``<(autotune export RUN)``."""


def check_regular(path: Path) -> None:
    """Refuse a named pipe, a socket or a device; a missing file is left to who opens it.

    Raises:
        UsageError: If it is one.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    is_handed_over = stat.S_ISFIFO(mode) and str(path).startswith(_HANDED_OVER)
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_handed_over):
        raise UsageError(f"{path} is no regular file.", hint="Give the name of a file.")
