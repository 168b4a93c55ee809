"""What a probe's logs tell after its end."""

from __future__ import annotations

import json
from pathlib import Path

EVENTS = "events.jsonl"
STDERR = "stderr.log"
_TAIL_LENGTH = 8192
_READ_BYTES = 1 << 17


def last_phase(folder: Path) -> str | None:
    """Return the last phase that a probe noted; None if it noted none."""
    try:
        lines = (folder / EVENTS).read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            phase = json.loads(line)["phase"]
        except (ValueError, KeyError, TypeError):
            continue  # the line that was being written at the end
        if isinstance(phase, str):
            return phase
    return None


def telling_line(text: str) -> str:
    """Return the line of a process's last words that says most about its end."""
    said, fatal, trace = text.partition("Fatal Python error:")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines and fatal:
        # Nothing but faulthandler's stack, innermost frame first.
        lines = [line.strip() for line in trace.splitlines() if line.startswith("  File ")][:1]
    return lines[-1] if lines else ""


def tail(path: Path, length: int = _TAIL_LENGTH) -> str:
    """Return the end of a log, from a line's beginning; empty if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _READ_BYTES, 0))
            text = file.read(_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
    # faulthandler lists a thousand modules in one line.
    lines = [line for line in text.splitlines() if not line.startswith("Extension modules:")]
    text = "\n".join(lines).strip()
    end = text[-length:]
    return end if len(text) <= length else end.partition("\n")[2] or end
