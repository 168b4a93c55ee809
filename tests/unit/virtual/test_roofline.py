from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual import cards
from autotune.virtual.plans import TILE, Plan, make_plan
from autotune.virtual.roofline import (
    ATTENTION_EFFICIENCY,
    BANDWIDTH_EFFICIENCY,
    LAUNCH_S,
    LINK_EFFICIENCY,
    MATRIX_EFFICIENCY,
    Roofline,
)
from autotune.virtual.session import Session

aten = torch.ops.aten
CARD = cards.find("rtx-4090")
BF16 = torch.bfloat16


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def product(rows: int, inner: int, columns: int, dtype: torch.dtype = BF16) -> Plan:
    pair = empty(rows, inner, dtype=dtype), empty(inner, columns, dtype=dtype)
    return make_plan(aten.mm.default, pair, {})


def seconds(plan: Plan, **options: Any) -> float:
    card = options.pop("card", CARD)
    return Roofline(card, **options).op_seconds(plan, plan.flops)


@pytest.mark.parametrize(("dtype", "rate"), [(BF16, "bf16"), (torch.float32, "fp32")])
def test_a_large_product_is_bound_by_arithmetic(dtype: torch.dtype, rate: str) -> None:
    plan = product(4096, 4096, 4096, dtype)
    assert plan.flops == 2 * 4096**3
    expected = plan.flops / (CARD.tflops[rate] * 1e12 * MATRIX_EFFICIENCY)
    assert seconds(plan) == pytest.approx(expected)


def test_attention_reaches_less_of_the_peak() -> None:
    query = empty(8, 16, 4096, 64)
    plan = make_plan(
        aten._scaled_dot_product_flash_attention.default,
        (query, query, query, 0.0, True, False),
        {},
    )
    # Two products of L x L x D each, of which causal kernels compute half.
    assert plan.flops == 2 * (2 * 8 * 16 * 4096 * 4096 * 64) / 2
    expected = plan.flops / (CARD.tflops["bf16"] * 1e12 * ATTENTION_EFFICIENCY)
    assert seconds(plan) == pytest.approx(expected)


def test_elementwise_work_is_bound_by_the_memory() -> None:
    tensor = empty(1 << 26)
    plan = make_plan(aten.add.Tensor, (tensor, tensor), {})
    assert plan.flops == 0
    assert plan.moved_bytes == 3 * 2 * (1 << 26)
    expected = plan.moved_bytes / (CARD.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY)
    assert seconds(plan) == pytest.approx(expected)


def test_nothing_is_faster_than_its_launch() -> None:
    tensor = empty(8)
    assert seconds(make_plan(aten.add.Tensor, (tensor, tensor), {})) == LAUNCH_S
    assert seconds(product(8, 8, 8)) == LAUNCH_S


def test_copies() -> None:
    roofline = Roofline(CARD)
    assert roofline.move_seconds(0) == roofline.link_seconds(0) == LAUNCH_S
    rate = CARD.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY
    assert roofline.move_seconds(1e10) == pytest.approx(LAUNCH_S + 1e10 / rate)
    rate = CARD.link_bytes_per_s * LINK_EFFICIENCY
    assert roofline.link_seconds(1e10) == pytest.approx(LAUNCH_S + 1e10 / rate)


def of_rate(dtype: torch.dtype, card: cards.Card = CARD, **options: Any) -> float:
    """Return the rate, in 10^12 per s, that a product without traffic runs at."""
    taken = Roofline(card, **options).matmul_seconds(1e15, 0.0, dtype)
    return 1e15 / taken / MATRIX_EFFICIENCY / 1e12


def test_a_type_without_matrix_units_runs_at_float32s_rate() -> None:
    t4 = cards.find("t4")
    assert of_rate(BF16, t4) == pytest.approx(t4.tflops["fp32"])
    assert of_rate(torch.float16, t4) == pytest.approx(t4.tflops["fp16"])
    assert of_rate(torch.float64) == pytest.approx(CARD.tflops["fp32"])


def test_tf32_is_used_where_asked_for_and_there() -> None:
    a100, t4 = cards.find("a100"), cards.find("t4")
    assert of_rate(torch.float32, a100) == pytest.approx(a100.tflops["fp32"])
    assert of_rate(torch.float32, a100, tf32=True) == pytest.approx(a100.tflops["tf32"])
    assert of_rate(torch.float32, t4, tf32=True) == pytest.approx(t4.tflops["fp32"])
    assert of_rate(BF16, a100, tf32=True) == pytest.approx(a100.tflops["bf16"])


def test_int8_runs_at_twice_the_rate_of_16_bits_unless_given() -> None:
    assert of_rate(torch.int8) == pytest.approx(2 * CARD.tflops["fp16"])
    given = replace(CARD, tflops={"fp32": 1.0, "int8": 7.0})
    assert of_rate(torch.int8, given) == pytest.approx(7.0)
    assert of_rate(torch.int8, replace(CARD, tflops={"fp32": 3.0})) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("rows", "columns", "tiling"),
    [(64, 64, 1.0), (4096, 16, 4.0), (16, 16, 16.0), (65, 64, 128 / 65), (1, 1, TILE**2)],
)
def test_thin_products_compute_whole_tiles(rows: int, columns: int, tiling: float) -> None:
    bias = empty(columns)
    first, second = empty(rows, 32), empty(32, columns)
    batched = empty(3, rows, 32), empty(3, 32, columns)
    plans = (
        make_plan(aten.mm.default, (first, second), {}),
        make_plan(aten.addmm.default, (bias, first, second), {}),
        make_plan(aten.bmm.default, batched, {}),
        make_plan(aten.baddbmm.default, (empty(3, rows, columns), *batched), {}),
    )
    for plan in plans:
        assert plan.tiling == pytest.approx(tiling), plan.name
    assert plans[0].flops == 2 * rows * 32 * columns


def test_nothing_else_has_tiles() -> None:
    assert make_plan(aten.relu.default, (empty(3, 3),), {}).tiling == 1.0
    assert product(0, 32, 16).tiling == 1.0


def test_a_thin_product_costs_its_tiles_but_counts_useful_work() -> None:
    session = Session(roofline=Roofline(CARD))
    plan = product(1 << 16, 1 << 14, 16)
    session.charge(plan)
    (cost,) = session.trace.costs.values()
    assert cost.flops == plan.flops
    busy = replace(CARD, bandwidth_bytes_per_s=1e30)
    unbound = Session(roofline=Roofline(busy))
    unbound.charge(plan)
    (tiled,) = unbound.trace.costs.values()
    expected = 4 * plan.flops / (CARD.tflops["bf16"] * 1e12 * MATRIX_EFFICIENCY)
    assert tiled.seconds == pytest.approx(expected)
    assert cost.seconds >= tiled.seconds
