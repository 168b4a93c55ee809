"""The worker servers of one executor: which there are, how they start probes, when they go."""

from __future__ import annotations

import logging
import selectors
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from autotune.errors import ExecutorError, PrerequisiteError
from autotune.executors.connection import ServerConnection

MAX_SERVERS = 2
_REQUIRED = ("torch", "transformers", "trl")
_logger = logging.getLogger(__name__)


class ServerPool:
    """Servers by the environment that they imported the training stack in.

    Args:
        selector: Told of every server's socket.
        launch: ``auto``, ``fork`` or ``spawn``.
        preload: Modules that a server imports before it forks.
        start_timeout_s: How long it may take for that.
        log_folder: Takes the servers' logs; None for a temporary folder.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        launch: str,
        preload: Sequence[str],
        start_timeout_s: float,
        log_folder: Path | None,
    ) -> None:
        self._selector = selector
        self._launch = launch
        self._preload = tuple(preload)
        self._start_timeout_s = start_timeout_s
        self._log_folder = log_folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._servers: dict[tuple[tuple[str, str], ...], ServerConnection] = {}
        self._num_started = 0

    def server_for(
        self, process_env: Mapping[str, str], *, busy: Collection[ServerConnection]
    ) -> ServerConnection:
        """Return a server for probes with ``process_env``, started if there is none.

        Args:
            process_env: Variables that are read when torch is imported. A server that spawns
                serves all: each of its probes imports anew.
            busy: Servers that must stay; of the others the one longest unused makes room.

        Raises:
            ExecutorError: If it can't be started.
        """
        spawn = self._launch == "spawn"
        key = () if spawn else tuple(sorted(process_env.items()))
        server = self._servers.get(key)
        if server is None:
            self._make_room(busy)
            server = ServerConnection(
                launch="spawn" if spawn else "fork",
                preload=self._preload,
                env=dict(key),
                log=self._next_log(),
            )
            self._servers[key] = server
            self._selector.register(server, selectors.EVENT_READ)
        # Kept in order of use.
        self._servers[key] = self._servers.pop(key)
        return server

    def accept(self, server: ServerConnection) -> bool:
        """Return whether a server that has said hello is of use; drop it if it is not.

        Raises:
            PrerequisiteError: If the training stack can't be imported.
            ExecutorError: If it may not be forked, but must be.
        """
        hello = server.hello or {}
        lacking = {name: text for name, text in hello["errors"].items() if name in _REQUIRED}
        if lacking:
            self.drop(server)
            reasons = "; ".join(f"{name}: {text}" for name, text in lacking.items())
            raise PrerequisiteError(
                f"The training stack can't be imported ({reasons}).",
                hint="pip install 'trl-autotune[trl]'",
            )
        if server.launch == "spawn" or not hello["unsafe"]:
            return True
        self.drop(server)
        if self._launch == "fork":
            raise ExecutorError(
                f"Probes can't be forked here: {hello['unsafe']}.", hint="Use launch='spawn'."
            )
        _logger.warning("every probe imports the training stack anew: %s", hello["unsafe"])
        self._launch = "spawn"
        return False

    def drop(self, server: ServerConnection) -> None:
        """Let a server end; a probe it runs ends with it."""
        self._servers = {key: item for key, item in self._servers.items() if item is not server}
        self._selector.unregister(server)
        server.close()

    def start_deadlines_s(self) -> list[float]:
        """Return by when each server that still imports must be done, on the monotonic clock."""
        return [
            server.started_at_s + self._start_timeout_s
            for server in self._servers.values()
            if server.hello is None
        ]

    def kill_late(self, now_s: float) -> None:
        """End the servers that took too long to start."""
        for server in self._servers.values():
            if server.hello is None and server.started_at_s + self._start_timeout_s <= now_s:
                server.started_at_s = now_s
                server.kill()

    def close(self) -> None:
        """End all servers."""
        for server in list(self._servers.values()):
            self.drop(server)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _make_room(self, busy: Collection[ServerConnection]) -> None:
        idle = [server for server in self._servers.values() if server not in busy]
        while idle and len(self._servers) >= MAX_SERVERS:
            self.drop(idle.pop(0))

    def _next_log(self) -> Path:
        self._num_started += 1
        folder = self._log_folder
        if folder is None:
            if self._temporary is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="autotune-")
            folder = Path(self._temporary.name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExecutorError(f"The log folder {folder} can't be made ({error}).") from error
        return folder / f"server-{self._num_started}.log"
