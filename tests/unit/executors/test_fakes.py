from __future__ import annotations

import pytest

from autotune.errors import ExecutorError
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.testing.fakes import GIB, FakeExecutor, MemoryWall


def make_spec(**config: object) -> ProbeSpec:
    return ProbeSpec(
        probe_id="0001", folder="/nowhere", trainer="sft", config=config, device="cuda:0"
    )


def test_the_wall_is_hit_as_batches_grow() -> None:
    executor = FakeExecutor(wall=MemoryWall(capacity_bytes=8 * GIB))
    outcomes = [
        executor.submit(make_spec(per_device_train_batch_size=size)).result().outcome
        for size in (1, 2, 4, 8, 16)
    ]
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome is not Outcome.OK)
    assert {Outcome.OK, Outcome.DEVICE_OOM} == set(outcomes)


@pytest.mark.parametrize(
    "leaner",
    [
        {"gradient_checkpointing": True},
        {"use_peft": True},
        {"optim": "adamw_8bit"},
        {"max_length": 128},
        {"use_peft": True, "load_in_4bit": True},
    ],
)
def test_knobs_save_what_they_save_in_reality(leaner: dict[str, object]) -> None:
    wall = MemoryWall()
    assert wall.peak_bytes(leaner) < wall.peak_bytes({})


def test_the_same_spec_gives_the_same_result() -> None:
    spec = make_spec(max_length=256)
    first, second = (FakeExecutor().submit(spec).result() for _ in range(2))
    assert first == second
    assert first.measurement is not None
    assert first.measurement.tokens_per_s.spread_ratio > 0
    slow = FakeExecutor().submit(make_spec(max_length=256, gradient_checkpointing=True)).result()
    assert slow.measurement is not None
    rate = first.measurement.tokens_per_s.median
    assert slow.measurement.tokens_per_s.median < rate


def test_faults_come_as_told() -> None:
    faults = iter([Outcome.LOST, None, ExecutorError("no server")])
    executor = FakeExecutor(fault=lambda spec: next(faults), answers={"prepare": {"rows": 3}})
    small = make_spec(per_device_train_batch_size=1)
    assert executor.submit(small).result().outcome is Outcome.LOST
    assert executor.submit(small).result().outcome is Outcome.OK
    with pytest.raises(ExecutorError, match="no server"):
        executor.submit(small).result()
    assert executor.run_task("prepare", {}, timeout_s=1) == {"rows": 3}
    with pytest.raises(ExecutorError, match="no answer"):
        executor.run_task("describe", {}, timeout_s=1)
    assert len(executor.submitted) == 3
