"""What the kernel tells about memory pressure: the evidence for a kill without a message."""

from __future__ import annotations

from pathlib import Path


def oom_kill_count(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return how many processes the out-of-memory killer has ended here; None if unknown.

    Reads this process's own memory cgroup, else the whole machine. A rise says that some process
    was killed; whose it was follows from who died by SIGKILL at the same time.
    """
    v2, v1 = memory_cgroups(proc, cgroup)
    paths = [proc / "vmstat"]
    if v1 is not None:
        paths.insert(0, v1 / "memory.oom_control")
    if v2 is not None:
        paths.insert(0, v2 / "memory.events")
    counts = (_field(path, "oom_kill") for path in paths)
    return next((count for count in counts if count is not None), None)


def available_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the bytes a new process could take, cgroup limits included; None if unknown."""
    kib = _field(proc / "meminfo", "MemAvailable:")
    rooms = [] if kib is None else [kib * 1024]
    v2, v1 = memory_cgroups(proc, cgroup)
    for folder, limit_name, used_name, root in (
        (v2, "memory.max", "memory.current", cgroup),
        (v1, "memory.limit_in_bytes", "memory.usage_in_bytes", cgroup / "memory"),
    ):
        # A limit further up binds as well.
        while folder is not None:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                rooms.append(max(limit - used, 0))
            folder = folder.parent if folder != root and root in folder.parents else None
    return min(rooms) if rooms else None


def memory_cgroups(proc: Path, cgroup: Path) -> tuple[Path | None, Path | None]:
    """Return the folders of this process's memory cgroup, version 2 and version 1."""
    v2 = v1 = None
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None, None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            v2 = _existing(cgroup, path, "memory.events")
        elif "memory" in controllers.split(","):
            v1 = _existing(cgroup / "memory", path, "memory.oom_control")
    return v2, v1


def _existing(mount: Path, path: str, file: str) -> Path | None:
    # Inside a container the path is often the host's, while the mount shows only the container.
    for folder in (mount / path.strip("/"), mount):
        if (folder / file).exists():
            return folder
    return None


def _field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == name:
                return int(words[1])
    except (OSError, ValueError):
        pass
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
