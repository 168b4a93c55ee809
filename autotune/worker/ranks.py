"""A probe in several processes: accelerate starts them, and this module's threads watch over them.

``launch`` is the task of the process that the server started. It runs ``accelerate launch`` by its
own functions, as TRL's command line does. Each process that comes of it is a *rank*: it runs the
probe in a folder of its own, ``rank-0``, ``rank-1``, ..., and leaves its answer there. torchrun,
which accelerate uses, puts every rank into a session of its own, so that a signal to our group
does not reach them: they die with us by the kernel (``die_with``), and the first that fails ends
the others, by the group that torchrun started each in.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import UsageError
from autotune.probe import accelerate_config
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.worker import child, processes, tasks

EXIT_RANK_FAILED = 75
"""Exit code of a rank whose answer is a failure: torchrun ends the others upon it."""

GRACE_S = 3.0
"""From the first rank's failure to the kill of those that torchrun's request did not end."""

_POLL_S = 0.1
_INDEXED = ("cuda", "xpu")


def launch(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run the probe of ``request["spec"]`` in several processes; return how each of them ended.

    Returns:
        ``ranks``: per rank its exit code or signal, if it ended by itself, when that was, and
        its peak resident size; ``launcher``: what accelerate said if nothing was started.
    """
    spec = ProbeSpec.from_dict(request["spec"])
    folder = Path(spec.folder)
    for rank in range(spec.processes):
        place = tasks.rank_folder(folder, rank)
        place.mkdir(exist_ok=True)
        own = {**request, "spec": _of_rank(spec, rank).to_dict()}
        tasks.write_json(place / "request.json", own)
    config = folder / accelerate_config.FILE_NAME
    config.write_text(accelerate_config.render(spec.accelerate))
    # What the search can import, its ranks can; the present folder adds nothing to it.
    os.environ["PYTHONSAFEPATH"] = "1"
    watch = Watch(folder, spec.processes)
    watch.start()
    try:
        failures, said = _accelerate(config, folder)
    finally:
        watch.stop()
    return {"ranks": watch.endings(failures), "launcher": said}


def run_rank(folder: Path) -> NoReturn:
    """Run this process's part of the probe in ``folder``, then end the process."""
    rank = int(os.environ.get("RANK", "0"))
    place = tasks.rank_folder(folder, rank)
    place.mkdir(exist_ok=True)
    tasks.write_json(place / tasks.PID, os.getpid())
    child.redirect(place)
    child.run_to_exit("rank", place, parent_pid=os.getppid(), exit_code=_exit_code)


def check_and_run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a rank's probe, if there are as many ranks as were asked for.

    Raises:
        UsageError: If accelerate started another number of processes.
    """
    from autotune.worker.run import run_probe

    wanted, found = int(request["spec"]["processes"]), int(os.environ.get("WORLD_SIZE", "1"))
    if found != wanted:
        raise UsageError(
            f"accelerate launch started {found} process{'es' if found > 1 else ''} with this"
            f" configuration, not {wanted}.",
            hint="A distributed_type of MULTI_GPU, FSDP or DEEPSPEED starts several; MULTI_CPU"
            " does with mpirun alone. Leave --accelerate-config away to have one written.",
        )
    return run_probe(request)


def _exit_code(folder: Path) -> int:
    return 0 if has_failed(folder) is False else EXIT_RANK_FAILED


def has_failed(folder: Path) -> bool | None:
    """Return whether a rank's answer is a failure; None if it has not answered."""
    try:
        answer = json.loads((folder / "answer.json").read_text())
        return bool(answer["ok"]["result"]["outcome"] != Outcome.OK.value)
    except (OSError, ValueError):
        return None
    except (KeyError, TypeError):
        return True


def _of_rank(spec: ProbeSpec, rank: int) -> ProbeSpec:
    """Return the spec as one rank runs it: in its own folder, on its own device."""
    kind = spec.device.partition(":")[0]
    return replace(
        spec,
        folder=str(tasks.rank_folder(Path(spec.folder), rank)),
        device=f"{kind}:{rank}" if kind in _INDEXED else spec.device,
        # What is saved, all ranks save into one folder.
        overlay={"output_dir": str(Path(spec.folder) / "output"), **spec.overlay},
    )


