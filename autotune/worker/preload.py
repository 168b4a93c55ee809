"""Importing the training stack once, without starting anything a fork would not survive."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    # Whether CUDA is there is asked of NVML: asking CUDA itself would create a context.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # TRL tells the hub of every trainer that is built. Probes are no trainings to be counted, and
    # where the hub can't be reached each attempt takes seconds.
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Set in every worker process before anything is imported, unless the user has set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    """What was imported, and whether this process may still be forked.

    Attributes:
        seconds: Time it took.
        versions: Version per imported module.
        errors: Module to the reason why it could not be imported.
        unsafe: Why a fork of this process could hang or fail; empty if it may be forked.
        num_threads: Native threads of this process.
    """

    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    unsafe: str = ""
    num_threads: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def preload(modules: Sequence[str]) -> Preloaded:
    """Import ``modules`` in order; nothing is run.

    A module is named as ``package`` or ``package:attribute``; the attribute makes a package that
    imports lazily do so now, and one that ends in ``()`` is called.
    """
    began = time.perf_counter()
    # What is imported stays; collecting it again and again would only unshare its pages.
    gc.disable()
    versions: dict[str, str] = {}
    errors: dict[str, str] = {}
    unsafe = ""
    for name in modules:
        package, _, attribute = name.partition(":")
        try:
            module = importlib.import_module(package)
            if attribute:
                found: Any = getattr(module, attribute.removesuffix("()"))
                if attribute.endswith("()"):
                    found()
            if package == "torch":
                _keep_context_away()
            versions[package] = str(getattr(module, "__version__", ""))
        except Exception as error:  # noqa: BLE001  a broken package may raise anything
            errors[package] = f"{type(error).__name__}: {error}"
        unsafe = unsafe or _unsafe_to_fork(after=name)
    _fill_caches()
    gc.collect()
    gc.freeze()
    return Preloaded(
        seconds=time.perf_counter() - began,
        versions={name: text for name, text in versions.items() if text},
        errors=errors,
        unsafe=unsafe,
        num_threads=len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 1,
    )


def missing(modules: Sequence[str]) -> dict[str, str]:
    """Return those of ``modules`` that are not installed, with a reason; imports nothing."""
    # Looking for a submodule would import its package.
    packages = dict.fromkeys(name.partition(":")[0].partition(".")[0] for name in modules)
    return {
        package: f"ModuleNotFoundError: No module named {package!r}"
        for package in packages
        if importlib.util.find_spec(package) is None
    }


def _unsafe_to_fork(*, after: str) -> str:
    """Return why this process must not be forked any more; empty if it may be."""
    torch = sys.modules.get("torch")
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return "this platform's libraries do not survive a fork"
    if torch is not None and torch.cuda.is_initialized():
        return f"PyTorch had initialised CUDA after the import of {after}"
    # The driver opens it in cuInit, whoever called that; NVML does not.
    if any(target.startswith("/dev/nvidia-uvm") for target in _open_files()):
        return f"CUDA was initialised after the import of {after}"
    if threading.active_count() > 1:
        names = ", ".join(sorted(thread.name for thread in threading.enumerate()))
        return f"Python threads ran after the import of {after}: {names}"
    return ""


def _fill_caches() -> None:
    """Have libraries compute here what they compute once per process, the same for every probe."""
    # How checkpoints of all architectures are renamed: a thousand regular expressions.
    with contextlib.suppress(Exception):
        mapping = sys.modules["transformers.conversion_mapping"]
        mapping.get_checkpoint_conversion_mapping("llama")


def _open_files() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(entry.path)


def _keep_context_away() -> None:
    """Answer what packages ask about a card while they are imported, without a context.

    bitsandbytes, which PEFT imports, asks for the compute capability to choose its library;
    PyTorch would initialise CUDA to tell. NVML tells as well. Once the process is a probe and CUDA
    is up, PyTorch answers itself.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return
    original = torch.cuda.get_device_capability
    server_pid = os.getpid()

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        if os.getpid() == server_pid and not torch.cuda.is_initialized():
            index = getattr(device, "idx", getattr(device, "index", device))
            known = _nvml_capability(index if isinstance(index, int) else 0)
            if known is not None:
                return known
        return original(device)  # type: ignore[no-any-return]

    torch.cuda.get_device_capability = get_device_capability


def _nvml_capability(index: int) -> tuple[int, int] | None:
    """Return a card's compute capability from the driver's library; None if it can't tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
                return None
            failed = nvml.nvmlDeviceGetCudaComputeCapability(
                handle, ctypes.byref(major), ctypes.byref(minor)
            )
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else (major.value, minor.value)
