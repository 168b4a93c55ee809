"""The server that starts probes: imports once, then gives every request a process of its own.

It speaks JSON lines over one socket. Requests: ``start`` (id, task, folder, env) and ``kill`` (id,
grace_s). Events: ``hello``, ``started`` (id, pid), ``failed`` (id, error) and ``ended`` (id, how).

The server itself never runs a tensor operation: a process whose OpenMP threads have started, or
that holds a CUDA context, must not be forked.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.worker import child, processes, tasks, vitals
from autotune.worker.preload import Preloaded, missing, preload

_POLL_S = 1.0
_LAST_WAIT_S = 10.0


@dataclass(slots=True)
class _Child:
    """A probe's process and what is known of it."""

    job: str
    pid: int
    folder: Path
    available_bytes: int | None
    kill_at: float | None = None
    ending: dict[str, Any] | None = None


class Server:
    """Starts, watches and ends probe processes for one search process.

    Args:
        connection: Socket to the search; its end is the order to end everything.
        launch: ``fork`` (from this process, after importing) or ``spawn`` (a fresh interpreter).
        preload: Modules to import before forking; for ``spawn`` only looked for.
    """

    def __init__(
        self, connection: socket.socket, *, launch: str, preload: tuple[str, ...]
    ) -> None:
        # Open in a process that outlives us, it would hide our end from the search.
        connection.set_inheritable(False)
        self._connection = connection
        self._launch = launch
        self._modules = preload
        self._children: dict[str, _Child] = {}
        self._unread = b""
        self._closing = False
        self._parent_pid = os.getppid()
        self._adopts = processes.adopt_orphans()
        self._oom_kills_seen = vitals.oom_kill_count() or 0
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()

    def serve(self) -> None:
        """Serve requests until the search closes the socket, or dies; leave no process behind."""
        self._listen_to_signals()
        loaded = (
            preload(self._modules)
            if self._launch == "fork"
            else Preloaded(seconds=0.0, errors=missing(self._modules))
        )
        # The libraries' helper threads (BLAS, Arrow) are idle and know how to survive a fork.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", append=False)
        self._selector.register(self._connection, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        try:
            self._send({"event": "hello", "pid": os.getpid(), **loaded.to_dict()})
            while not self._closing:
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fileobj is self._connection:
                        self._read_requests()
                    else:
                        self._drain_wakeups()
                self._escalate()
                self._collect()
                # A fork of the search may keep the socket open beyond its death.
                self._closing = self._closing or os.getppid() != self._parent_pid
        finally:
            self._end_everything()

    def _listen_to_signals(self) -> None:
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._close)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _close(self, *_: object) -> None:
        self._closing = True

    def _drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _read_requests(self) -> None:
        try:
            received = self._connection.recv(1 << 16)
        except ConnectionError:
            received = b""
        if not received:
            self._closing = True
            return
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["op"] == "start":
                self._start(request)
            elif request["op"] == "kill" and request["id"] in self._children:
                self._kill(self._children[request["id"]], request["grace_s"])

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            self._closing = True

    def _start(self, request: Mapping[str, Any]) -> None:
        job, folder = request["id"], Path(request["folder"])
        if not self._children:
            # Whatever was killed before is none of this probe's.
            self._oom_kills_seen = vitals.oom_kill_count() or 0
        available = vitals.available_bytes()
        begin = self._fork if self._launch == "fork" else self._spawn
        try:
            pid = begin(request["task"], folder, request["env"])
        except OSError as error:
            self._send({"event": "failed", "id": job, "error": f"could not start: {error}"})
            return
        self._children[job] = _Child(job=job, pid=pid, folder=folder, available_bytes=available)
        self._send({"event": "started", "id": job, "pid": pid})

    def _fork(self, task: str, folder: Path, env: Mapping[str, str]) -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        server_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for end in (self._connection, self._wake_read, self._wake_write, self._selector):
                end.close()
            child.enter_fork(task, folder, env, server_pid=server_pid)
        finally:
            os._exit(1)

    def _spawn(self, task: str, folder: Path, env: Mapping[str, str]) -> int:
        # PYTHONPATH already names all that the search can import; -P adds nothing to it.
        command = [sys.executable, "-P", "-m", "autotune.worker", "run", task, str(folder)]
        write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.posix_spawn(
            sys.executable,
            [*command, "--parent", str(os.getpid())],
            {**os.environ, **env},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(folder / child.STDOUT), write, 0o644),
                (os.POSIX_SPAWN_OPEN, 2, str(folder / child.STDERR), write, 0o644),
            ],
            setsid=True,
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE],
        )

    def _kill(self, target: _Child, grace_s: float) -> None:
        target.kill_at = time.monotonic() + grace_s
        if target.ending is None and grace_s > 0:
            processes.signal_group(target.pid, signal.SIGTERM)

    def _escalate(self) -> None:
        now = time.monotonic()
        for target in self._children.values():
            if target.ending is None and target.kill_at is not None and target.kill_at <= now:
                processes.signal_group(target.pid, signal.SIGKILL)
                target.kill_at = None

    def _wait_s(self) -> float:
        times = [item.kill_at for item in self._children.values() if item.kill_at is not None]
        waits = [max(time_s - time.monotonic(), 0.0) for time_s in times]
        return min([_POLL_S, *waits])

    def _collect(self) -> None:
        """Note who ended, end what is left of its group, and tell once nothing is."""
        for target in list(self._children.values()):
            if target.ending is None:
                self._note_ending(target)
            if target.ending is not None and self._is_gone(target):
                del self._children[target.job]
                self._send({"event": "ended", "id": target.job, **target.ending})

    def _note_ending(self, target: _Child) -> None:
        # Not reaped yet: the group's number can't be given to anybody else while we signal it.
        if os.waitid(os.P_PID, target.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return
        processes.signal_group(target.pid, signal.SIGKILL)
        _, status, usage = os.wait4(target.pid, 0)
        oom_kills = vitals.oom_kill_count() or 0
        # The kernel counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        target.ending = {
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "max_resident_bytes": usage.ru_maxrss * unit,
            "available_bytes": target.available_bytes,
            "oom_kills": max(oom_kills - self._oom_kills_seen, 0),
        }
        if target.ending["signal"] == signal.SIGKILL:
            # Counted for this probe; the next one to be killed needs a rise of its own.
            self._oom_kills_seen = oom_kills

    def _is_gone(self, target: _Child) -> bool:
        gone = processes.reap_group(target.pid)
        if not self._adopts:
            return gone and not processes.group_exists(target.pid)
        # Descendants that left the group came to us when their parents died. With other probes
        # beside this one, only its ranks are known to be its own.
        strays = processes.own_children()
        if len(self._children) > 1:
            strays &= tasks.rank_pids(target.folder)
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return all([processes.reap(pid) for pid in strays]) and gone

    def _end_everything(self) -> None:
        deadline = time.monotonic() + _LAST_WAIT_S
        for target in self._children.values():
            if target.ending is None:
                processes.signal_group(target.pid, signal.SIGKILL)
        while self._children and time.monotonic() < deadline:
            self._collect()
            if self._children:
                self._selector.select(0.05)
                self._drain_wakeups()
