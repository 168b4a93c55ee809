"""A configuration for ``trl`` that anyone may have written: what it says, with TRL's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import UsageError
from autotune.probe import trust
from autotune.space.context import DataProfile
from autotune.space.knobs.batching import TRL_BATCH_SIZE, TRL_MAX_LENGTH

__all__ = [
    "LAUNCH_KEYS",
    "TRL_MAX_LENGTH",
    "TRL_TEST_SPLIT",
    "coverage",
    "evaluates",
    "for_one_card",
    "number",
    "packs",
    "rows_enough",
]

TRL_TEST_SPLIT = "test"
"""TRL's default of ``dataset_test_split``."""

LAUNCH_KEYS = frozenset(
    {
        "accelerate_config",
        "config_file",
        "gpu_ids",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "mixed_precision",
        "multi_gpu",
        "num_machines",
        "num_processes",
        "use_deepspeed",
        "use_fsdp",
    }
)
"""What ``trl`` hands on to ``accelerate launch``; TRL's own parser knows none of them."""

_SHARDING = ("deepspeed", "fsdp", "use_deepspeed", "use_fsdp", "multi_gpu")
_ONE_CARD = (None, "single_gpu")


def for_one_card(
    config: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """Return the configuration as one process on one accelerator reads it.

    Args:
        config: The mapping of a file.
        where: The file's name, for errors.

    Returns:
        The mapping without what only launches processes or names another device; the environment
        that it sets; and what was left out, in whole sentences.

    Raises:
        UsageError: If it divides the model among several cards, or a value is of a wrong kind
            or leaves nothing to train on.
    """
    _refuse_sharding(config, where)
    _refuse_nothing(config, where)
    env = config.get("env") or {}
    if not isinstance(env, Mapping):
        raise UsageError(f"{where}: env is {env!r}, not a mapping of names to values.")
    notes = []
    kept = {key: value for key, value in config.items() if key not in LAUNCH_KEYS}
    launched = sorted(set(config) & LAUNCH_KEYS)
    if launched:
        notes.append(f"{', '.join(launched)}: left out; one process is predicted.")
    if kept.pop("use_cpu", None):
        notes.append("use_cpu: left out; training on the card is predicted.")
    if kept.get("tf32"):
        notes.append("tf32: no effect on memory; float32 products are timed without it.")
    if kept.get("torch_empty_cache_steps"):
        notes.append("torch_empty_cache_steps: not predicted; it lowers reserved memory and rate.")
    if kept.get("auto_find_batch_size"):
        notes.append("auto_find_batch_size: the batch size that the file names is predicted.")
        kept["auto_find_batch_size"] = False
    visible, refused = trust.harmless(env)
    if refused:
        notes.append(f"env: {', '.join(refused)}: left out; a prediction takes no such variable.")
    if kept.pop("resume_from_checkpoint", None):
        notes.append(
            "resume_from_checkpoint: left out; a run from the start is predicted, and the"
            " checkpoint takes memory of its own while it is read."
        )
    # Which real card may be seen is none of a pretended one's business.
    visible.pop("CUDA_VISIBLE_DEVICES", None)
    kept.pop("env", None)
    return ({**kept, "env": visible} if visible else kept), visible, tuple(notes)


def _refuse_sharding(config: Mapping[str, Any], where: str) -> None:
    found = [key for key in _SHARDING if config.get(key)]
    found += [
        key for key in ("num_processes", "num_machines") if (number(config, key, 1) or 1) > 1
    ]
    if config.get("accelerate_config") not in _ONE_CARD:
        found.append("accelerate_config")
    if found:
        raise UsageError(
            f"{where} divides the work among several cards ({', '.join(found)}); a prediction is"
            " for one.",
            hint="Take that out to see what one card would need.",
        )


def _refuse_nothing(config: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that leave nothing to train on: TRL itself finds out when it trains."""
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps", "max_length"]
    keys += ["per_device_eval_batch_size"] if evaluates(config) else []
    for key in keys:
        value = number(config, key, None)
        if value is not None and value < 1:
            raise UsageError(
                f"{where}: {key} is {value}, with which trl cannot train.",
                hint=f"Set {key} to 1 or more.",
            )


def number(config: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """Return a whole number of the configuration; ``default`` where it has none.

    What is no number at all is TRL's to refuse.
    """
    value = config.get(key, default)
    if isinstance(value, bool):
        return default
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return default


def packs(config: Mapping[str, Any]) -> bool:
    """Return whether rows are packed."""
    return bool(config.get("packing"))


def evaluates(config: Mapping[str, Any]) -> bool:
    """Return whether the run evaluates while it trains, which takes memory of its own."""
    return config.get("eval_strategy") in ("steps", "epoch")


def coverage(config: Mapping[str, Any], data: DataProfile) -> float | None:
    """Return the share (0 to 1) of the loss tokens that are trained on; None if not known."""
    if packs(config) and config.get("packing_strategy", "bfd") != "bfd":
        return 1.0
    max_length = number(config, "max_length", TRL_MAX_LENGTH)
    if max_length is not None and config.get("truncation_mode", "keep_start") != "keep_start":
        return 1.0 if max_length >= data.longest else None
    try:
        return data.coverage(max_length)
    except ValueError:
        return None


def rows_enough(config: Mapping[str, Any], length: int) -> int:
    """Return how many rows of one length make a few micro-batches, packed ones included."""
    batch_size = number(config, "per_device_train_batch_size", TRL_BATCH_SIZE) or 1
    limit = number(config, "max_length", TRL_MAX_LENGTH)
    per_row = max(1, limit // length) if packs(config) and limit else 1
    return 4 * batch_size * per_row
