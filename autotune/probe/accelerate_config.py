"""The configuration of ``accelerate launch``: written for a way of sharding, or the user's own.

It is a plain mapping, the same for a probe and for the file exported beside the trainer's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import PrerequisiteError, UsageError
from autotune.probe import trl_yaml

FILE_NAME = "accelerate.yaml"
"""In a probe's folder: what its processes were started with."""

DDP, FSDP2, ZERO2, ZERO3 = SHARDINGS = ("ddp", "fsdp2", "zero2", "zero3")

_SHARDED: Mapping[str, Mapping[str, Any]] = {
    DDP: {},
    FSDP2: {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            # TRL's own key decides on checkpointing.
            "fsdp_activation_checkpointing": False,
        },
    },
    ZERO2: {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": 2,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
        },
    },
    ZERO3: {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": 3,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
        },
    },
}
"""What each way sets; the values are those of the files that TRL ships in accelerate_configs/."""

_SEVERAL = {"cuda": "MULTI_GPU", "xpu": "MULTI_XPU", "cpu": "MULTI_GPU"}
"""The type that has accelerate start several processes that hold the whole model each.

MULTI_CPU would start one, and leave the rest to mpirun (accelerate/commands/launch.py). With
``use_cpu: true`` in the trainer's file the processes of MULTI_GPU train on the CPU, over gloo.
"""


def written(sharding: str, *, device_kind: str, processes: int) -> dict[str, Any]:
    """Return the configuration that shards so.

    Args:
        sharding: One of ``SHARDINGS``.
        device_kind: Backend that the processes train on.
        processes: How many there are, on one machine.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _SEVERAL.get(device_kind, "MULTI_GPU"),
        **_SHARDED[sharding],
        # The trainer's bf16 and fp16 decide: any other value here would win over them.
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": processes,
        "use_cpu": device_kind == "cpu",
    }


def read(path: str | Path) -> dict[str, Any]:
    """Return the configuration in a file of the user's.

    Raises:
        PrerequisiteError: If it cannot be read.
        UsageError: If it is none for several processes on one machine.
    """
    place = Path(path).expanduser()
    try:
        data = yaml.safe_load(place.read_text())
    except OSError as error:
        raise PrerequisiteError(
            f"the accelerate config {place} cannot be read: {error.strerror or error}.",
            hint="Give the file that `accelerate config` wrote.",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the accelerate config {place} is no YAML: {_one_line(error)}."
        ) from error
    if not isinstance(data, dict) or "distributed_type" not in data:
        raise UsageError(
            f"{place} is no accelerate config: it names no distributed_type.",
            hint="`accelerate config --config_file FILE` writes one.",
        )
    _check_plain(data, place)
    machines = data.get("num_machines", 1)
    if machines != 1:
        raise UsageError(
            f"the accelerate config {place} is for {machines} machines; a probe runs on one.",
            hint="Search on one machine with its number of processes.",
        )
    count = data.get("num_processes")
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise UsageError(
            f"the accelerate config {place} has num_processes: {count}; several are at least 2.",
            hint="Leave --accelerate-config away to search with one process.",
        )
    inner = data.get("deepspeed_config")
    if isinstance(inner, dict) and isinstance(inner.get("deepspeed_config_file"), str):
        # Probes run elsewhere than in the present folder.
        own = (place.parent / inner["deepspeed_config_file"]).resolve()
        data["deepspeed_config"] = {**inner, "deepspeed_config_file": str(own)}
    return data


def _check_plain(data: Mapping[str, Any], place: Path) -> None:
    """Refuse what JSON cannot hold, and sections that are none.

    Raises:
        UsageError: If there is such a thing.
    """
    for name in ("fsdp_config", "deepspeed_config"):
        if not isinstance(data.get(name) or {}, dict):
            raise UsageError(
                f"the accelerate config {place} has no settings under {name}, but"
                f" {data[name]!r:.60}.",
                hint="`accelerate config --config_file FILE` writes one.",
            )
    try:
        json.dumps(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the accelerate config {place} holds what is no plain value: {_one_line(error)}.",
            hint="Use numbers, texts, true and false, lists and mappings.",
        ) from error


def sharding_of(config: Mapping[str, Any]) -> str:
    """Return how a configuration shards: one of ``SHARDINGS``, or accelerate's own word for it."""
    kind = str(config.get("distributed_type"))
    if kind == "FSDP":
        version = (config.get("fsdp_config") or {}).get("fsdp_version", 1)
        return FSDP2 if str(version) == "2" else "fsdp1"
    if kind == "DEEPSPEED":
        return f"zero{(config.get('deepspeed_config') or {}).get('zero_stage', 2)}"
    return DDP if kind.startswith("MULTI_") else kind.lower()


def render(config: Mapping[str, Any], *, comments: tuple[str, ...] = ()) -> str:
    """Return the text of a file for ``accelerate launch --config_file``."""
    head = "".join(f"# {line}\n" for line in comments)
    return f"{head}{yaml.safe_dump(dict(config), sort_keys=False)}"


def write(config: Mapping[str, Any], path: Path, *, trainer_file: str) -> Path:
    """Write the configuration beside the trainer's file of that name, and return its path."""
    mark = trl_yaml.MARK.removeprefix("# ")
    comments = (f"{mark}, to be used with {trainer_file}: see there",)
    trl_yaml.write_text(path, render(config, comments=comments))
    return path


def beside(path: Path) -> Path:
    """Return where the configuration lies that belongs to a trainer's file."""
    suffix = ".yaml" if path.suffix in ("", ".py") else path.suffix
    return path.with_name(f"{path.stem}.accelerate{suffix}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
