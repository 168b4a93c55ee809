"""The part of the device that PyTorch's C++ side asks while it unwinds from a Python error.

A hook of autograd that raises (a checkpoint that computes again, a hook on a gradient) leaves its
error set in the interpreter while C++ unwinds. On the way the guards of the device are asked for
their type, and for a device made in Python that is a call into Python. Python refuses calls that
end with an error set, and the guards may not throw: the process would be aborted
(``PythonDeviceGuard::exchangeStream`` in torch/csrc/acc/Module.cpp). So the guard here takes the
error out, and the Python function that started the backward pass raises it again.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_PRIVATE = torch._C._autograd.DeviceType.PrivateUse1
# After a call of this kind ctypes raises what is set in the interpreter, and so clears it.
_raise_pending = ctypes.pythonapi["PyErr_Occurred"]
_raise_pending.restype = ctypes.c_void_p
_pending: list[BaseException] = []


def make() -> Any:
    """Return the guard to register."""

    class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc]
        def type_(self) -> Any:
            try:
                _raise_pending()
            except BaseException as error:  # noqa: BLE001 - it is raised again by _again
                _pending.append(error)
            return _PRIVATE

    return Guard()


def install() -> None:
    """Let backward passes raise the errors that guards took; lasts as long as the device."""
    from torch.autograd import graph

    usual = graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return usual(*args, **kwargs)
        except BaseException as error:
            if not _pending:
                raise
            first = _pending[0]
            _pending.clear()
            if error is first:
                raise
            raise first from None

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
