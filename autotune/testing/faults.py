"""Trainer adapters that end in every way a training run can end.

Named in a spec as ``trainer="autotune.testing.faults:Hangs"``. The process is real, and so is its
end; only the training is not.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from autotune.devices.base import DeviceBackend
from autotune.probe.spec import ProbeSpec
from autotune.testing import processes
from autotune.trainers.base import Recorder, TrainingSession
from autotune.trainers.schedule import num_steps

GROUP_FILE = "group.json"
"""In the probe's folder: the process group and the pids that the fault started."""

_UNMEASURED_STEPS = num_steps(0)
_FOREVER_S = 600.0
_FILL_LIMIT_BYTES = 2 << 30
_BLOCK_BYTES = 16 << 20


class Finishes:
    """Trains to the end; base of all faults."""

    name: ClassVar[str] = "fault"

    def __init__(self) -> None:
        self.spec: ProbeSpec | None = None

    @property
    def folder(self) -> Path:
        """Return the probe's folder."""
        assert self.spec is not None
        return Path(self.spec.folder)

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the request: there is nothing to prepare."""
        return dict(request)

    def build(self, spec: ProbeSpec, device: DeviceBackend) -> TrainingSession:
        """Return this very object, having noted its process group."""
        self.spec = spec
        self.note_processes()
        return self

    def note_processes(self, *pids: int) -> None:
        """Leave the process group, and the pids of further processes, in the folder."""
        group = {"pgid": os.getpgid(0), "pid": os.getpid(), "pids": list(pids)}
        (self.folder / GROUP_FILE).write_text(json.dumps(group))

    def run(self, recorder: Recorder) -> None:
        """Go wrong after the first step, then train to the end."""
        assert self.spec is not None
        recorder.describe_run(worst_batch=(2, 16), rows_per_epoch=100.0)
        for step in range(_UNMEASURED_STEPS + self.spec.warmup_steps + self.spec.measured_steps):
            recorder.enter_phase("later_steps" if step else "first_step")
            recorder.begin_step()
            recorder.count(num_tokens=30, num_positions=32, num_loss_tokens=20, num_rows=2)
            recorder.end_micro_batch()
            recorder.end_step()
            recorder.report_loss(1.0)
            if step == 0:
                self._go_wrong(recorder)

    def _go_wrong(self, recorder: Recorder) -> None:
        pass


class FillsMemory(Finishes):
    """Takes memory until there is no more to have."""

    def _go_wrong(self, recorder: Recorder) -> None:
        blocks: list[bytes] = []
        while len(blocks) * _BLOCK_BYTES < _FILL_LIMIT_BYTES:
            blocks.append(b"x" * _BLOCK_BYTES)
        raise AssertionError("no limit was in force")


class KilledWhenFull(Finishes):
    """Fills its budget and is killed, as by the kernel's out-of-memory killer."""

    def _go_wrong(self, recorder: Recorder) -> None:
        assert self.spec is not None
        assert self.spec.memory_budget_bytes is not None
        # Shared memory is resident, but no part of the data segment, which the budget limits.
        block = mmap.mmap(-1, min(self.spec.memory_budget_bytes, _FILL_LIMIT_BYTES))
        page = b"x" * (1 << 20)
        for _ in range(len(block) // len(page)):
            block.write(page)
        os.kill(os.getpid(), signal.SIGKILL)


class RaisesOutOfMemory(Finishes):
    """Raises as a failed allocation of PyTorch's CPU allocator does."""

    def _go_wrong(self, recorder: Recorder) -> None:
        try:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        except RuntimeError as error:
            raise ValueError("the batch could not be processed") from error


class Hangs(Finishes):
    """Makes no progress."""

    def _go_wrong(self, recorder: Recorder) -> None:
        time.sleep(_FOREVER_S)


class HangsDeaf(Finishes):
    """Makes no progress and ignores every request to end."""

    def _go_wrong(self, recorder: Recorder) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(_FOREVER_S)


class LosesItself(Finishes):
    """Gets a loss that is not a number."""

    def _go_wrong(self, recorder: Recorder) -> None:
        recorder.report_loss(float("nan"))


class Raises(Finishes):
    """Raises an error that nobody expects."""

    def _go_wrong(self, recorder: Recorder) -> None:
        raise RuntimeError("shapes do not match")


class RefusesConfig(Finishes):
    """Can't be built from the configuration."""

    def build(self, spec: ProbeSpec, device: DeviceBackend) -> TrainingSession:
        """Refuse."""
        super().build(spec, device)
        raise ValueError("packing needs an attention implementation that keeps documents apart")


class Segfaults(Finishes):
    """Reads where there is nothing to read."""

    def _go_wrong(self, recorder: Recorder) -> None:
        ctypes.string_at(0)


class Aborts(Finishes):
    """Is ended by native code that gives up."""

    def _go_wrong(self, recorder: Recorder) -> None:
        os.abort()


class AbortsOutOfMemory(Finishes):
    """Is ended by native code that got no memory, which says so on its way out."""

    def _go_wrong(self, recorder: Recorder) -> None:
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
        os.abort()


class KilledFromOutside(Finishes):
    """Is killed, and nothing tells why."""

    def _go_wrong(self, recorder: Recorder) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class LeavesEarly(Finishes):
    """Ends its process politely, without a result."""

    def _go_wrong(self, recorder: Recorder) -> None:
        sys.exit(0)


class LeavesAtOnce(Finishes):
    """Ends its process without any exit handling and without a result."""

    def _go_wrong(self, recorder: Recorder) -> None:
        os._exit(0)


class ExitsWithError(Finishes):
    """Ends as native libraries do that found something wrong."""

    def _go_wrong(self, recorder: Recorder) -> None:
        os.write(2, b"fatal: the library gave up\n")
        os._exit(3)


class LeavesGrandchild(Finishes):
    """Finishes, but leaves a process in its group that holds memory."""

    def _go_wrong(self, recorder: Recorder) -> None:
        self.note_processes(fork_sleeper())


class LeavesDaemon(Finishes):
    """Finishes, but leaves a process that is in a session of its own."""

    def _go_wrong(self, recorder: Recorder) -> None:
        self.note_processes(fork_sleeper(new_session=True))


class DiesWithGrandchild(Finishes):
    """Is killed, and leaves a process in its group that ignores polite signals."""

    def _go_wrong(self, recorder: Recorder) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.note_processes(fork_sleeper())
        os.kill(os.getpid(), signal.SIGKILL)


class WritesHalf(Finishes):
    """Dies while it writes its answer, where a write in place would have left half of it."""

    def _go_wrong(self, recorder: Recorder) -> None:
        (self.folder / "answer.json").write_text('{"ok": {"result": {"probe_id": "0001", "outc')
        os._exit(0)


class WritesNonsense(Finishes):
    """Leaves an answer that is JSON, but no result."""

    def _go_wrong(self, recorder: Recorder) -> None:
        answer = {"ok": {"result": {"probe_id": "0001", "outcome": "ok"}}}
        (self.folder / "answer.json").write_text(json.dumps(answer))
        os._exit(0)


class Babbles(Finishes):
    """Prints megabytes and finishes."""

    def _go_wrong(self, recorder: Recorder) -> None:
        for _ in range(2048):
            sys.stdout.write("x" * 1023 + "\n")
        sys.stderr.write("\udce9 is no text\n" * 1000)


class ClosesOutput(Finishes):
    """Closes its standard streams and then raises."""

    def _go_wrong(self, recorder: Recorder) -> None:
        sys.stdout.close()
        sys.stderr.close()
        for fd in (0, 1, 2):
            os.close(fd)
        raise RuntimeError("nobody can hear this")


class DiskFull(Finishes):
    """Finds no disk space, which says nothing about the candidate."""

    def _go_wrong(self, recorder: Recorder) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class CannotAnswer(Finishes):
    """Finishes, but its folder takes no more files."""

    def _go_wrong(self, recorder: Recorder) -> None:
        from autotune.worker import tasks

        def write_json(path: Path, value: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        tasks.write_json = write_json


def fork_sleeper(*, new_session: bool = False) -> int:
    """Fork a process that holds some memory for a long time; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if new_session:
            os.setsid()
        held = b"x" * (32 << 20)
        time.sleep(_FOREVER_S + len(held) * 0)
    finally:
        os._exit(0)


class LosesPeer(Finishes):
    """Raises once the second process has ended, as a collective does without its other side."""

    def _go_wrong(self, recorder: Recorder) -> None:
        file = self.folder.with_name("rank-1") / "pid"
        while not file.exists() or processes.is_alive(int(file.read_text())):
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")


class _OnRankOne(Finishes):
    """Goes wrong in the second of several processes, while the others wait for it."""

    fault: ClassVar[type[Finishes]]
    meanwhile: ClassVar[type[Finishes]] = Hangs

    def _go_wrong(self, recorder: Recorder) -> None:
        is_second = os.environ.get("RANK") == "1"
        kind = self.fault if is_second else self.meanwhile
        kind._go_wrong(self, recorder)


class RankOutOfMemory(_OnRankOne):
    """Runs out of device memory in one process, while another is deaf to requests to end."""

    fault = RaisesOutOfMemory
    meanwhile = HangsDeaf


class RankFillsMemory(_OnRankOne):
    """Goes over the budget in one process."""

    fault = FillsMemory


class RankKilledWhenFull(_OnRankOne):
    """Is killed in one process, as by the kernel for want of memory; the other loses its peer."""

    fault = KilledWhenFull
    meanwhile = LosesPeer


class RankKilled(_OnRankOne):
    """Is killed in one process, and nothing tells why."""

    fault = KilledFromOutside
    meanwhile = LosesPeer


class RankSegfaults(_OnRankOne):
    """Reads where there is nothing to read, in one process."""

    fault = Segfaults


class RankRaises(_OnRankOne):
    """Raises in one process what nobody expects; the other loses its peer."""

    fault = Raises
    meanwhile = LosesPeer


class RankDiverges(_OnRankOne):
    """Gets a loss that is not a number, in one process."""

    fault = LosesItself


class RankLeavesAtOnce(_OnRankOne):
    """Ends one process without a result and without an error."""

    fault = LeavesAtOnce
    meanwhile = Finishes


class RankHangs(_OnRankOne):
    """Makes no progress in any process."""

    fault = HangsDeaf
