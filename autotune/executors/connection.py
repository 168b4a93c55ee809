"""One worker server: its process, its socket and its log."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.errors import ExecutorError
from autotune.executors.logs import tail

_EXIT_WAIT_S = 15.0


class ServerConnection:
    """A server process, started by command line, and the JSON lines to and from it.

    Args:
        launch: ``fork`` or ``spawn``.
        preload: Modules the server imports before it forks.
        env: Environment variables, over the present ones.
        log: File that takes what the server prints.

    Raises:
        ExecutorError: If the process can't be started.
    """

    def __init__(
        self, *, launch: str, preload: Sequence[str], env: Mapping[str, str], log: Path
    ) -> None:
        self.launch = launch
        self.hello: dict[str, Any] | None = None
        self.started_at_s = time.monotonic()
        self._log = log
        self._unread = b""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "autotune.worker", "serve"]
        command += ["--fd", str(theirs.fileno()), "--launch", launch]
        command += ["--preload", ",".join(preload)]
        # What can be imported here can be imported there: adapters may live beside a script.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            with theirs, log.open("ab") as log_file:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": path, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            self._socket.close()
            raise ExecutorError(f"The worker server could not be started ({error}).") from error

    def fileno(self) -> int:
        """Return the socket's file descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def pid(self) -> int:
        """Return the server's process id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one request; a server that has died is noticed when it is read from."""
        with suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the events that have arrived; None once the server is gone."""
        try:
            received = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def start_failure(self) -> ExecutorError:
        """Return the error for a server that ended before its hello, with the end of its log."""
        said = tail(self._log, 2000).strip()
        return ExecutorError(
            "The worker server ended before it could start anything"
            + (f"; it said:\n{said}" if said else ".")
        )

    def kill(self) -> None:
        """End the server at once; the kernel ends the probes it started."""
        self._process.kill()

    def close(self) -> None:
        """Let the server end its probes and itself; wait for it, within bounds."""
        self._socket.close()
        try:
            self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
