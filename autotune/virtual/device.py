"""The pretend accelerator as PyTorch sees it: the only module that uses the experimental API.

``torch.utils.backend_registration._setup_privateuseone_for_python_backend`` registers a device
made in Python. Tensors on it are real ``torch.Tensor`` objects with real storages of no bytes, so
autograd, checkpointing, hooks and optimizers run as they are.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

from autotune.errors import PrerequisiteError
from autotune.virtual import attention, autocast, guard, hostmemory, kernels, special, values
from autotune.virtual.state import current

DEVICE_TYPE = "virtual"
_libraries: list[Any] = []


def install() -> None:
    """Register the device in this process, once; it can't be taken back.

    Raises:
        PrerequisiteError: If the installed PyTorch lacks what it takes, or another library has
            taken the place that PyTorch has for such a device.
    """
    if _libraries:
        return
    setup = getattr(torch.utils.backend_registration, _SETUP, None)
    if setup is None or not hasattr(torch._C, "_acc"):
        raise PrerequisiteError(
            f"PyTorch {torch.__version__} cannot have a device made in Python.",
            hint="Virtual probes need PyTorch 2.10 or later.",
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", DEVICE_TYPE):
        raise PrerequisiteError(
            f"PyTorch's place for a further device is taken by {taken!r} in this process.",
            hint="Run virtual probes in a process that does not import that library.",
        )
    setup(DEVICE_TYPE, backend_module=_module(), device_guard=guard.make())
    guard.install()
    library = torch.library.Library("aten", "IMPL")
    fallback = torch.library.Library("_", "IMPL")
    kernels.register(library, special.SPECIAL)
    kernels.install_fallback(fallback)
    attention.register(library)
    autocast.register(library, fallback)
    _copy_storages()
    # Registrations last as long as the library objects do.
    _libraries.extend((library, fallback))


def _copy_storages() -> None:
    """Let storages be copied on, to and from the device without reading their addresses.

    PyTorch asks the device for an allocator, in C++, where a device made in Python has none:
    ``copy.deepcopy``, ``torch.save`` and ``torch.load`` end the process. Lasts as long as the
    device: tensors may outlive the block that they were made in.
    """
    base = torch.storage._StorageBase
    clone, cpu, to = base.clone, base.cpu, base.to

    def clone_(storage: Any) -> Any:
        return _new_storage(storage) if storage.device.type == DEVICE_TYPE else clone(storage)

    def cpu_(storage: Any) -> Any:
        if storage.device.type != DEVICE_TYPE:
            return cpu(storage)
        known = values.bytes_of(storage)
        if known is not None:
            return known.untyped_storage()
        nbytes = storage.nbytes()
        return hostmemory.empty((nbytes,), (1,), torch.uint8).untyped_storage()

    def to_(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        there = torch.device(device)
        if storage.device.type == DEVICE_TYPE and there.type == "cpu":
            return cpu_(storage)
        if storage.device.type != DEVICE_TYPE and there.type == DEVICE_TYPE:
            return _new_storage(storage)
        return to(storage, device=device, non_blocking=non_blocking)

    base.clone, base.cpu, base.to = clone_, cpu_, to_


def _new_storage(like: Any) -> Any:
    return kernels.new((like.nbytes(),), torch.uint8, "clone").untyped_storage()


_SETUP = "_setup_privateuseone_for_python_backend"


class Stream(torch.Stream):  # type: ignore[misc]
    """A stream of the device; work is done when the call returns."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Stream:
        """Return the device's only stream, whatever is asked for."""
        return super().__new__(cls, device=torch.device(DEVICE_TYPE, 0))  # type: ignore[no-any-return]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: all is done."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def record_event(self, event: Any = None) -> Any:
        """Return a reached event."""
        return event if event is not None else Event()


class Event:
    """An event of the device; always reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Return at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, other: Any) -> float:
        """Return 0 milliseconds."""
        return 0.0


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _allocated(device: Any = None) -> int:
    session = current()
    return session.trace.allocated_bytes if session is not None else 0


def _peak(device: Any = None) -> int:
    session = current()
    return session.trace.peak_bytes if session is not None else 0


def _reset_peak(device: Any = None) -> None:
    session = current()
    if session is not None:
        session.trace.reset_peak()


def _memory_info(device: Any = None) -> tuple[int, int]:
    session = current()
    total = session.total_bytes if session is not None else 0
    return total - _allocated(), total


def _capability(device: Any = None) -> tuple[int, int]:
    session = current()
    return session.capability if session is not None else (0, 0)


def _properties(device: Any = None) -> types.SimpleNamespace:
    session = current()
    major, minor = _capability()
    return types.SimpleNamespace(
        name=session.name if session is not None else DEVICE_TYPE,
        total_memory=session.total_bytes if session is not None else 0,
        major=major,
        minor=minor,
        multi_processor_count=session.multiprocessors if session is not None else 1,
    )


def _has_bf16(*args: Any, **kwargs: Any) -> bool:
    session = current()
    return session is None or session.supports_bf16


def _amp_dtypes() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{DEVICE_TYPE}")
    functions: dict[str, Any] = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "is_built": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": _nothing,
        "device": lambda *a, **k: contextlib.nullcontext(),
        "_is_in_bad_fork": lambda: False,
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
        "seed_all": _nothing,
        "initial_seed": lambda: 0,
        "get_rng_state": lambda *a, **k: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda *a, **k: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state": _nothing,
        "set_rng_state_all": _nothing,
        "get_amp_supported_dtype": _amp_dtypes,
        "is_bf16_supported": _has_bf16,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_stream": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "memory_allocated": _allocated,
        "max_memory_allocated": _peak,
        "memory_reserved": _allocated,
        "max_memory_reserved": _peak,
        "memory_stats": lambda device=None: {"num_alloc_retries": 0},
        "reset_peak_memory_stats": _reset_peak,
        "reset_max_memory_allocated": _reset_peak,
        "mem_get_info": _memory_info,
        "get_device_capability": _capability,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: _properties().name,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module
