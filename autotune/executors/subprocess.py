"""Probes in processes of their own on this machine, one per slot."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.executors import evidence, ranks
from autotune.executors.base import registry
from autotune.executors.disk import temporary_folder
from autotune.executors.dispatch import Dispatcher
from autotune.executors.evidence import Ending
from autotune.executors.jobs import Job, Slot
from autotune.executors.slots import AUTO, slots_of
from autotune.probe.result import ProbeResult
from autotune.probe.spec import ProbeSpec

PRELOAD = (
    "torch",
    "torch._dynamo",
    "transformers:Trainer",
    "transformers:AutoModelForCausalLM",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "peft",
    "trl",
    "autotune.worker.adapters",
)
"""What a server imports before it forks, in order; a missing optional one is no error."""

_VIRTUAL = ("autotune.virtual.device:install()",)
"""Where all probes are virtual ones, this too; the device can't be taken back from a process."""


class SubprocessExecutor:
    """Runs every probe in a fresh process: its memory, its crashes and its limits are its own.

    A server process imports the training stack once and forks a child per probe, which takes
    milliseconds. Where a fork is not safe, every probe gets a fresh interpreter instead.

    Args:
        devices: CUDA indices or device names; one probe at a time runs on each. ``auto`` and
            ``virtual`` run a spec on the device it names, and show it one card and none.
        processes: Processes of one probe, which train together, each on a device of its own;
            more than one are started by ``accelerate launch`` with the spec's configuration. A
            slot then has so many devices: several that are given form groups, a single one is
            the first of its group.
        timeout_s: Wall-clock limit of a probe; a spec's own lower limit goes first.
        launch: ``fork``, ``spawn`` (a fresh interpreter each), or ``auto``: fork where that is
            safe.
        log_folder: Takes the servers' logs; by default they vanish with the executor.
        preload: Modules that the server imports; by default the whole training stack.
        start_timeout_s: How long that may take.
        trainer: Name of the trainer that most probes will run, so that it is imported once.

    Raises:
        UsageError: If a device or an option is wrong.
    """

    def __init__(
        self,
        devices: Sequence[int | str] = (AUTO,),
        processes: int = 1,
        timeout_s: float = 300.0,
        launch: str = "auto",
        *,
        log_folder: str | Path | None = None,
        preload: Sequence[str] | None = None,
        start_timeout_s: float = 600.0,
        trainer: str = "sft",
    ) -> None:
        if launch not in ("auto", "fork", "spawn"):
            raise UsageError(f"launch is {launch!r}.", hint="Choose auto, fork or spawn.")
        if processes < 1:
            raise UsageError(f"processes is {processes}.", hint="A probe has one at least.")
        if not devices:
            raise UsageError("No device was given.", hint="Use devices=('cpu',) or devices=(0,).")
        if timeout_s <= 0:
            raise UsageError(f"timeout_s is {timeout_s}.", hint="It must be above 0.")
        self.timeout_s = timeout_s
        self.processes = processes
        self._slots = slots_of(devices, processes)
        if preload is None:
            virtual = all(str(device).partition(":")[0] == "virtual" for device in devices)
            preload = (*PRELOAD, f"autotune.worker.adapters:{trainer}", *(_VIRTUAL * virtual))
        self._dispatcher = Dispatcher(
            slots=self._slots,
            launch=launch,
            preload=preload,
            start_timeout_s=start_timeout_s,
            log_folder=None if log_folder is None else Path(log_folder),
        )
        self._finalizer = weakref.finalize(self, self._dispatcher.stop)

    @property
    def slots(self) -> int:
        """Probes that may run at once."""
        return len(self._slots)

    def submit(self, spec: ProbeSpec) -> Future[ProbeResult]:
        """Start ``spec`` on the next free slot, whose device replaces the spec's.

        Raises:
            UsageError: If the spec is for another number of processes than a slot has room for.
            ExecutorError: If the executor was shut down.
        """
        if spec.processes != self.processes:
            raise UsageError(
                f"the probe is for {spec.processes} process(es), and the executor's slots are for"
                f" {self.processes}.",
                hint="Give the executor and the search the same number of processes.",
            )
        placed = [spec]

        def begin(slot: Slot, asked_at: float) -> Path:
            device = spec.device if slot.device == AUTO else slot.device
            placed[0] = replace(spec, device=device)
            evidence.write_request(placed[0], asked_at=asked_at)
            return Path(spec.folder)

        def finish(ending: Ending) -> ProbeResult:
            several = placed[0].processes > 1
            return evidence.conclude(placed[0], ending, ranks.decide if several else None)

        job = Job(
            task="launch" if spec.processes > 1 else "probe",
            timeout_s=min(spec.timeout_s, self.timeout_s),
            process_env=spec.process_env,
            begin=begin,
            finish=finish,
        )
        # Whoever holds the future needs us, even if nobody else does.
        job.future.add_done_callback(partial(_let_go, self))
        self._dispatcher.submit(job)
        return job.future

    def run_task(
        self, name: str, request: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """Run another worker task to its end and return its answer; it takes a slot meanwhile.

        A ``device`` in the request is replaced by the slot's, if that is a certain one; a
        ``process_env`` is set.

        Raises:
            AutotuneError: The very error the task raised.
            ExecutorError: If the task could not be run, ran out of time or its process died.
        """
        with temporary_folder() as folder:

            def begin(slot: Slot, asked_at: float) -> Path:
                is_placed = "device" in request and slot.device != AUTO
                placed = {**request, "device": slot.device} if is_placed else request
                evidence.write_task(name, folder, placed)
                return folder

            job = Job(
                task=name,
                timeout_s=timeout_s,
                process_env=request.get("process_env", {}),
                begin=begin,
                finish=lambda ending: evidence.task_answer(name, folder, ending, request=request),
            )
            self._dispatcher.submit(job)
            try:
                return job.future.result()  # type: ignore[no-any-return]
            except BaseException:
                self._dispatcher.abandon(job)
                raise

    def shutdown(self) -> None:
        """End every running probe and release all processes; safe to call twice."""
        self._finalizer()


def _let_go(executor: SubprocessExecutor, future: Future[ProbeResult]) -> None:
    """Do nothing: being called with the executor is enough to have kept it alive."""


registry.register("subprocess", SubprocessExecutor)
