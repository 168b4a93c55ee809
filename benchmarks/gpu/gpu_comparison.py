"""What predicted_vs_measured.py knows: its configurations, cards, errors and totals; no torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.probe.result import ProbeResult
from autotune.units import GIB, MIB
from autotune.virtual import cards
from autotune.virtual.cards import Card

SHORT, LONG = 1024, 2048
"""Both values of max_length, in tokens."""

COMMON: Mapping[str, Any] = {
    "adaptation": "full",
    "allocator": "default",
    "attn_implementation": "sdpa",
    "batching": "padded",
    "checkpointing": "full",
    "dtype": "bfloat16",
    "max_length": SHORT,
    "optim": "adamw_torch_fused",
    "per_device_train_batch_size": 4,
}
"""Knobs of every configuration, unless it says otherwise."""

FIGURES = ("allocated", "reserved", "used", "rate")
_SAME_MEMORY = 0.005
_ALIKE_MEMORY = 0.05
_MAX_DETAIL = 300
_MAX_TRACEBACK = 3000


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration to measure and to predict.

    Attributes:
        name: Unique.
        changes: Knobs that differ from ``COMMON``; None leaves a knob to its own default.
        budget_gib: Enforced limit in GiB on both sides; None for the card's own memory.
        snapshot: Whether the allocator's history is recorded as well, in a run of its own.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    budget_gib: float | None = None
    snapshot: bool = False

    @property
    def knobs(self) -> dict[str, Any]:
        """Return the knobs and their values."""
        every = {**COMMON, **self.changes}
        return {name: value for name, value in every.items() if value is not None}

    @property
    def budget_bytes(self) -> int | None:
        """Return the limit in bytes."""
        return None if self.budget_gib is None else round(self.budget_gib * GIB)


_LORA = {"adaptation": "lora"}
_QLORA = {"adaptation": "lora_4bit"}
_FREE = {"batching": "padding_free", "max_length": None}

CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration("full-fp32", {"dtype": "float32"}),
    Configuration("qlora-2048", {**_QLORA, "max_length": LONG}),
    Configuration("lora-bfd-2048", {**_LORA, "batching": "bfd", "max_length": LONG}),
    Configuration("full-none", {"checkpointing": "none"}),
    Configuration("lora-padding-free", {**_LORA, **_FREE}, snapshot=True),
    Configuration(
        "full-expandable-2048",
        {"allocator": "expandable_segments", "max_length": LONG},
        snapshot=True,
    ),
    Configuration("full-8bit-adam", {"optim": "adamw_8bit"}),
    Configuration(
        "lora-eager-none", {**_LORA, "attn_implementation": "eager", "checkpointing": "none"}
    ),
    Configuration("full-fp32-in-8gib", {"dtype": "float32"}, budget_gib=8.0),
    Configuration("full-offloading", {"activation_offloading": "on"}),
    Configuration("full-selective", {"checkpointing": "selective"}),
    Configuration("full-every-2-layers", {"checkpointing": "every_2_layers"}),
    Configuration("qlora-nested-bfd", {"adaptation": "lora_4bit_nested", "batching": "bfd"}),
    Configuration("full-bfd-batch-8", {"batching": "bfd", "per_device_train_batch_size": 8}),
    Configuration(
        "lora-offloading-none",
        {**_LORA, "activation_offloading": "on", "checkpointing": "none"},
    ),
    Configuration("full-eager-2048", {"attn_implementation": "eager", "max_length": LONG}),
    Configuration(
        "qlora-none-8bit-adam", {**_QLORA, "checkpointing": "none", "optim": "adamw_8bit"}
    ),
    Configuration(
        "full-flash-bfd-2048",
        {"attn_implementation": "flash_attention_2", "batching": "bfd", "max_length": LONG},
    ),
    Configuration(
        "lora-free-expandable",
        {**_LORA, **_FREE, "allocator": "expandable_segments", "checkpointing": "none"},
    ),
    Configuration(
        "full-fp32-none-2048-batch-8",
        {
            "dtype": "float32",
            "checkpointing": "none",
            "max_length": LONG,
            "per_device_train_batch_size": 8,
        },
    ),
)
"""The most informative first: a run that is short of time leaves out the last ones."""


def choose(names: Sequence[str]) -> tuple[Configuration, ...]:
    """Return the configurations of those names in their own order; all for no name.

    Raises:
        ValueError: If a name is unknown.
    """
    known = {item.name: item for item in CONFIGURATIONS}
    for name in names:
        if name not in known:
            raise ValueError(f"no configuration is called {name!r}; known: {', '.join(known)}")
    return tuple(item for item in CONFIGURATIONS if not names or item.name in names)


def predicted_device(facts: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Return the virtual device that stands for a real card, and how it was found.

    Args:
        facts: ``name``, ``total_bytes``, ``capability`` (major, minor), ``multiprocessors`` and
            ``vendor`` of the card, as PyTorch tells them.
        folder: Takes a card's file, where the catalogue has no such card.
    """
    total = int(facts["total_bytes"])
    wanted = str(facts["name"]).strip().lower()

    def off(card: Card) -> float:
        return abs(card.memory_bytes / total - 1.0)

    named = [card for card in cards.catalogue().values() if card.name.lower() == wanted]
    named = sorted((card for card in named if off(card) <= _ALIKE_MEMORY), key=off)
    if named and off(named[0]) <= _SAME_MEMORY:
        return f"virtual:{named[0].id}", "in the catalogue by name"
    base = named[0] if named else nearest_card(facts)
    file = folder / "measured-card.toml"
    lines = {
        "base": base.id,
        "name": str(facts["name"]),
        "memory_bytes": total,
        "driver_memory_mib": max(base.driver_memory_mib if named else 0, total // MIB),
    }
    if not named:
        lines["multiprocessors"] = int(facts["multiprocessors"])
        if base.vendor == "nvidia":
            lines["compute_capability"] = ".".join(map(str, facts["capability"]))
    # JSON's texts and numbers are TOML's as well.
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
    kind = "the memory" if named else "memory, capability and multiprocessors"
    return f"virtual:{file}", f"{base.id} with {kind} that PyTorch tells; rates are {base.id}'s"


def nearest_card(facts: Mapping[str, Any]) -> Card:
    """Return the card of the catalogue that is most like a card it does not have."""
    vendor = str(facts.get("vendor", "nvidia"))
    major, minor = (int(number) for number in facts["capability"])

    def distance(card: Card) -> tuple[float, float, float]:
        known = card.capability
        return (
            abs(known[0] - major) * 10 + abs(known[1] - minor),
            abs(card.multiprocessors / max(int(facts["multiprocessors"]), 1) - 1.0),
            abs(card.memory_bytes / int(facts["total_bytes"]) - 1.0),
        )

    return min((c for c in cards.catalogue().values() if c.vendor == vendor), key=distance)


def side(result: ProbeResult, *, hidden: Mapping[str, str]) -> dict[str, Any]:
    """Return one side of a comparison: what a probe came to, in bytes and seconds.

    Args:
        result: Of the probe.
        hidden: Texts, such as paths of this machine, and what to write in their place.
    """
    found: dict[str, Any] = {
        "outcome": result.outcome.value,
        "detail": shown(result.detail, hidden)[:_MAX_DETAIL],
        "phase": result.phase,
        "total_s": result.timeline.total_s,
    }
    if result.outcome.value in ("crashed", "unsupported", "lost"):
        found["traceback"] = shown(result.traceback or "", hidden)[-_MAX_TRACEBACK:]
    measurement = result.measurement
    if measurement is None:
        return found
    rate = measurement.tokens_per_s
    phases = {
        name: {
            key: getattr(peak, f"{key}_bytes")
            for key in ("allocated", "reserved", "used", "resident")
        }
        for name, peak in measurement.phases.items()
    }
    return {
        **found,
        "source": measurement.source,
        **{f"{name}_bytes": measurement.peak_of(f"{name}_bytes") for name in FIGURES[:3]},
        "phases_bytes": phases,
        "tokens_per_s": {"median": rate.median, "low": rate.low, "high": rate.high},
        "step_time_s": measurement.step_time_s.median,
        "padding_share": measurement.padding_share,
        "worst_batch": measurement.worst_batch,
        "accumulation_steps": measurement.accumulation_steps,
        "num_trainable_parameters": measurement.num_trainable_parameters,
        "num_alloc_retries": measurement.num_alloc_retries,
        "used_by_others_bytes": measurement.device_used_by_others_bytes,
        "cpu_taken_by_others_ratio": measurement.cpu_taken_by_others_ratio,
        "steps": [
            {
                "micro_times_s": list(step.micro_times_s),
                "optimizer_time_s": step.optimizer_time_s,
                "num_tokens": step.num_tokens,
                "num_positions": step.num_positions,
            }
            for step in measurement.steps
        ],
    }


def shown(text: str, hidden: Mapping[str, str]) -> str:
    """Return a text with some words replaced, such as the paths of this machine."""
    for word, instead in hidden.items():
        text = text.replace(word, instead)
    return text


def figure(of: Mapping[str, Any] | None, name: str) -> float | None:
    """Return one of ``FIGURES`` of a side: bytes, or tokens per second; None if not known."""
    if of is None:
        return None
    if name == "rate":
        return (of.get("tokens_per_s") or {}).get("median")
    return of.get(f"{name}_bytes")


def error_pct(predicted: float | None, measured: float | None) -> float | None:
    """Return how far a prediction is off, in percent of what was measured."""
    if predicted is None or not measured:
        return None
    return round(100 * (predicted / measured - 1.0), 3)


def compare(
    measured: Mapping[str, Any] | None, predicted: Mapping[str, Any] | None
) -> dict[str, float | None]:
    """Return the error of each figure, in percent."""
    return {name: error_pct(figure(predicted, name), figure(measured, name)) for name in FIGURES}


def compare_phases(
    measured: Mapping[str, Any] | None, predicted: Mapping[str, Any] | None
) -> dict[str, dict[str, float | None]]:
    """Return the errors of each phase's peaks, in percent, where both sides have the phase."""
    known, found = ((item or {}).get("phases_bytes", {}) for item in (measured, predicted))
    return {
        phase: {name: error_pct(found[phase].get(name), peaks.get(name)) for name in FIGURES[:3]}
        for phase, peaks in known.items()
        if phase in found
    }


def with_errors(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's row with what its sides tell of each other."""
    measured, predicted = row.get("measured"), row.get("predicted")
    both = measured is not None and predicted is not None
    return {
        **row,
        "errors_pct": compare(measured, predicted),
        "same_steps_errors_pct": compare(measured, row.get("predicted_same_steps")),
        "phase_errors_pct": compare_phases(measured, row.get("predicted_same_steps")),
        "outcomes_agree": measured["outcome"] == predicted["outcome"] if both else None,
    }


def ranks(values: Sequence[float]) -> list[float]:
    """Return each value's rank; equal values share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's correlation; None where it is not defined."""
    if len(pairs) < 2:
        return None
    try:
        found = statistics.correlation(ranks([p for p, _ in pairs]), ranks([m for _, m in pairs]))
    except statistics.StatisticsError:
        return None
    return round(found, 3)


def totals(
    rows: Sequence[Mapping[str, Any]], snapshots: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return what is said of all rows together; errors are absolute, in percent."""
    measured = [row for row in rows if row.get("measured") is not None]
    both = [row for row in measured if row.get("predicted") is not None]
    found: dict[str, Any] = {
        "num_configurations": len(rows),
        "num_measured": len(measured),
        "num_skipped": sum(bool(row.get("skipped")) for row in rows),
        "num_compared": sum(row["errors_pct"]["allocated"] is not None for row in both),
        "num_outcomes_agree": sum(bool(row["outcomes_agree"]) for row in both),
        "num_false_fits": sum(
            _ran_out(row["measured"]) and _ran(row["predicted"]) for row in both
        ),
        "num_false_ooms": sum(
            _ran(row["measured"]) and _ran_out(row["predicted"]) for row in both
        ),
    }
    for prefix, key in (("", "errors_pct"), ("same_steps_", "same_steps_errors_pct")):
        for name in FIGURES:
            errors = [abs(e) for row in both if (e := row[key][name]) is not None]
            found[f"{prefix}{name}_max_abs_error_pct"] = max(errors, default=None)
            found[f"{prefix}{name}_median_abs_error_pct"] = (
                round(statistics.median(errors), 3) if errors else None
            )
    rates = [(figure(row["predicted"], "rate"), figure(row["measured"], "rate")) for row in both]
    known = [(p, m) for p, m in rates if p is not None and m is not None]
    found["rate_rank_correlation"] = rank_correlation(known)
    replayed = [abs(e) for item in snapshots if (e := item.get("reserved_error_pct")) is not None]
    found["num_snapshots"] = len(replayed)
    found["snapshot_reserved_max_abs_error_pct"] = max(replayed, default=None)
    return found


def _ran(of: Mapping[str, Any]) -> bool:
    return bool(of["outcome"] == "ok")


def _ran_out(of: Mapping[str, Any]) -> bool:
    return bool(of["outcome"] == "device_oom")


def measured_context_bytes(rows: Iterable[Mapping[str, Any]]) -> int | None:
    """Return what the card lost beside the allocator's memory, the median of all rows."""
    found = [
        of["used_bytes"] - of["reserved_bytes"]
        for row in rows
        if (of := row.get("measured")) and of.get("used_bytes") and of.get("reserved_bytes")
    ]
    return round(statistics.median(found)) if found else None


def table(rows: Sequence[Mapping[str, Any]], *, measured_word: str = "measured") -> str:
    """Return the comparison for people: GiB and tokens/s, errors in percent."""
    width = max((len(row["name"]) for row in rows), default=4)
    head = f"{'':{width}}  {'allocated, GiB':^24}  {'reserved, GiB':^24}  {'tokens/s':^26}"
    columns = f"{measured_word:>8} {'predicted':>9} {'%':>5}"
    lines = [head, f"{'':{width}}  {columns:>24}  {columns:>24}  {columns:>26}"]
    for row in rows:
        measured, predicted = row.get("measured"), row.get("predicted")
        start = f"{row['name']:{width}}  "
        if row.get("skipped"):
            lines.append(f"{start}skipped: {row['skipped']}")
        elif measured is None or predicted is None or not (_ran(measured) and _ran(predicted)):
            words = [(of or {}).get("outcome", "not run") for of in (measured, predicted)]
            lines.append(f"{start}{measured_word} {words[0]}, predicted {words[1]}")
        else:
            cells = [
                _cell(measured, predicted, name, *how)
                for name, how in (
                    ("allocated", (GIB, "8.3f", "9.3f", 24)),
                    ("reserved", (GIB, "8.3f", "9.3f", 24)),
                    ("rate", (1, "8,.0f", "9,.0f", 26)),
                )
            ]
            lines.append(start + "  ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _cell(
    measured: Mapping[str, Any],
    predicted: Mapping[str, Any],
    name: str,
    unit: int,
    first: str,
    second: str,
    width: int,
) -> str:
    known, found = figure(measured, name), figure(predicted, name)
    if known is None or found is None:
        return f"{'unknown':>{width}}"
    error = error_pct(found, known)
    shown = "" if error is None else f"{error:+.1f}"
    return f"{known / unit:{first}} {found / unit:{second}} {shown:>5}".rjust(width)
