"""Worker tasks without a training stack, named as ``autotune.testing.tasks:echo``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import PrerequisiteError
from autotune.testing.faults import fork_sleeper


def echo(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request, this process's pid and its parent's."""
    return {"request": dict(request), "pid": os.getpid(), "parent_pid": os.getppid()}


def environment(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment variables called ``request["names"]``, and the request's device."""
    values = {name: os.environ.get(name) for name in request["names"]}
    return {"values": values, "device": request.get("device")}


def refuse(request: Mapping[str, Any]) -> dict[str, Any]:
    """Raise an error of ours."""
    raise PrerequisiteError("There is no access to the model.", hint="Log in.")


def fail(request: Mapping[str, Any]) -> dict[str, Any]:
    """Raise an error of nobody's."""
    raise RuntimeError("nobody expects this")


def meet(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return once ``request["parties"]`` processes are in ``request["folder"]`` at once."""
    folder = Path(request["folder"])
    (folder / f"{os.getpid()}").touch()
    while len(list(folder.iterdir())) < request["parties"]:
        time.sleep(0.01)
    return {"pid": os.getpid()}


def sleep(request: Mapping[str, Any]) -> dict[str, Any]:
    """Note this pid and that of a child in ``request["file"]``, then sleep."""
    path = Path(request["file"])
    temporary = path.with_suffix(".new")
    temporary.write_text(f"{os.getpid()} {fork_sleeper()} {os.getppid()}")
    temporary.replace(path)
    time.sleep(600)
    return {}
