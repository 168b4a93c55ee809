"""From an exception, or the last words of a process, to an outcome.

Out-of-memory is recognised here alone: by the exception's type and then its message, from the
signatures that each device declares. Imports nothing heavy: the search reads last words, too.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from autotune.devices.base import OomSignature
from autotune.errors import AutotuneError, PrerequisiteError
from autotune.probe.result import Outcome
from autotune.trainers.base import DivergedError
from autotune.virtual.errors import REFUSALS
from autotune.worker.tasks import is_disk_full

LIBRARIES = frozenset(
    {"torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "vllm"}
)
"""Packages whose refusal of a configuration is the candidate's verdict."""

HOST_OOM_SIGNATURES = (
    OomSignature(type_name="RuntimeError", message="DefaultCPUAllocator: can't allocate"),
    OomSignature(type_name="RuntimeError", message="DefaultCPUAllocator: not enough memory"),
    OomSignature(type_name="RuntimeError", message="std::bad_alloc"),
    OomSignature(type_name="MemoryError"),
)
"""How the host's own memory runs out, whatever the device."""

LAST_WORDS = (
    OomSignature(type_name="", message="DefaultCPUAllocator: can't allocate"),
    OomSignature(type_name="", message="std::bad_alloc"),
    OomSignature(type_name="", message="libgomp: Thread creation failed"),
    OomSignature(type_name="", message="OMP: Error #34"),
    OomSignature(type_name="", message="can't start new thread"),
    OomSignature(type_name="MemoryError"),
)
"""What native code prints to stderr when it ends the process for want of host memory."""

_DEVICE_OOM = (
    OomSignature(type_name="torch.OutOfMemoryError"),
    OomSignature(type_name="torch.cuda.OutOfMemoryError"),
)
_REFUSALS = (ImportError, NotImplementedError, ValueError, TypeError, AttributeError)
_BROKEN_FILES = (UnicodeError, json.JSONDecodeError)
_BROKEN_SETUP = ("CUDA error", "CUDA driver", "No CUDA GPUs", "NVIDIA driver", "NCCL", "HIP error")


def classify(
    error: BaseException,
    signatures: Sequence[OomSignature] = (),
    *,
    device_kind: str,
    phase: str | None = None,
) -> Outcome:
    """Return the outcome of a probe that ended with ``error``.

    Args:
        error: What the probe raised; its causes and contexts count as well.
        signatures: How the device's allocation failures look.
        device_kind: Backend; on ``cpu`` the host's memory is the device's.
        phase: What the probe was at; while it is built (``load``), libraries refuse in more ways.

    Raises:
        AutotuneError: ``error`` itself, if it is one: the search can't go on as asked.
        PrerequisiteError: If the disk is full, which says nothing about the candidate.
    """
    if isinstance(error, AutotuneError):
        raise error
    chain = tuple(_chain(error))
    for item in chain:
        if is_disk_full(item):
            raise PrerequisiteError(
                f"The disk is full ({item}).", hint="Free some space and search again."
            ) from error
    if any(isinstance(item, DivergedError) for item in chain):
        return Outcome.DIVERGED
    if any(_matches(item, (*signatures, *_DEVICE_OOM)) for item in chain):
        return Outcome.DEVICE_OOM
    if any(_matches(item, HOST_OOM_SIGNATURES) or _is_enomem(item) for item in chain):
        return Outcome.DEVICE_OOM if device_kind == "cpu" else Outcome.HOST_OOM
    if _is_refusal(error, chain, building=phase in (None, "load")):
        return Outcome.UNSUPPORTED
    return Outcome.CRASHED


def classify_text(
    text: str, *, device_kind: str, has_budget: bool, signatures: Sequence[OomSignature] = ()
) -> Outcome:
    """Return the outcome of a process that died printing ``text`` instead of raising.

    A budget makes native code die where it would have got its memory otherwise; without one, the
    same words are no proof.
    """
    known = (*signatures, *LAST_WORDS)
    if has_budget and any((item.message or _short(item.type_name)) in text for item in known):
        return Outcome.DEVICE_OOM if device_kind == "cpu" else Outcome.HOST_OOM
    return Outcome.CRASHED


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all that led to it, the members of groups included."""
    seen: set[int] = set()
    left = [error]
    while left:
        item = left.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, BaseExceptionGroup):
            left.extend(item.exceptions)
        if item.__cause__ is not None:
            left.append(item.__cause__)
        if item.__context__ is not None and not item.__suppress_context__:
            left.append(item.__context__)


def _matches(error: BaseException, signatures: Sequence[OomSignature]) -> bool:
    names = {_qualified(kind) for kind in type(error).__mro__}
    text = str(error)
    return any(item.type_name in names and item.message in text for item in signatures)


def _qualified(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _is_enomem(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def _is_refusal(error: BaseException, chain: Sequence[BaseException], *, building: bool) -> bool:
    """Whether a library, or the adapter, said that it can't do what the candidate asks."""
    if any(isinstance(item, (OSError, *_BROKEN_FILES)) for item in chain):
        return False  # a missing file or an unreachable hub is no verdict on a configuration
    if isinstance(error, REFUSALS):
        return True
    package = _raised_in(error)
    if package == "autotune":
        # Our own ValueError refuses; our own TypeError is a bug.
        return building and isinstance(error, (ValueError, NotImplementedError))
    if package not in LIBRARIES:
        return False
    if isinstance(error, _REFUSALS):
        return True
    return (
        building
        and isinstance(error, RuntimeError)
        and type(error).__name__ != "AcceleratorError"
        and not any(words in str(error) for words in _BROKEN_SETUP)
    )


def _raised_in(error: BaseException) -> str | None:
    """Return the package that raised, the standard library's own frames passed over."""
    package = None
    trace = error.__traceback__
    while trace is not None:
        top = _package(trace.tb_frame)
        # Compiled graphs run in frames without a module.
        if top and top not in sys.stdlib_module_names:
            package = top
        trace = trace.tb_next
    return package


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
