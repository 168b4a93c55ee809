"""The card that stands for a real device, so that candidates can be predicted for it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from autotune.devices import host
from autotune.errors import JournalError, UsageError
from autotune.probe.result import Measurement, MemoryPeak
from autotune.space.context import DeviceInfo
from autotune.virtual import cards
from autotune.virtual.cards import CPU, LAUNCH_S, Card

CPU_CONTEXT_BYTES = 472_000_000
"""Resident size of a probe's process on the CPU before its model is loaded: the peaks of the phase
``load`` of 72 probes of a tiny Gemma 3 less its weights, 447 to 460 MiB (PyTorch 2.13, Linux on
x86-64)."""

_LEAST_CONTEXT_BYTES = 1 << 26

_VENDORS = ("nvidia", "amd", "geforce", "tesla", "instinct", "graphics", "generation", "edition")
_SAME_CHIP = ("workstation", "server", "ac")
"""Words that tell no chip from another: the cards of one family differ by others."""

_FORM = re.compile(r"sxm[0-9]?|pcie|nvl|hbm[0-9][a-z]?")
_SIZE = re.compile(r"[0-9]+gb")


def of_accelerator(device: DeviceInfo) -> Card | None:
    """Return the card of the catalogue that ``device`` is, with the memory that it has.

    One that the catalogue does not know gets the rates of a data-centre card, as a virtual card
    that is given by its size does: what matters is how candidates compare.

    Args:
        device: A real CUDA device.

    Returns:
        None if nothing could run in its memory.
    """
    card = _known(device)
    capability = device.capability
    if card is None:
        try:
            card = cards.find(f"{device.total_bytes >> 20}MiB")
        except UsageError:
            return None
        if capability is not None and not _is_amd(device.label):
            card = replace(card, compute_capability=f"{capability[0]}.{capability[1]}")
    if not device.supports_bf16:
        kept = {dtype: rate for dtype, rate in card.tflops.items() if dtype != "bf16"}
        card = replace(card, tflops=kept)
    return replace(card, memory_bytes=device.total_bytes, aliases=())


def of_cpu(
    device: DeviceInfo, rates: Mapping[str, float], context_bytes: int = CPU_CONTEXT_BYTES
) -> Card:
    """Return a card that is as fast as this machine's processor and has its memory.

    Args:
        device: The CPU.
        rates: ``fp32`` and ``bf16`` in 10^12 operations per second, and
            ``bandwidth_bytes_per_s``, as a card's figures.
        context_bytes: What a process takes before it loads a model.
    """
    bandwidth = float(rates["bandwidth_bytes_per_s"])
    measured = "measured here, before the candidates were predicted"
    return Card(
        id="this-cpu",
        name=f"{device.label} (this CPU)",
        vendor="none",
        architecture=CPU,
        # Of the kernels that cards choose between, the CPU's attention is like those of Ampere.
        compute_capability="8.0",
        multiprocessors=1,
        memory_bytes=max(device.total_bytes, context_bytes + 1),
        driver_memory_mib=max(device.total_bytes >> 20, 1),
        context_bytes=context_bytes,
        bandwidth_bytes_per_s=bandwidth,
        link_bytes_per_s=bandwidth,  # a copy to the host is a copy within it
        l2_bytes=0,
        cublas_workspace_bytes=0,
        tflops={"fp32": rates["fp32"], "fp16": rates["bf16"], "bf16": rates["bf16"]},
        sources={
            "memory": "this machine's",
            "context": "the baseline's probe when it had loaded the model, less its weights",
            "bandwidth": measured,
            "tflops": measured,
        },
    )


def card_of(figures: Mapping[str, Any], file: Path) -> Card:
    """Return the card whose figures a file of predictions holds.

    Raises:
        JournalError: If they are no card's.
    """
    try:
        return Card(**{**figures, "aliases": ()})
    except TypeError as error:
        raise JournalError(
            f"{file} does not say for which card it predicts: {error}.",
            hint="Delete the file: what it predicts is predicted again.",
        ) from error


def cpu_context_bytes(loaded_bytes: int | None, weights_bytes: int) -> int:
    """Return what a process on the CPU takes before it loads a model, in bytes.

    Args:
        loaded_bytes: Peak resident size of the phase ``load`` of the baseline; None if unknown.
        weights_bytes: Its model's weights.
    """
    if loaded_bytes is None or loaded_bytes - weights_bytes < _LEAST_CONTEXT_BYTES:
        return CPU_CONTEXT_BYTES
    return loaded_bytes - weights_bytes


def as_measured(kind: str, measurement: Measurement, card: Card) -> Measurement:
    """Return a prediction as a probe on the real device would have measured it.

    On a CPU what counts is the resident size: live tensors, what glibc keeps of freed ones, and
    what the process holds anyway.

    Args:
        kind: Of the real device.
        measurement: On the card that stands for it.
        card: That card.
    """
    if kind != "cpu":
        return measurement
    phases = {
        name: MemoryPeak(
            allocated_bytes=peak.allocated_bytes,
            resident_bytes=_resident_bytes(peak) + card.context_bytes,
        )
        for name, peak in measurement.phases.items()
    }
    return replace(measurement, device_kind="cpu", phases=phases)


def _resident_bytes(peak: MemoryPeak) -> int:
    """Return what tensors take of a process on the CPU.

    With the settings that probes and exported files carry, a tensor is taken from the top of the
    heap if that has room, whatever its size, and the heap shrinks only once so much of it is free.
    Up to there it keeps freed blocks as a caching allocator does.
    """
    live = peak.allocated_bytes or 0
    kept = max((peak.reserved_bytes or 0) - live, 0)
    return live + min(kept, int(host.MALLOC_ENV["MALLOC_TRIM_THRESHOLD_"]))


def corrected(measurement: Measurement, *, memory_ratio: float, time_ratio: float) -> Measurement:
    """Return a prediction with its peaks and times multiplied.

    Args:
        measurement: The prediction.
        memory_ratio: By how much peaks that were measured differ from predicted ones.
        time_ratio: The same of times.
    """
    phases = {
        name: MemoryPeak(
            **{
                item.name: None if value is None else round(value * memory_ratio)
                for item in fields(MemoryPeak)
                for value in [getattr(peak, item.name)]
            }
        )
        for name, peak in measurement.phases.items()
    }
    steps = tuple(
        replace(
            step,
            micro_times_s=tuple(value * time_ratio for value in step.micro_times_s),
            optimizer_time_s=step.optimizer_time_s * time_ratio,
            generation_time_s=step.generation_time_s * time_ratio,
        )
        for step in measurement.steps
    )
    return replace(measurement, phases=phases, steps=steps)


def time_shares(measurement: Measurement | None, card: Card) -> dict[str, float]:
    """Return what a predicted time is made of: kind of work to its share (0 to 1).

    The optimizer's step and all else are each taken apart into launching operators, arithmetic and
    moving bytes, so that whoever compares with measurements can tell which of them is off.
    """
    work = ((measurement.makeup or {}).get("work") if measurement is not None else None) or {}
    found: dict[str, float] = {}
    for phase, cost in work.items():
        part = "optimizer" if phase == "optimizer" else "batches"
        launches = min(cost["num_ops"] * LAUNCH_S, cost["seconds"])
        arithmetic = cost["flops"] / (card.tflops["fp32"] * 1e12)
        moving = cost["moved_bytes"] / card.bandwidth_bytes_per_s
        rest = (cost["seconds"] - launches) / ((arithmetic + moving) or 1.0)
        for name, seconds in (
            ("launches", launches),
            ("arithmetic", arithmetic * rest),
            ("moving", moving * rest),
        ):
            found[f"{part}: {name}"] = found.get(f"{part}: {name}", 0.0) + seconds
    return _shares(found)


def memory_shares(measurement: Measurement | None, card: Card) -> dict[str, float]:
    """Return what a predicted peak is made of: kind of memory to its share (0 to 1)."""
    at_peak = (measurement.makeup or {}).get("at_peak") if measurement is not None else None
    return _shares({**at_peak, "context": card.context_bytes}) if at_peak else {}


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    total = sum(parts.values())
    return {name: value / total for name, value in parts.items()} if total else {}


def as_toml(card: Card) -> str:
    """Return the card as the text of a file that ``--device virtual:FILE.toml`` takes."""
    values = {key: value for key, value in asdict(card).items() if key != "id"}
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        items = ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # TOML's basic strings take JSON's escapes, but for surrogate pairs and the slash.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _known(device: DeviceInfo) -> Card | None:
    """Return the card of the same chip whose memory and form are nearest, if there is one."""
    best: Card | None = None
    least: tuple[bool, int, float] | None = None
    forms = _forms(device.label)
    families = {_family(part) for part in (device.label, *device.label.split("/"))}
    for card in cards.catalogue().values():
        if _family(card.name) not in families:
            continue
        if device.capability is not None and card.capability != device.capability:
            continue
        off = abs(math.log(max(device.total_bytes, 1) / card.memory_bytes))
        # Cards of one chip differ in memory by a quarter and more; what a driver reports of it,
        # by a few per cent.
        distance = (off > math.log(1.1), len(forms ^ _forms(card.name)), off)
        if least is None or distance < least:
            best, least = card, distance
    return best


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", name.lower()) if word]


def _forms(name: str) -> frozenset[str]:
    """Return the words that tell the boards of one chip apart, such as ``pcie``."""
    found = (_FORM.fullmatch(word) for word in _words(name))
    return frozenset(match.group().rstrip("0123456789") for match in found if match)


def _family(name: str) -> tuple[str, ...]:
    """Return the words that name the chip: ``("rtx", "4090")``; those of a laptop's have more."""
    return tuple(
        word
        for word in _words(name)
        if word not in (*_VENDORS, *_SAME_CHIP)
        and not _FORM.fullmatch(word)
        and not _SIZE.fullmatch(word)
    )


def _is_amd(label: str) -> bool:
    return bool({"amd", "radeon", "instinct"} & set(_words(label)))
