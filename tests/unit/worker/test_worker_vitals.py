from __future__ import annotations

from pathlib import Path

import pytest

from autotune.worker import vitals

GIB = 1 << 30
V2_EVENTS = "low 0\nhigh 0\nmax 12\noom 2\noom_kill 3\noom_group_kill 0\n"
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"


@pytest.fixture
def host(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    write(proc / "vmstat", "pgfault 123456\noom_kill 7\n")
    cgroup.mkdir()
    return proc, cgroup


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_2_counts_its_own_kills(host: tuple[Path, Path]) -> None:
    proc, cgroup = host
    write(proc / "self" / "cgroup", "0::/user.slice/job\n")
    write(cgroup / "user.slice" / "job" / "memory.events", V2_EVENTS)
    assert vitals.oom_kill_count(proc, cgroup) == 3


def test_inside_a_container_the_mount_itself_is_the_group(host: tuple[Path, Path]) -> None:
    proc, cgroup = host
    write(proc / "self" / "cgroup", "0::/docker/0123abcd\n")
    write(cgroup / "memory.events", V2_EVENTS)
    assert vitals.oom_kill_count(proc, cgroup) == 3


def test_version_1_is_read_where_version_2_has_no_memory_controller(
    host: tuple[Path, Path],
) -> None:
    proc, cgroup = host
    write(proc / "self" / "cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")
    write(cgroup / "memory" / "job" / "memory.oom_control", V1_CONTROL)
    assert vitals.oom_kill_count(proc, cgroup) == 5


@pytest.mark.parametrize("groups", [None, "0::/\n", "garbage\n"])
def test_without_a_group_the_machine_counts(host: tuple[Path, Path], groups: str | None) -> None:
    proc, cgroup = host
    if groups is not None:
        write(proc / "self" / "cgroup", groups)
    assert vitals.oom_kill_count(proc, cgroup) == 7


def test_unknown_is_none(tmp_path: Path) -> None:
    assert vitals.oom_kill_count(tmp_path, tmp_path) is None
    assert vitals.available_bytes(tmp_path, tmp_path) is None


def test_available_is_the_hosts_without_limits(host: tuple[Path, Path]) -> None:
    assert vitals.available_bytes(*host) == 8 * GIB


def test_a_limit_further_up_binds(host: tuple[Path, Path]) -> None:
    proc, cgroup = host
    write(proc / "self" / "cgroup", "0::/slice/job\n")
    write(cgroup / "slice" / "job" / "memory.events", V2_EVENTS)
    write(cgroup / "slice" / "job" / "memory.max", "max\n")
    write(cgroup / "slice" / "job" / "memory.current", f"{GIB}\n")
    write(cgroup / "slice" / "memory.max", f"{4 * GIB}\n")
    write(cgroup / "slice" / "memory.current", f"{3 * GIB}\n")
    assert vitals.available_bytes(proc, cgroup) == GIB


def test_version_1_limits_bind_too(host: tuple[Path, Path]) -> None:
    proc, cgroup = host
    write(proc / "self" / "cgroup", "4:memory:/job\n")
    write(cgroup / "memory" / "job" / "memory.oom_control", V1_CONTROL)
    write(cgroup / "memory" / "job" / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(cgroup / "memory" / "job" / "memory.usage_in_bytes", f"{3 * GIB}\n")
    assert vitals.available_bytes(proc, cgroup) == 0
