"""What a result must share with another to be compared: versions, device, host."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from autotune.devices.base import DeviceBackend

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "bitsandbytes",
    "tokenizers",
)
OPTIONAL_PACKAGES = ("flash-attn", "flash_attn_3", "kernels", "vllm", "deepspeed", "liger-kernel")


def installed(names: tuple[str, ...] = PACKAGES + OPTIONAL_PACKAGES) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def environment(device: DeviceBackend) -> dict[str, object]:
    """Return versions, device and host as plain JSON."""
    info = device.describe()
    return {
        "packages": installed(PACKAGES),
        "python": platform.python_version(),
        "device": info.label,
        "device_kind": info.kind,
        "driver": info.driver,
        "host": platform.node(),
        "platform": platform.platform(),
    }
