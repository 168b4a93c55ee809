"""The probe process: from a fork or a fresh interpreter to the end of one task."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from autotune.worker import processes, tasks

STDOUT = "stdout.log"
STDERR = "stderr.log"


def enter_fork(task: str, folder: Path, env: Mapping[str, str], *, server_pid: int) -> NoReturn:
    """Turn a just forked copy of the server into the leader of its own group; run the task.

    Args:
        task: What to run.
        folder: Holds the request; takes the logs and the answer.
        env: Environment variables to set.
        server_pid: The process to die with.
    """
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    redirect(folder)
    os.environ.update(env)
    gc.enable()
    run_to_exit(task, folder, parent_pid=server_pid)


def run_to_exit(
    task: str,
    folder: Path,
    *,
    parent_pid: int,
    exit_code: Callable[[Path], int] = lambda folder: 0,
) -> NoReturn:
    """Run ``task`` and end the process, whatever happens, without the server's exit handlers.

    Args:
        task: What to run.
        folder: Holds the request; takes the answer.
        parent_pid: The process to die with.
        exit_code: Gives the exit code of a task that has answered, from its folder.
    """
    processes.die_with(parent_pid)
    processes.offer_to_oom_killer()
    code = 1
    # A handle of our own: the task may close or replace sys.stderr.
    log = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    try:
        faulthandler.enable(file=log)
        # Asked to end: say where it hung, then end.
        faulthandler.register(signal.SIGTERM, file=log, all_threads=True, chain=True)
        tasks.run(task, folder)
        code = exit_code(folder)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001  the process ends here; its exit code tells
        code = tasks.EXIT_DISK_FULL if tasks.ran_out_of_disk(error) else 1
        with suppress(OSError, ValueError):
            traceback.print_exc(file=log)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


def redirect(folder: Path) -> None:
    """Send this process's output to the logs in ``folder``, and give it nothing to read."""
    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, folder / STDOUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, folder / STDERR, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, fd)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
