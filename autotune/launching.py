"""Several processes per probe: what is asked for, what the devices allow, what is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.devices import host
from autotune.errors import PrerequisiteError, UsageError
from autotune.probe import accelerate_config
from autotune.space.context import Context, DeviceInfo
from autotune.space.knobs.sharding import cannot_shard
from autotune.units import counted


def check_request(processes: int | None, config: str | None, *, device: str) -> dict[str, Any]:
    """Check what is asked for, before a process is started to look.

    Returns:
        What is in the user's configuration of ``accelerate launch``; empty without one.

    Raises:
        UsageError: If it cannot be, whatever the machine.
        PrerequisiteError: If the configuration's file cannot be read.
    """
    if processes is not None and processes < 1:
        raise UsageError(f"processes is {processes}; a probe has one at least.")
    found = {} if config is None else accelerate_config.read(config)
    several = int(found.get("num_processes", processes or 1))
    if processes is not None and processes != several:
        raise UsageError(
            f"--processes {processes}, but the accelerate config {config} has"
            f" num_processes: {several}.",
            hint="Leave --processes away, or change the file.",
        )
    kind = device.partition(":")[0]
    if several > 1 and kind == "virtual":
        raise UsageError(
            f"{several} processes can't be predicted: on a virtual card nothing is exchanged"
            " between processes, so that memory that is sharded would be a guess.",
            hint="Predict with one process, or search on the real devices.",
        )
    if several > 1 and kind == "mps":
        raise UsageError("there is one mps device in a machine, so that a probe has one process.")
    return found


def share(device: DeviceInfo, processes: int) -> DeviceInfo:
    """Return the device as one of ``processes`` processes has it.

    Each has an accelerator of its own; on the CPU they divide the memory of the host.

    Raises:
        PrerequisiteError: If there are fewer devices than processes; on the CPU, fewer cores.
    """
    if processes == 1:
        return device
    if device.kind == "cpu":
        cores = host.usable_cpus()
        if processes > cores:
            raise PrerequisiteError(
                f"{processes} processes are more than the {counted(cores, 'core')} that may be"
                " used here; they would only wait for each other.",
                hint=f"Use --processes {cores} or fewer.",
            )
        return replace(
            device,
            label=f"{device.label} (1 of {processes} processes)",
            total_bytes=device.total_bytes // processes,
            free_bytes=device.free_bytes // processes,
        )
    if processes > device.num_devices:
        raise PrerequisiteError(
            f"{processes} processes need a {device.kind} device each, and there"
            f" {'is' if device.num_devices == 1 else 'are'} {device.num_devices}.",
            hint=f"Use --processes {device.num_devices} or fewer.",
        )
    return device


def check_sharding(
    found: Mapping[str, Any], config: str | None, device: DeviceInfo, packages: Mapping[str, str]
) -> str | None:
    """Check that accelerate would do on this device what a configuration says.

    Args:
        found: The user's configuration of ``accelerate launch``; empty without one.
        config: Its file.
        device: Of each process.
        packages: Those that are installed.

    Returns:
        How it shards; None without one.

    Raises:
        UsageError: If accelerate would do something else.
        PrerequisiteError: If it needs a package that is missing.
    """
    if not found:
        return None
    sharding = accelerate_config.sharding_of(found)
    reason = cannot_shard(sharding, device.kind)
    if reason:
        raise UsageError(f"the accelerate config {config} can't be used: {reason}.")
    if sharding.startswith("zero") and "deepspeed" not in packages:
        raise PrerequisiteError(
            f"the accelerate config {config} needs the package deepspeed, which is not installed.",
            hint="pip install 'trl-autotune[deepspeed]'",
        )
    return sharding


def notices(context: Context, config: Mapping[str, Any]) -> list[str]:
    """Return what the user should know about figures of several processes, in whole sentences."""
    if context.num_processes == 1:
        return []
    each = (
        "the host's memory divided among them" if context.device.kind == "cpu" else "a card each"
    )
    found = [
        f"Every probe trains in {context.num_processes} processes, with {each}. Memory is that of"
        " the process that needs most, and the budget is one process's; rates are those of the"
        " whole job."
    ]
    precision = str(config.get("mixed_precision") or "no")
    if precision != "no":
        found.append(
            f"The accelerate config sets mixed_precision: {precision}, which wins over the"
            " trainer's own setting in every candidate."
        )
    return found


def identity(processes: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what several processes add to the identity of a search."""
    if processes == 1:
        return {}
    return {"processes": processes, **({"accelerate_config": dict(config)} if config else {})}