def _accelerate(config: Path, folder: Path) -> tuple[dict[int, int], str]:
    """Run ``accelerate launch`` to its end.

    Returns:
        Exit code of each rank that failed first, a signal's number below 0; and what accelerate
        said if it refused.
    """
    import subprocess

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--config_file", str(config), "--main_process_port", "0"]
    worker = ["-m", "autotune.worker", "rank", str(folder)]
    arguments = launch_command_parser().parse_args([*options, *worker])
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}, ""
    except subprocess.CalledProcessError as error:  # a single process
        return {0: error.returncode}, ""
    except (ImportError, ValueError, OSError) as error:
        return {}, f"{type(error).__name__}: {error}"
    return {}, ""


@dataclass(slots=True)
class _Rank:
    """What is seen of one rank from outside."""

    folder: Path
    pid: int | None = None
    max_resident_bytes: int | None = None
    ended_at: float | None = None
    killed: bool = False


class Watch(threading.Thread):
    """Sees ranks fail and ends the others.

    Args:
        folder: The probe's; each rank leaves its process id and its answer in its own.
        num_ranks: How many there are.
        grace_s: What the others have to end by themselves.
    """

    def __init__(self, folder: Path, num_ranks: int, *, grace_s: float = GRACE_S) -> None:
        super().__init__(name="autotune-ranks", daemon=True)
        self._ranks = [_Rank(tasks.rank_folder(folder, rank)) for rank in range(num_ranks)]
        self._grace_s = grace_s
        self._failed_at: float | None = None
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look every tenth of a second until stopped."""
        while not self._stopped.wait(_POLL_S):
            self.look()

    def stop(self) -> None:
        """Look no more; whoever is left is ended."""
        self._stopped.set()
        self.join()
        for rank in self._ranks:
            self._look_at(rank)
            self._kill(rank)

    def look(self) -> None:
        """Note how the ranks are; end them all once one has failed and the grace is over."""
        for rank in self._ranks:
            if self._look_at(rank) and self._failed_at is None:
                self._failed_at = time.monotonic()
        if self._failed_at is not None and time.monotonic() - self._failed_at >= self._grace_s:
            for rank in self._ranks:
                self._kill(rank)

    def endings(self, failures: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return how each rank ended, as plain JSON.

        Args:
            failures: Exit codes of those that torchrun saw fail first.
        """
        found = []
        for number, rank in enumerate(self._ranks):
            # torchrun asks the others to end, and lists them as well.
            is_asked = failures.get(number) == -signal.SIGTERM
            code = None if rank.killed or is_asked else failures.get(number)
            found.append(
                {
                    "exit_code": code if code is not None and code >= 0 else None,
                    "signal": -code if code is not None and code < 0 else None,
                    "max_resident_bytes": rank.max_resident_bytes,
                    "ended_at": rank.ended_at,
                }
            )
        return found

    def _look_at(self, rank: _Rank) -> bool:
        """Note a rank's size or its end; return whether it has failed."""
        if rank.pid is None:
            with suppress(OSError, ValueError):
                rank.pid = int((rank.folder / tasks.PID).read_text())
        if rank.pid is not None and rank.ended_at is None:
            resident = _peak_resident(rank.pid)
            if resident is None:
                rank.ended_at = time.time()
            else:
                rank.max_resident_bytes = max(resident, rank.max_resident_bytes or 0)
        failed = has_failed(rank.folder)
        return failed is True or (failed is None and rank.ended_at is not None)

    def _kill(self, rank: _Rank) -> None:
        """End a rank by the group that it leads, if it is still ours and alive."""
        if rank.pid is None or rank.ended_at is not None or not _is_child(rank.pid):
            return
        rank.killed = True
        processes.signal_group(rank.pid, signal.SIGKILL)


def _peak_resident(pid: int) -> int | None:
    """Return the peak resident size of a process in bytes; None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmHWM" not in fields:
        return None  # a zombie has no memory any more
    return int(fields["VmHWM"].split()[0]) * 1024


def _is_child(pid: int) -> bool:
    """Whether a process is a child of this one, so that its number is nobody else's."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[1]) == os.getpid()
