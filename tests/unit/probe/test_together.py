from __future__ import annotations

import json
from typing import Any

import pytest

from autotune.probe.result import Measurement, MemoryPeak, StepRecord
from autotune.probe.together import together


def make_step(*micro_times_s: float, tokens: int = 100, **fields: Any) -> StepRecord:
    values: dict[str, Any] = {
        "optimizer_time_s": 1.0,
        "num_tokens": tokens,
        "num_positions": 2 * tokens,
        "num_loss_tokens": tokens // 2,
        "num_rows": 2,
    }
    return StepRecord(micro_times_s=micro_times_s, **{**values, **fields})


def make_rank(*steps: StepRecord, load: int = 10, first: int = 20, **fields: Any) -> Measurement:
    values: dict[str, Any] = {
        "source": "measured",
        "device_kind": "cuda",
        "accumulation_steps": 2,
        "phases": {
            "load": MemoryPeak(used_bytes=load, reserved_bytes=None),
            "first_step": MemoryPeak(used_bytes=first),
        },
        "worst_batch": (2, 50),
        "cpu_taken_by_others_ratio": 0.5,
    }
    return Measurement(steps=steps, **{**values, **fields})


def test_memory_is_the_worst_rank_s_phase_by_phase() -> None:
    one = together([make_rank(make_step(1.0), load=30), make_rank(make_step(1.0), first=25)])
    assert one.phases["load"].used_bytes == 30
    assert one.phases["first_step"].used_bytes == 25
    assert one.phases["load"].reserved_bytes is None
    assert one.peak_bytes == 30


def test_tokens_are_summed_and_the_slowest_gives_the_time() -> None:
    fast, slow = make_step(1.0, 1.0, tokens=100), make_step(2.0, 1.0, tokens=60)
    one = together([make_rank(fast), make_rank(slow)])
    (step,) = one.steps
    assert (step.num_tokens, step.num_rows, step.num_loss_tokens) == (160, 4, 80)
    assert step.micro_times_s == slow.micro_times_s
    assert one.step_time_s.median == pytest.approx(4.0)
    assert one.tokens_per_s.median == pytest.approx(160 / 4.0)
    assert one.cpu_taken_by_others_ratio is None
    assert [rank.steps for rank in one.ranks] == [(fast,), (slow,)]


def test_the_exchange_of_gradients_is_counted_once_per_step() -> None:
    """A probe runs two micro-batches of eight; only the last waits for the other processes."""
    step = make_step(1.0, 3.0)
    alone = make_rank(step, accumulation_steps=8)
    one = together([alone, alone])
    assert alone.step_time_s.median == pytest.approx(8 * 2.0 + 1.0)
    assert one.step_time_s.median == pytest.approx(7 * 1.0 + 3.0 + 1.0)
    assert one.tokens_per_s.median == pytest.approx(2 * 400 / 11.0)


def test_it_round_trips_and_one_process_is_written_as_before() -> None:
    rank = make_rank(make_step(1.0))
    one = together([rank, rank])
    assert Measurement.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert "ranks" not in rank.to_dict()
    assert Measurement.from_dict(rank.to_dict()) == rank


def test_ranks_with_other_steps_are_no_one_job() -> None:
    with pytest.raises(ValueError, match="shorter"):
        together([make_rank(make_step(1.0), make_step(1.0)), make_rank(make_step(1.0))])
    with pytest.raises(ValueError, match="no process"):
        together([])
