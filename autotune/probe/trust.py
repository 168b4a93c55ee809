"""What a configuration may have run besides the trainer: code of others, and the environment.

A configuration is data that people send each other. Looking at one must not run what it names
unless the user says so, and not where the file itself says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.errors import UsageError

_CODE = ("trust_remote_code", "allow_all_kernels")
_ATTENTION = "attn_implementation"
_KNOWN_KERNELS = "kernels-community/"
"""What transformers itself fetches kernels from."""

HARMLESS = frozenset(
    {
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "CUDA_VISIBLE_DEVICES",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "MALLOC_ARENA_MAX",
        "MALLOC_MMAP_MAX_",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TOP_PAD_",
        "MALLOC_TRIM_THRESHOLD_",
        "LRU_CACHE_CAPACITY",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "HF_DATASETS_OFFLINE",
        "HF_HUB_DISABLE_TELEMETRY",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    }
)
"""Variables that name neither a file, nor a library, nor a server.

By their whole names: CUDA_INJECTION64_PATH begins as harmlessly as CUDA_DEVICE_ORDER, and names a
library that the driver loads.
"""


def check_code(config: Mapping[str, Any], where: str, *, trusted: bool) -> None:
    """Refuse a configuration that asks for code of others to run, unless the user trusts it.

    Args:
        config: TRL keys.
        where: What to call it in the message.
        trusted: Whether ``--trust-remote-code`` was given.

    Raises:
        UsageError: Naming the keys that ask for it.
    """
    found = [] if trusted else list(dict.fromkeys(_asking(config)))
    if found:
        raise UsageError(
            f"{where} asks for code that comes with a model to be run ({', '.join(found)}).",
            hint="Read that code; if you trust it, add --trust-remote-code to the command line.",
        )


def harmless(env: Mapping[Any, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a configuration may set, and the names of the others."""
    kept = {str(key): str(value) for key, value in env.items() if str(key) in HARMLESS}
    return kept, sorted({str(key) for key in env} - HARMLESS)


def _asking(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        has_kernel = key == _ATTENTION and any(_is_foreign(name) for name in _texts(value))
        if has_kernel or (key in _CODE and value):
            yield key
        elif isinstance(inner := _mapping(value), Mapping):
            yield from (f"{key}.{name}" for name in _asking(inner))


def _mapping(value: Any) -> Any:
    """Return a value as TRL reads it: a mapping may be written as JSON in a text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _texts(value: Any) -> Iterator[str]:
    """Yield the names in a value that may map parts of a model to names."""
    value = _mapping(value)
    for item in value.values() if isinstance(value, Mapping) else (value,):
        if isinstance(item, str):
            yield item


def _is_foreign(name: str) -> bool:
    """Whether a name of attention is that of a repository with a kernel, and not a known one."""
    name = name.rpartition("|")[2]  # what stands before says how it is called
    return "/" in name and not name.startswith(_KNOWN_KERNELS)
