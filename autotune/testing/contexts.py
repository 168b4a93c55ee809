"""Contexts to try search spaces in: a CPU, a GPU, rows of chosen lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.space.context import Context, DataProfile, DeviceInfo, ModelFacts
from autotune.space.lengths import round_up_useful, useful_lengths
from autotune.units import GIB

PACKAGES: Mapping[str, str] = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
}


def make_profile(lengths: Sequence[int], **changes: Any) -> DataProfile:
    """Return the profile of rows of the given lengths in which every token carries loss."""
    longest = max(lengths)
    tabled = useful_lengths(round_up_useful(longest))
    values: dict[str, Any] = {
        "num_rows": len(lengths),
        "num_tokens": sum(lengths),
        "num_loss_tokens": sum(lengths),
        "length_counts": dict(sorted(Counter(lengths).items())),
        "max_lengths": tabled,
        "loss_tokens_kept": tuple(sum(min(n, limit) for n in lengths) for limit in tabled),
        "rows_cut": tuple(sum(n > limit for n in lengths) for limit in tabled),
        "rows_dropped": (0,) * len(tabled),
        "format": "messages",
        "fingerprint": f"rows-{len(lengths)}-{sum(lengths)}",
    }
    return DataProfile(**{**values, **changes})


def make_cpu(**changes: Any) -> DeviceInfo:
    """Return a CPU with 64 GiB that supports bfloat16."""
    values: dict[str, Any] = {
        "name": "cpu",
        "kind": "cpu",
        "label": "Test CPU",
        "total_bytes": 64 * GIB,
        "free_bytes": 60 * GIB,
        "supports_bf16": True,
    }
    return DeviceInfo(**{**values, **changes})


def make_gpu(**changes: Any) -> DeviceInfo:
    """Return a CUDA device of compute capability 9.0 with 80 GiB."""
    values: dict[str, Any] = {
        "name": "cuda:0",
        "kind": "cuda",
        "label": "Test GPU",
        "total_bytes": 80 * GIB,
        "free_bytes": 79 * GIB,
        "supports_bf16": True,
        "capability": (9, 0),
        "driver": "580.65",
    }
    return DeviceInfo(**{**values, **changes})


def make_model(**changes: Any) -> ModelFacts:
    """Return the facts of a small Llama with 16 layers and 8192 positions."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "architecture": "LlamaForCausalLM",
        "num_parameters": 1_000_000_000,
        "num_layers": 16,
        "max_positions": 8192,
        "vocab_size": 32_000,
        "keeps_documents_apart": {"sdpa": True, "eager": True},
    }
    return ModelFacts(**{**values, **changes})


def make_context(
    *,
    device: DeviceInfo | None = None,
    model: ModelFacts | None = None,
    lengths: Sequence[int] = 2 * (100, 200, 300, 400, 500, 700, 900, 1500, 1900, 3000),
    **changes: Any,
) -> Context:
    """Return a context: a CPU, a small Llama, twenty rows, and a global batch of 16."""
    values: dict[str, Any] = {
        "trainer": "sft",
        "device": device or make_cpu(),
        "model": model or make_model(),
        "data": make_profile(lengths),
        "packages": PACKAGES,
        "global_batch": 16,
    }
    return Context(**{**values, **changes})
