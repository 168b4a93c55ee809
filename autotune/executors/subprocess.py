"""Probes in processes of their own on this machine, one per slot."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.executors import evidence
from autotune.executors.base import registry
from autotune.executors.disk import temporary_folder
from autotune.executors.dispatch import Dispatcher
from autotune.executors.evidence import Ending
from autotune.executors.jobs import Job, Slot
from autotune.probe.result import ProbeResult
from autotune.probe.spec import ProbeSpec

AUTO = "auto"
"""The device that a worker finds; a spec names it once it is known."""

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
        devices_per_probe: Devices that one probe uses; only 1 is supported.
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
        devices_per_probe: int = 1,
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
        if devices_per_probe != 1:
            raise UsageError(
                f"A probe can't run on {devices_per_probe} devices yet.",
                hint="Use devices_per_probe=1.",
            )
        if not devices:
            raise UsageError("No device was given.", hint="Use devices=('cpu',) or devices=(0,).")
        if timeout_s <= 0:
            raise UsageError(f"timeout_s is {timeout_s}.", hint="It must be above 0.")
        self.timeout_s = timeout_s
        self._slots = tuple(_slot(device) for device in devices)
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
            ExecutorError: If the executor was shut down.
        """
        placed = [spec]

        def begin(slot: Slot, asked_at: float) -> Path:
            device = spec.device if slot.device == AUTO else slot.device
            placed[0] = replace(spec, device=device)
            evidence.write_request(placed[0], asked_at=asked_at)
            return Path(spec.folder)

        def finish(ending: Ending) -> ProbeResult:
            return evidence.conclude(placed[0], ending)

        job = Job(
            task="probe",
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


def _slot(device: int | str) -> Slot:
    """Return the slot for a CUDA index or a device name.

    A probe sees its own card alone, under index 0, so that nothing it loads can touch another.
    """
    if isinstance(device, int):
        device = f"cuda:{device}"
    kind, _, index = device.partition(":")
    if kind == AUTO:
        # Which kind it is only a worker can tell; if it is CUDA, one card is enough.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
        return Slot(AUTO, {"CUDA_VISIBLE_DEVICES": first})
    if kind == "virtual":
        # Libraries must not find a real card beside the pretended one.
        return Slot(device if index else AUTO, {"CUDA_VISIBLE_DEVICES": ""})
    if kind != "cuda":
        return Slot(device)
    if index and not index.isdigit():
        raise UsageError(f"The device {device!r} is unknown.", hint="Use cuda:0, cuda:1, ...")
    number = int(index or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return Slot("cuda:0", {"CUDA_VISIBLE_DEVICES": str(number)})
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if number >= len(names):
        raise UsageError(
            f"There is no {device}: CUDA_VISIBLE_DEVICES={visible} shows {len(names)} device(s).",
            hint="Change CUDA_VISIBLE_DEVICES or the device.",
        )
    return Slot("cuda:0", {"CUDA_VISIBLE_DEVICES": names[number]})


registry.register("subprocess", SubprocessExecutor)
