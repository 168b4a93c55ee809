"""What the host says about memory: the kernel's figures, cgroup limits included.

Imports nothing heavy, so that the parent may use it too.
"""

from __future__ import annotations

import os
from pathlib import Path

MALLOC_ENV = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 19),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 28),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MALLOC_ARENA_MAX": "1",
}
"""Environment for training on the CPU: glibc serves tensors from mappings of their own.

By default glibc raises its mmap threshold to 32 MiB as blocks are freed, and gives threads heaps
of their own (mallopt(3)); tensors then share heaps whose holes stay resident, so that one
candidate's peak resident size differs by several percent from probe to probe. Fixed, it hardly
does, and it is lower; page faults are the price. With 1 MiB the demo's peak still lay up to 4 %
apart, with 128 KiB more than half of the rate was lost. benchmarks/malloc.py measures them side by
side; the README has the figures. Exported configurations carry the same variables, so that the
real run has the memory that was measured.
"""

ONEDNN_ENV = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Environment that bounds what oneDNN and PyTorch keep per shape of a matrix product.

Both caches hold 1,024 compiled products by default, each with memory of its own. Every new length
of a batch adds some, so that a real training grows far beyond what a probe of a few steps sees:
on the demo's model from 1.0 GiB after 3 steps to 1.4 after 40, against 0.97 after 40 with room for
64, at about the same rate (78 and 84 s for the 40 steps). With room for 16 it was 0.90, but what
a step compiles anew made the peak differ by more than 2 % from probe to probe.
"""

MALLOC_PAD_BYTES = 1 << 26
"""Reserved beyond what the heap needs, by the setting above; never resident as a whole."""

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


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


def process_env(device: str, processes: int = 1) -> dict[str, str]:
    """Return what must be set before a process that uses ``device`` starts.

    Several ``processes`` share the cores.

    ``auto`` is taken for the CPU where no NVIDIA device file exists; a wrong guess costs a second
    worker server, nothing else.
    """
    on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
    if not on_cpu:
        return {}
    # A user who has tuned them knows better.
    chosen = {} if any(name.startswith("MALLOC_") for name in os.environ) else dict(MALLOC_ENV)
    chosen.update({k: v for k, v in ONEDNN_ENV.items() if k not in os.environ})
    # `trl` starts training by `accelerate launch`, which gives it one thread unless told otherwise
    # (accelerate/commands/launch.py, num_cpu_threads_per_process): half the rate on two cores.
    chosen["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(
        max(num_threads() // processes, 1)
    )
    return chosen


def num_threads() -> int:
    """Return the cores that this process may use, for a thread each, as PyTorch counts them.

    Hardware threads of one core count once. Source: sysfs, ``thread_siblings_list``.
    """
    try:
        usable: set[int] = set(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1
    return len({_siblings(number) for number in usable})


def _siblings(number: int) -> str:
    try:
        return (_CPUS / f"cpu{number}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(number)


def cpu_use() -> tuple[float, float] | None:
    """Return seconds of processor time: used by others than this process, and passed on all cores.

    Time stolen by a hypervisor counts as used by others. None where the kernel does not tell.
    Source: proc(5), first line of ``/proc/stat``, in clock ticks.
    """
    try:
        fields = [int(word) for word in (_PROC / "stat").read_text().split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, idle, waiting, irq, softirq, steal = fields
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    busy_s = (user + nice + system + irq + softirq + steal) / ticks_per_s
    own = os.times()
    return busy_s - own.user - own.system, busy_s + (idle + waiting) / ticks_per_s


def usable_cpus() -> int:
    """Return how many processors this process may use; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


def cpu_label() -> str:
    """Return the processor's name."""
    try:
        for line in (_PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"
