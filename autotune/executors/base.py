"""The contract of every place that probes can run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from autotune.probe.result import ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.registry import Registry


class Executor(Protocol):
    """Runs probes somewhere.

    The spec crosses as JSON. The future resolves to a result for every ending a candidate can
    cause and raises :class:`autotune.ExecutorError` only when nothing could be run. A probe is
    ended by the process group it was started in, never by name; its device memory is back before
    the slot is used again.
    """

    @property
    def slots(self) -> int:
        """Probes that may run at once."""
        ...

    def submit(self, spec: ProbeSpec) -> Future[ProbeResult]:
        """Start ``spec`` as soon as a slot is free."""
        ...

    def run_task(
        self, name: str, request: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """Run another worker task (``prepare``, ``describe``) to its end and return its answer.

        Raises:
            AutotuneError: The very error the task raised.
            ExecutorError: If the task could not be run, ran out of time or its process died.
        """
        ...

    def shutdown(self) -> None:
        """End every running probe and release all processes; safe to call twice."""
        ...


@contextlib.contextmanager
def ending(executor: Executor) -> Iterator[Executor]:
    """Lend an executor that is shut down with the block."""
    try:
        yield executor
    finally:
        executor.shutdown()


registry: Registry[type] = Registry(
    "executor",
    group="autotune.executors",
    builtin=("autotune.executors.subprocess", "autotune.executors.inprocess"),
)
