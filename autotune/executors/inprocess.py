"""Probes in this very process: for a debugger, and for nothing else."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, ExecutorError, UsageError
from autotune.executors import evidence
from autotune.executors.base import registry
from autotune.executors.disk import temporary_folder
from autotune.executors.evidence import Ending
from autotune.executors.logs import STDERR
from autotune.probe.result import ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.worker import tasks
from autotune.worker.preload import ENVIRONMENT


class InProcessExecutor:
    """Runs each probe inside ``submit``, where a debugger can stop it.

    Nothing is isolated: no time limit is kept, a probe that kills its process kills the search,
    what one probe leaves in memory the next one finds, and environment variables that must be set
    before torch is imported come too late for all but the first. Use it to look, not to measure.

    Args:
        device: Device of every probe; None for the spec's own.
    """

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._closed = False

    @property
    def slots(self) -> int:
        """Probes that may run at once."""
        return 1

    def submit(self, spec: ProbeSpec) -> Future[ProbeResult]:
        """Run ``spec`` to its end and return a future that is done.

        Raises:
            UsageError: If it is for several processes.
            ExecutorError: If the executor was shut down.
        """
        self._check_open()
        if spec.processes > 1:
            raise UsageError(
                f"a probe in {spec.processes} processes can't run in this one.",
                hint="Use SubprocessExecutor(processes=...).",
            )
        future: Future[ProbeResult] = Future()
        if self._device is not None:
            spec = replace(spec, device=self._device)
        asked_at = time.time()
        try:
            evidence.write_request(spec, asked_at=asked_at)
            exit_code = self._run("probe", Path(spec.folder), spec.process_env)
            ending = Ending(asked_at=asked_at, exit_code=exit_code)
            future.set_result(evidence.conclude(spec, ending))
        except AutotuneError as error:
            future.set_exception(error)
        return future

    def run_task(
        self, name: str, request: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """Run another worker task and return its answer; ``timeout_s`` is not kept.

        Raises:
            AutotuneError: The very error the task raised.
            ExecutorError: If the task failed in any other way.
        """
        self._check_open()
        with temporary_folder() as folder:
            evidence.write_task(name, folder, request)
            exit_code = self._run(name, folder, request.get("process_env", {}))
            ending = Ending(asked_at=time.time(), exit_code=exit_code)
            return evidence.task_answer(name, folder, ending, request=request)

    def shutdown(self) -> None:
        """Accept no more probes; safe to call twice."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutorError("The executor was shut down.")

    def _run(self, task: str, folder: Path, env: Mapping[str, str]) -> int:
        """Run a task as a process of its own would, and return what its exit code would be."""
        with _environment({**ENVIRONMENT, **env}):
            try:
                tasks.run(task, folder)
            except SystemExit as error:
                return error.code if isinstance(error.code, int) else int(error.code is not None)
            except Exception as error:  # noqa: BLE001  a process would end here, and so tell
                with (folder / STDERR).open("a") as log:
                    traceback.print_exception(error, file=log)
                return tasks.EXIT_DISK_FULL if tasks.ran_out_of_disk(error) else 1
        return 0


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


registry.register("inprocess", InProcessExecutor)
