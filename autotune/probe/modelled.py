"""What of a prediction is modelled, neither measured nor traced, as notes in whole sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.units import format_gib

_CONF, _OLDER_CONF = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def engine_of(makeup: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what vLLM was modelled to reserve; None where it was not.

    Args:
        makeup: Of a prediction's peak, see :mod:`autotune.virtual.summary`.
    """
    found = (makeup or {}).get("modelled", {}).get("vllm")
    return found if isinstance(found, Mapping) else None


def note_on_engines(engines: Sequence[Mapping[str, Any]], *, where: str = "") -> str:
    """Return what of figures with vLLM is modelled, and as what; empty without any.

    Args:
        engines: What :func:`engine_of` returned of each prediction.
        where: Which predictions they are of, such as ``trials 3 and 4``; empty for all.
    """
    if not engines:
        return ""
    sleeps = {bool(engine["sleeps"]) for engine in engines}
    asleep = f", of which {_range(engines, 'training_bytes')} stay while it sleeps"
    return (
        f"vLLM's share of memory and time{f' in {where}' if where else ''} is modelled, neither"
        f" measured nor traced: it takes {_range(engines, 'requested_bytes')} of the card while it"
        f" generates ({_range(engines, 'weights_bytes')} of weights,"
        f" {_range(engines, 'kv_cache_bytes')} of KV cache){asleep if sleeps == {True} else ''},"
        f" as vLLM {engines[0]['vllm']} divides vllm_gpu_memory_utilization. What it holds for"
        " CUDA graphs is a figure from logs. Its time is the least that the card's bandwidth and"
        " arithmetic allow, so that rates with it are too high by what scheduling takes; the usual"
        " errors are not claimed for it."
    )


def _range(engines: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return one field's bytes, or their range."""
    least, most = min(e[name] for e in engines), max(e[name] for e in engines)
    shown = [format_gib(value) for value in (least, most)]
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}"


def note_on_allocator(config: Mapping[str, Any]) -> str:
    """Return why a sleeping vLLM may free nothing; empty if nothing speaks for that.

    vLLM switches expandable segments off around its own pool. Version 0.22.0 looks for them under
    the older of PyTorch's two names alone (``CuMemAllocator.use_memory_pool`` in
    vllm/device_allocator/cumem.py), and memory of expandable segments is not given back
    (vllm-project/vllm, pull request 11743).

    Args:
        config: For ``trl``, with its ``env``.
    """
    env = config.get("env") or {}
    if not config.get("use_vllm") or not config.get("vllm_enable_sleep_mode"):
        return ""
    expands = "expandable_segments:True"
    if expands not in str(env.get(_CONF, "")) or expands in str(env.get(_OLDER_CONF, "")):
        return ""
    return (
        f"env: expandable_segments is set as {_CONF} only. Older versions of vLLM that trl takes"
        f" look for it as {_OLDER_CONF}, and sleep without giving memory back: set both."
    )
