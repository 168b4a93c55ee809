"""A run in which micro-batches are copied in the trace, against the same one that runs them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest

from autotune.trainers.hf import accumulation
from autotune.virtual import cards
from autotune.virtual.api import session_for
from autotune.virtual.repeats import Repeats
from autotune.virtual.replay import Replay
from autotune.virtual.trace import ALLOC, FREE, Trace

VARIED = 3 * (96,) + (88,) + 15 * (56, 64, 72, 88)
"""Multiples of 8, for which attention runs the same operators; so few of the longest that every
batch of four is padded, the largest one too."""

DEEP = 24
"""Layers: so many that fewer than 0.7 of them make two blocks of four and their neighbours."""

LORA = {"use_peft": True, "lora_r": 4}
NF4 = {**LORA, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

INPUT_BYTES = 32_768
"""More than a micro-batch's input tensors take. Offloading and reentrant checkpointing hold on to
them until the next one; one that is not run does not."""


@dataclass(frozen=True)
class Copies:
    """What was not run.

    Attributes:
        num_spared: Micro-batches that were not run at all.
        num_thinned: Micro-batches that were run with few layers.
        num_all: All micro-batches.
    """

    num_spared: int
    num_thinned: int
    num_all: int


def fill_caches(folder: Path, model: str, rows: str) -> None:
    """Let bitsandbytes make its code tables, of which a process has one."""
    nested = {**NF4, "use_bnb_nested_quant": True}
    eight = {**LORA, "load_in_8bit": True, "optim": "adamw_8bit"}
    for number, config in enumerate((nested, eight)):
        spec = kit.make_spec(folder / f"first{number}", model, rows, config)
        kit.run_on(session_for(cards.find("a100-sxm-80gb")), spec)


def both_ways(
    tmp_path: Path, tiny: str, rows: str, config: Mapping[str, Any], **changes: Any
) -> Copies:
    """Run it all, and spare what repeats; check that everything is the same."""
    changes = {"overlay": {}, "representative": True, "first_worst_steps": 1, **changes}
    slack_bytes = INPUT_BYTES if config.get("activation_offloading") else 0
    settings = str(config.get("env", {}).get("PYTORCH_ALLOC_CONF", ""))
    runs = []
    for name in ("all", "spared"):
        spec = kit.make_spec(tmp_path / name, tiny, rows, config, **changes)
        card = session_for(cards.find("a100-sxm-80gb"))
        repeats = Repeats(card.trace)
        steps = kit.run_on(card, spec, repeats if name == "spared" else None)
        allocator = Replay(card.trace, settings=settings, limit_bytes=None)
        allocator.advance()
        runs.append((steps, card.trace, allocator.peak_reserved_bytes))
    (ran, ran_trace, ran_reserved), (copied, copied_trace, copied_reserved) = runs
    assert kit.figures(copied) == pytest.approx(kit.figures(ran), rel=0, abs=slack_bytes)
    assert copied.host_peak_bytes == ran.host_peak_bytes
    assert work(copied_trace) == pytest.approx(work(ran_trace), rel=1e-9)
    if not slack_bytes:
        assert copied_reserved == ran_reserved
        assert events(copied_trace) == events(ran_trace)
    else:
        assert copied_reserved == pytest.approx(ran_reserved, rel=0, abs=2 << 20)
    assert repeats.depth is not None
    num_all = accumulation(spec) * len(ran.after_bytes)
    return Copies(repeats.num_spared, repeats.depth.num_thinned, num_all)


def two_steps(tmp_path: Path, model: str, rows: str, config: Mapping[str, Any]) -> Copies:
    """Do it for two steps of two micro-batches, the largest first and last."""
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    return both_ways(
        tmp_path, model, rows, {**config, **accumulated}, measured_steps=0, rows_per_step=2
    )


def events(trace: Trace) -> list[tuple[int, str, int, str, str]]:
    """Return every event of the run, with what tells its storage apart.

    What is freed between two allocations is freed in an order that makes no difference.
    """
    found = [
        (action, entry.op, entry.nbytes, entry.phase, trace.kind_of(entry))
        for action, number in trace.events
        if action in (ALLOC, FREE)
        for entry in [trace.storages[number]]
    ]
    # What goes with the trainer goes when Python's collector finds it.
    while found[-1][0] == FREE:
        found.pop()
    ordered: list[Any] = []
    for is_freed, run in itertools.groupby(found, key=lambda event: event[0] == FREE):
        together = list(run)
        ordered += sorted(together) if is_freed else together
    return ordered


def work(trace: Trace) -> dict[str, float]:
    """Return the operators and predicted seconds of each phase."""
    return {
        f"{phase} {name}": value
        for phase, cost in trace.costs.items()
        for name, value in (("operators", cost.num_ops), ("seconds", cost.seconds))
    }
