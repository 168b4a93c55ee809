from __future__ import annotations

import pytest

from autotune import objectives
from autotune.errors import UnknownNameError, UsageError
from autotune.objectives import Objective
from autotune.probe.result import Interval, Measurement, MemoryPeak, StepRecord

GIB = 1024**3


def measurement(*times_s: float, **values):
    steps = tuple(
        StepRecord(
            micro_times_s=(time_s / 2, time_s / 4),
            optimizer_time_s=time_s / 4,
            num_tokens=600,
            num_positions=800,
            num_loss_tokens=300,
            num_rows=6,
        )
        for time_s in times_s
    )
    defaults = {
        "source": "measured",
        "device_kind": "cuda",
        "accumulation_steps": 2,
        "phases": {
            "load": MemoryPeak(used_bytes=1 * GIB, resident_bytes=7 * GIB),
            "first_step": MemoryPeak(used_bytes=8 * GIB, resident_bytes=5 * GIB),
        },
        "rows_per_epoch": 60.0,
        "rows_per_sample": 0.5,
    }
    return Measurement(steps=steps, **{**defaults, **values})


@pytest.mark.parametrize(
    ("name", "direction", "median", "low", "high"),
    [
        ("tokens_per_s", "maximize", 300, 225, 450),
        ("samples_per_s", "maximize", 6, 4.5, 9),
        ("epoch_time", "minimize", 20, 120 / 9, 120 / 4.5),
        ("peak_memory", "minimize", 8 * GIB, 8 * GIB, 8 * GIB),
        ("host_memory", "minimize", 7 * GIB, 7 * GIB, 7 * GIB),
    ],
)
def test_builtin_objectives(name, direction, median, low, high):
    objective = objectives.get(name)
    assert (objective.name, objective.direction) == (name, direction)
    found = objective.read(measurement(1.0, 2.0, 4.0))
    assert (found.low, found.median, found.high) == pytest.approx((low, median, high))


@pytest.mark.parametrize("rows_per_sample", [1.0, 0.5])
def test_epoch_and_rows_per_second_follow_from_the_tokens_per_second(rows_per_sample):
    # The rows of the measured steps have 100 tokens, those of the whole data 150.
    found = measurement(
        1.0, 2.0, 4.0, rows_per_sample=rows_per_sample, tokens_per_epoch=60.0 * 150
    )
    num_samples = 60.0 / rows_per_sample
    epoch_s = found.tokens_per_epoch / found.tokens_per_s.median
    assert found.epoch_time_s == pytest.approx(epoch_s)
    assert found.samples_per_s.median == pytest.approx(num_samples / epoch_s)
    assert found.samples_per_s.spread_ratio == pytest.approx(found.tokens_per_s.spread_ratio)
    read = objectives.get("epoch_time").read(found)
    assert read.median == pytest.approx(epoch_s)
    assert read.low == pytest.approx(found.tokens_per_epoch / found.tokens_per_s.high)


def test_memory_of_a_cpu_run_is_its_resident_size():
    assert objectives.peak_memory().read(measurement(1.0, device_kind="cpu")).median == 7 * GIB


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("epoch_time", {"rows_per_epoch": 0.0}),
        ("host_memory", {"phases": {"load": MemoryPeak(used_bytes=1)}}),
        ("peak_memory", {"phases": {}}),
    ],
)
def test_what_was_not_measured_has_no_value(name, values):
    with pytest.raises(ValueError, match=r"measured|known"):
        objectives.get(name).read(measurement(1.0, **values))


def test_directions():
    assert objectives.tokens_per_s().is_better(2, 1)
    assert not objectives.tokens_per_s().is_better(1, 1)
    assert objectives.peak_memory().is_better(1, 2)
    with pytest.raises(UsageError, match="'minimize' or 'maximize'"):
        objectives.Objective("x", "s", "up", lambda m: m.tokens_per_s)


def test_an_unknown_objective_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="'peak_memory'"):
        objectives.get("peak_memry")


@pytest.mark.parametrize(
    ("constraint", "violation"),
    [
        (objectives.memory_budget(10 * GIB), -0.2),
        (objectives.memory_budget(8 * GIB), 0.0),
        (objectives.memory_budget(), 1.0),
        (objectives.memory_headroom(), 8 / (16 * 0.9) - 1),
        (objectives.memory_headroom(at_least=0.6), 0.25),
        (objectives.coverage(0.9), -0.05),
        (objectives.coverage(1.0), 0.05),
    ],
)
def test_constraints(constraint, violation):
    facts = {"budget_bytes": 4 * GIB, "device_total_bytes": 16 * GIB, "coverage": 0.95}
    assert constraint.read(measurement(1.0), facts) == pytest.approx(violation)


def test_violations_name_every_constraint():
    found = objectives.violations(
        [objectives.memory_budget(8 * GIB), objectives.coverage(0.0)],
        measurement(1.0),
        {"coverage": 0.5},
    )
    assert found == {"memory_budget": 0.0, "coverage": -0.5}


def test_a_missing_fact_is_said():
    with pytest.raises(UsageError, match="'device_total_bytes'"):
        objectives.memory_headroom().read(measurement(1.0), {})


@pytest.mark.parametrize("make", [objectives.memory_headroom, objectives.coverage])
@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_are_shares(make, share):
    with pytest.raises(UsageError, match="from 0"):
        make(share)


def test_names_are_taken_with_dashes_in_any_order_and_once():
    names = [item.name for item in objectives.named(["epoch-time", "peak_memory", "epoch_time"])]
    assert names == ["epoch_time", "peak_memory"]
    assert objectives.named([]) == ()
    with pytest.raises(UnknownNameError, match="tokens_per_s"):
        objectives.named(["token-per-s"])


def test_a_plug_in_is_taken_by_its_own_name(monkeypatch):
    name = "energy-per-token"
    made = objectives.Objective(name, "J", "minimize", lambda item: item.tokens_per_s)
    monkeypatch.setitem(objectives.registry._entries, name, lambda: made)
    assert objectives.named([f" {name} "]) == (made,)


@pytest.mark.parametrize(
    "answer",
    [float("nan"), float("inf"), 3.0, None],
    ids=["nan", "inf", "no interval", "nothing"],
)
def test_a_value_that_cannot_be_compared_is_none(answer: object) -> None:
    def read(measurement: object) -> object:
        is_number = isinstance(answer, float) and answer != 3.0
        return Interval(median=answer, low=0.0, high=1.0) if is_number else answer

    with pytest.raises(ValueError, match="it is"):
        Objective("odd", "u", "minimize", read).of(None)


def test_a_reader_that_fails_has_no_value() -> None:
    def read(measurement: object) -> object:
        raise KeyError("nothing")

    with pytest.raises(ValueError, match="nothing"):
        Objective("odd", "u", "minimize", read).of(None)


@pytest.mark.parametrize(
    ("made", "words"),
    [(lambda: None, "makes NoneType"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_a_plug_in_that_makes_none_is_named(monkeypatch, made, words):
    monkeypatch.setitem(objectives.registry._entries, "odd", made)
    with pytest.raises(UsageError, match=words) as caught:
        objectives.named(["odd"])
    assert "'odd'" in caught.value.message
    assert caught.value.hint


def test_an_objective_is_called_what_it_is_registered_as(monkeypatch):
    made = objectives.tokens_per_s()
    monkeypatch.setitem(objectives.registry._entries, "other", lambda: made)
    assert objectives.get("other").name == "other"
