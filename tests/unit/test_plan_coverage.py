"""The budget that knobs see, the coverage that is kept by default, and the pins that save."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import SpaceError
from autotune.plan import DEFAULT_MIN_COVERAGE, Plan, Request, make_plan
from autotune.runfolder import RunFolder
from autotune.space.context import Context
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context, make_cpu, make_gpu, make_model
from autotune.testing.fakes import FakeExecutor
from autotune.testing.searches import make_answers
from autotune.units import GIB


def plan_of(folder: Path, context: Context | None = None, **asked: Any) -> Plan:
    """Return the plan of a request that keeps the defaults."""
    run = RunFolder(folder)
    run.work.mkdir(parents=True)
    space = SearchSpace.load("quick")
    request = Request(model="some/model", dataset="some/rows", space=space, **asked)
    return make_plan(request, run, FakeExecutor(answers=make_answers(context)))


def test_by_default_little_of_the_data_may_be_cut(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.request.least_coverage == DEFAULT_MIN_COVERAGE == 0.95
    assert all(plan.space.coverage(item) >= 0.95 for item in plan.space.enumerate())
    assert plan.space.baseline["max_length"] > 1024
    (notice,) = [text for text in plan.notices if "max_length" in text]
    assert notice.startswith("The baseline uses max_length=2560 instead of 1024: cutting rows at")
    assert "less than the 95% of --min-coverage" in notice


def test_rows_that_trl_s_length_keeps_need_no_notice(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, make_context(lengths=(100, 300, 900)))
    assert plan.space.baseline["max_length"] == 1024
    assert not any("max_length" in text for text in plan.notices)


def test_a_pinned_length_that_cuts_more_names_the_option(tmp_path: Path) -> None:
    pins = {"max_length": "512", "batching": "padded"}
    with pytest.raises(SpaceError, match=r"min_coverage.*Lower min_coverage"):
        plan_of(tmp_path, pins=pins, min_coverage=0.95)
    # Without the option, who pins a length has decided what is cut.
    plan = plan_of(tmp_path / "pinned", pins=pins)
    assert plan.request.least_coverage == 0.0
    assert plan.space.baseline["max_length"] == 512


@pytest.mark.parametrize("asked", [None, 20 * GIB])
def test_knobs_see_the_budget(tmp_path: Path, asked: int | None) -> None:
    plan = plan_of(tmp_path, memory_budget_bytes=asked)
    assert plan.context.budget_bytes == plan.budget_bytes
    assert asked is None or plan.budget_bytes == asked


def test_weights_above_the_budget_change_the_baseline_with_a_notice(tmp_path: Path) -> None:
    model = make_model(num_parameters=8_190_735_360)
    context = make_context(device=make_gpu(free_bytes=round(22.8 * GIB / 0.9)), model=model)
    plan = plan_of(tmp_path, context, min_coverage=0.0)
    assert plan.space.baseline["dtype"] == "bfloat16"
    assert any("the weights alone take 30.51 GiB in float32" in text for text in plan.notices)


@pytest.mark.parametrize(
    ("context", "pins"),
    [
        (make_context(), ("dtype=bfloat16", "adaptation=lora_4bit")),
        (make_context(device=make_cpu(supports_bf16=False)), ("adaptation=lora_4bit",)),
        (
            make_context(device=make_gpu(supports_bf16=False)),
            ("adaptation=lora", "dtype=float16"),
        ),
        (make_context(packages={"peft": "0.21.2"}), ("dtype=bfloat16",)),
        (make_context(model=make_model(quantized=True)), ("dtype=bfloat16",)),
    ],
)
def test_pins_that_make_weights_smaller(
    tmp_path: Path, context: Context, pins: tuple[str, ...]
) -> None:
    assert plan_of(tmp_path, context, min_coverage=0.0).lean_pins == pins


def test_pins_that_make_weights_smaller_are_possible_beside_those_given(tmp_path: Path) -> None:
    old = make_context(device=make_gpu(supports_bf16=False))
    plan = plan_of(tmp_path, old, pins={"lora_r": "8", "adaptation": "lora"}, min_coverage=0.0)
    given = {**plan.request.pins, **dict(pin.split("=") for pin in plan.lean_pins)}
    assert given["dtype"] == "float16"
    assert plan_of(tmp_path / "again", old, pins=given, min_coverage=0.0).space.size()


def test_what_keeps_more_of_the_rows_is_named_only_if_it_is_possible(tmp_path: Path) -> None:
    pins = {"max_length": "512", "batching": "padded"}
    with pytest.raises(SpaceError) as caught:
        plan_of(tmp_path, pins=pins, min_coverage=0.95)
    hint = caught.value.hint
    assert "or allow longer rows (max_length=2560), or split rows instead" in hint
    lower = re.search(r"Lower --min-coverage to (0\.\d+)", hint)
    assert lower is not None
    assert plan_of(tmp_path / "lower", pins=pins, min_coverage=float(lower[1])).space.size()
    # Of a model with fewer positions no longer rows can be asked for.
    short = make_context(model=make_model(max_positions=1024))
    with pytest.raises(SpaceError) as caught:
        plan_of(tmp_path / "short", short, pins=pins, min_coverage=0.95)
    assert "allow longer rows" not in caught.value.hint


def test_the_shortest_length_that_is_allowed_is_offered(tmp_path: Path) -> None:
    """The quantiles of a few long rows may leave the longest of all as the only one."""
    context = make_context(
        lengths=(100,) * 18 + (3000, 15_000), model=make_model(max_positions=None)
    )
    for coverage in (0.5, 0.95):
        plan = plan_of(tmp_path / str(coverage), context, min_coverage=coverage)
        shortest = min(n for n in context.data.max_lengths if context.data.coverage(n) >= coverage)
        assert shortest < 15_000
        assert plan.space.leanest["max_length"] == shortest
        assert plan.space.baseline["max_length"] == shortest
