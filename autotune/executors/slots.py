"""From devices to slots: which devices a probe sees, and by which environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from autotune.errors import UsageError
from autotune.executors.jobs import Slot

AUTO = "auto"
"""The device that a worker finds; a spec names it once it is known."""


def slots_of(devices: Sequence[int | str], processes: int = 1) -> tuple[Slot, ...]:
    """Return a slot for each group of devices that one probe runs on.

    Args:
        devices: CUDA indices or device names.
        processes: Processes of one probe. With several, one CUDA device is the first of its
            group, and more of them form groups in their order.

    Raises:
        UsageError: If a device is wrong, or they do not form groups of that size.
    """
    if processes == 1:
        return tuple(_slot([device]) for device in devices)
    names = [f"cuda:{item}" if isinstance(item, int) else item for item in devices]
    if any(name.partition(":")[0] != "cuda" for name in names):
        return tuple(_slot([name], processes) for name in names)
    if len(names) == 1:
        first = _index(names[0])
        names = [f"cuda:{first + number}" for number in range(processes)]
    if len(names) % processes:
        raise UsageError(
            f"{len(names)} devices do not form groups of {processes}, one for each process.",
            hint=f"Give a multiple of {processes}.",
        )
    groups = [names[at : at + processes] for at in range(0, len(names), processes)]
    return tuple(_slot(group, processes) for group in groups)


def _slot(devices: Sequence[int | str], processes: int = 1) -> Slot:
    """Return the slot for one device, or for a CUDA device per process.

    A probe sees its own cards alone, from index 0 on, so that nothing it loads can touch others.
    """
    device = devices[0]
    if isinstance(device, int):
        device = f"cuda:{device}"
    kind, _, index = device.partition(":")
    if kind == AUTO:
        # Which kind it is only a worker can tell; if it is CUDA, a card per process is enough.
        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        all_of_them = [str(number) for number in range(processes)]
        names = all_of_them if text is None else _visible(text)
        return Slot(AUTO, {"CUDA_VISIBLE_DEVICES": ",".join(names[:processes])})
    if kind == "virtual":
        # Libraries must not find a real card beside the pretended one.
        return Slot(device if index else AUTO, {"CUDA_VISIBLE_DEVICES": ""})
    if kind != "cuda":
        return Slot(device)
    numbers = [item if isinstance(item, int) else _index(item) for item in devices]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return Slot("cuda:0", {"CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))})
    names = _visible(visible)
    if max(numbers) >= len(names):
        each = f"; {processes} processes need one each" if processes > 1 else ""
        lower = ", or lower --processes" if processes > 1 else ""
        raise UsageError(
            f"There is no cuda:{max(numbers)}: CUDA_VISIBLE_DEVICES={visible} shows"
            f" {len(names)} device(s){each}.",
            hint=f"Change CUDA_VISIBLE_DEVICES or the device{lower}.",
        )
    return Slot("cuda:0", {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in numbers)})


def _index(name: str) -> int:
    index = name.partition(":")[2]
    if index and not index.isdigit():
        raise UsageError(f"The device {name!r} is unknown.", hint="Use cuda:0, cuda:1, ...")
    return int(index or 0)


def _visible(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
