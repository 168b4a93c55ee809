"""What the installed TRL makes of a setting, found out by trying it on the smallest of models.

A trainer may accept a way of checkpointing and ignore it, or raise in the first step. Which is so
changes from one version of TRL to the next, so each way is tried for two steps on the CPU (some
trainers undo it after the first), and the operators that ran tell whether it took effect.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from autotune.space.knobs.memory import checkpointing_keys
from autotune.trainers.preparing import ON_HOST, one_line

TWO_STEPS = {
    **ON_HOST,
    "max_steps": 2,
    "per_device_train_batch_size": 1,
    "disable_tqdm": True,
    "logging_strategy": "no",
    "save_strategy": "no",
}
"""TRL keys of what is tried."""

NUM_LAYERS = 4
"""Layers of the model that is tried: so many that every second one tells from every one."""


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def small_model(vocab_size: int) -> LlamaForCausalLM:
    """Return a model with a few layers, in which attention is an operator of its own."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=2,
            attn_implementation="sdpa",
        )
    )


def checkpointing_refusals(
    train: Callable[[Mapping[str, Any]], None], values: tuple[str, ...]
) -> dict[str, str]:
    """Return which ways of checkpointing raise or have no effect, each with the reason.

    Args:
        train: Trains two steps of :func:`small_model` with these TRL keys.
        values: Values of the knob ``checkpointing`` to try, beside ``none`` and ``full``.
    """
    whole = _tried(train, "full")
    refused = {}
    for value in values:
        found = _tried(train, value)
        if isinstance(found, str):
            refused[value] = f"TRL {_version()} raises with it: {found}"
        elif isinstance(whole, Counter) and found == whole:
            refused[value] = f"TRL {_version()} accepts it here and checkpoints every layer whole"
    return refused


def spread(refused: Mapping[str, str]) -> dict[str, str]:
    """Return the refusals with what holds for every second layer said of every fourth as well."""
    found = dict(refused)
    if "every_2_layers" in found:
        found["every_4_layers"] = found["every_2_layers"]
    return found


def _tried(train: Callable[[Mapping[str, Any]], None], value: str) -> Counter[str] | str:
    """Return the operators of two steps, or why they could not be."""
    with tempfile.TemporaryDirectory(prefix="autotune-detect-") as folder:
        keys = {"output_dir": folder, **checkpointing_keys(value)}
        operators = _Operators()
        try:
            with torch.random.fork_rng(devices=[]), operators:
                train(keys)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  TRL and torch may raise anything
            return one_line(error)
    # Attention and products tell what was computed twice; all else differs with bookkeeping.
    kept = ("attention", "::mm", "::addmm", "::bmm")
    return Counter({n: c for n, c in operators.counts.items() if any(part in n for part in kept)})


def _version() -> str:
    from importlib.metadata import version

    return version("trl")
