"""The thread behind the subprocess executor: gives jobs a slot and a server, watches the clock."""

from __future__ import annotations

import itertools
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, ExecutorError
from autotune.executors.connection import ServerConnection
from autotune.executors.evidence import Ending
from autotune.executors.jobs import Job, Slot
from autotune.executors.pool import ServerPool

GRACE_S = 1.0
"""From the request to end, upon which a probe tells where it hung, to the kill."""
_STUCK_AFTER_S = 60.0


class Dispatcher:
    """Runs jobs in slots until it is stopped. All state belongs to its one thread.

    Args:
        slots: Places to run; a job has one to itself.
        launch: ``auto``, ``fork`` or ``spawn``.
        preload: Modules that a server imports before it forks.
        start_timeout_s: How long a server may take to import them.
        log_folder: Takes the servers' logs; None for a temporary folder.
    """

    def __init__(
        self,
        *,
        slots: Sequence[Slot],
        launch: str,
        preload: Sequence[str],
        start_timeout_s: float,
        log_folder: Path | None,
    ) -> None:
        self._free = deque(slots)
        self._waiting: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._incoming: deque[Callable[[], None]] = deque()
        self._ids = itertools.count()
        self._stopping = False
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._pool = ServerPool(
            self._selector,
            launch=launch,
            preload=preload,
            start_timeout_s=start_timeout_s,
            log_folder=log_folder,
        )
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ExecutorError: If the executor was shut down.
        """
        with self._lock:
            if self._stopping:
                raise self._end_error()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="autotune-dispatcher", daemon=True
                )
                self._thread.start()
            self._call(lambda: self._waiting.append(job))

    def abandon(self, job: Job) -> None:
        """End a job that nobody waits for any more."""
        self._call(lambda: self._expire(job))

    def stop(self) -> None:
        """End everything that runs, fail what waits, release all processes."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is None:
            return
        self._call(lambda: None)
        if thread is not threading.current_thread():
            thread.join()

    def _end_error(self) -> ExecutorError:
        if self._failure is None:
            return ExecutorError("The executor was shut down.")
        error = ExecutorError(f"The executor broke ({self._failure!r}).")
        error.__cause__ = self._failure
        return error

    def _call(self, action: Callable[[], None]) -> None:
        self._incoming.append(action)
        with suppress(OSError):
            self._wake_write.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(self._wait_s()):
                    if isinstance(key.fileobj, ServerConnection):
                        self._listen(key.fileobj)
                    else:
                        with suppress(BlockingIOError):
                            self._wake_read.recv(4096)
                while self._incoming:
                    self._incoming.popleft()()
                self._fill_slots()
                self._watch_clock()
        except Exception as error:  # noqa: BLE001  whoever waits for a future must learn of it
            self._failure = error
        finally:
            self._close()

    def _wait_s(self) -> float | None:
        moments = [job.deadline_s for job in self._running.values() if job.deadline_s is not None]
        moments.extend(self._pool.start_deadlines_s())
        return max(min(moments) - time.monotonic(), 0.0) if moments else None

    def _fill_slots(self) -> None:
        while self._waiting and self._free:
            job = self._waiting.popleft()
            if not job.future.set_running_or_notify_cancel():
                continue
            job.slot, job.id, job.asked_at = (
                self._free.popleft(),
                f"{next(self._ids)}",
                time.time(),
            )
            self._running[job.id] = job
            try:
                job.folder = job.begin(job.slot, job.asked_at)
                job.server = self._server_for(job)
            except AutotuneError as error:
                self._settle(job, error)
                continue
            if job.server.hello is not None:
                self._start(job)

    def _start(self, job: Job) -> None:
        assert job.server is not None
        assert job.slot is not None
        job.deadline_s = time.monotonic() + job.timeout_s
        beside = [item for item in self._running.values() if item.deadline_s is not None]
        for item in beside:
            item.num_neighbours = max(item.num_neighbours, len(beside) - 1)
        env = {**job.process_env, **job.slot.env}
        request = {"op": "start", "id": job.id, "task": job.task, "folder": str(job.folder)}
        job.server.send({**request, "env": env})

    def _listen(self, server: ServerConnection) -> None:
        events = server.receive()
        if events is None:
            self._bury(server)
            return
        for event in events:
            if event["event"] == "hello":
                self._greet(server, event)
                continue
            job = self._running.get(event["id"])
            if job is None:
                continue
            if event["event"] == "started":
                job.pid = event["pid"]
            elif event["event"] == "failed":
                self._settle(job, ExecutorError(f"A probe process {event['error']}."))
            else:
                seen = {key: value for key, value in event.items() if key not in ("event", "id")}
                self._conclude(job, **seen)

    def _server_for(self, job: Job) -> ServerConnection:
        busy = {item.server for item in self._running.values() if item.server is not None}
        return self._pool.server_for(job.process_env, busy=busy)

    def _greet(self, server: ServerConnection, hello: dict[str, Any]) -> None:
        server.hello = hello
        jobs = [job for job in self._running.values() if job.server is server]
        try:
            usable = self._pool.accept(server)
        except AutotuneError as error:
            for job in jobs:
                self._settle(job, error)
            return
        for job in jobs:
            if usable:
                self._start(job)
                continue
            try:
                job.server = self._server_for(job)
            except AutotuneError as error:
                self._settle(job, error)

    def _watch_clock(self) -> None:
        now = time.monotonic()
        for job in list(self._running.values()):
            if job.deadline_s is None or job.deadline_s > now:
                continue
            if job.timed_out and job.server is not None:
                job.server.kill()  # it, or the kernel, can't end the probe
                job.deadline_s = now + _STUCK_AFTER_S
            else:
                self._expire(job)
        self._pool.kill_late(now)

    def _expire(self, job: Job) -> None:
        if self._running.get(job.id) is not job:
            job.future.cancel()  # still waiting, or over
            return
        if job.deadline_s is None:
            self._settle(job, ExecutorError("The task was given up before it could start."))
            return
        job.timed_out = True
        job.deadline_s = time.monotonic() + GRACE_S + _STUCK_AFTER_S
        if job.server is not None:
            job.server.send({"op": "kill", "id": job.id, "grace_s": GRACE_S})

    def _bury(self, server: ServerConnection) -> None:
        """End what a dead server left, and give its jobs an ending."""
        self._pool.drop(server)
        jobs = [job for job in self._running.values() if job.server is server]
        for job in jobs:
            if job.pid is not None:
                _end_orphans(job.pid)
        for job in jobs:
            if server.hello is None:
                self._settle(job, server.start_failure())
            else:
                self._conclude(job, server_lost=True)

    def _conclude(self, job: Job, **seen: Any) -> None:
        ending = Ending(
            asked_at=job.asked_at,
            timed_out_after_s=job.timeout_s if job.timed_out else None,
            num_neighbours=job.num_neighbours,
            **seen,
        )
        try:
            outcome = job.finish(ending)
        except AutotuneError as error:
            self._settle(job, error)
        else:
            self._settle(job, outcome)

    def _settle(self, job: Job, outcome: Any) -> None:
        """Free the job's slot first: who waits for the future may submit at once."""
        del self._running[job.id]
        if job.slot is not None:
            self._free.append(job.slot)
        if isinstance(outcome, AutotuneError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)

    def _close(self) -> None:
        with self._lock:
            self._stopping = True
        self._pool.close()
        error = self._end_error()
        for job in list(self._running.values()):
            if job.pid is not None:
                _end_orphans(job.pid, wait_s=0.5)
            self._settle(job, error)
        while self._incoming:
            self._incoming.popleft()()
        for job in self._waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def _end_orphans(pgid: int, wait_s: float = 2.0) -> None:
    """End a group whose parent is gone; wait a moment for the kernel to take its memory back."""
    deadline = time.monotonic() + wait_s
    # PermissionError: the number belongs to somebody else's group by now.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)
        while time.monotonic() < deadline:
            os.killpg(pgid, 0)
            time.sleep(0.01)
