"""What the host says about memory: the kernel's figures, cgroup limits included.

Imports nothing heavy, so that the parent may use it too.
"""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def _kib_fields(path: Path) -> dict[str, int]:
    """Return the ``Name: 123 kB`` lines of a /proc file, in bytes; empty if it is missing."""
    fields: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields


def process_memory() -> dict[str, int]:
    """Return this process's memory in bytes: ``VmRSS``, ``VmHWM`` (its peak), ``VmData``, ..."""
    return _kib_fields(_PROC / "self" / "status")


def reset_peak_resident() -> bool:
    """Set the kernel's peak-resident counter back to the present size; False if it can't be.

    Source: proc(5), ``/proc/pid/clear_refs``, value 5 (Linux 4.0 and later).
    """
    try:
        (_PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _cgroup_value(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def total_memory() -> int:
    """Return the bytes this process may use at most: physical memory or a lower cgroup limit."""
    total = _kib_fields(_PROC / "meminfo").get("MemTotal", 0)
    limit = _cgroup_value("memory.max")
    return min(total, limit) if limit is not None and total else (limit or total)


def available_memory() -> int:
    """Return the bytes that can be taken without swapping, cgroup limits included."""
    available = _kib_fields(_PROC / "meminfo").get("MemAvailable", 0)
    limit, current = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit is not None and current is not None:
        available = min(available, max(limit - current, 0))
    return available


def cpu_label() -> str:
    """Return the processor's name."""
    try:
        for line in (_PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"
