from __future__ import annotations

from dataclasses import replace

import pytest
from knob_kit import GPU, inactive, refusal, written

from autotune.space.context import Context
from autotune.space.knob import registry
from autotune.space.weights import excess, num_shares
from autotune.testing.contexts import PACKAGES, make_context, make_gpu
from autotune.units import GIB

PAIR = make_context(device=make_gpu(num_devices=2), num_processes=2)
CPU_PAIR = make_context(num_processes=2)
DEEPSPEED = make_context(
    device=make_gpu(), num_processes=2, packages={**PACKAGES, "deepspeed": "0.19.8"}
)


def test_one_process_has_nothing_to_shard() -> None:
    assert "--processes" in (inactive("sharding", GPU) or "")
    assert inactive("sharding", PAIR) is None
    own = make_context(num_processes=2, sharding="fsdp2")
    assert "accelerate config" in (inactive("sharding", own) or "")


@pytest.mark.parametrize("value", ["zero2", "zero3"])
def test_zero_needs_deepspeed(value: str) -> None:
    assert refusal("sharding", value, PAIR) == "the package deepspeed is not installed"
    assert refusal("sharding", value, DEEPSPEED) is None
    assert "deepspeed" in (refusal("sharding", value, CPU_PAIR) or "")


def test_a_cpu_holds_the_whole_model() -> None:
    assert refusal("sharding", "ddp", CPU_PAIR) is None
    assert "without a word" in (refusal("sharding", "fsdp2", CPU_PAIR) or "")
    assert refusal("sharding", "fsdp2", PAIR) is None


def test_gathering_is_for_zero3_and_what_generates() -> None:
    name = "ds3_gather_for_generation"
    assert inactive(name, DEEPSPEED, sharding="zero3") is None
    assert inactive(name, make_context(num_processes=2, sharding="zero3")) is None
    assert "zero3" in (inactive(name, DEEPSPEED, sharding="zero2") or "")
    assert inactive(name, DEEPSPEED) is not None
    assert written(name, "off") == {name: False}
    assert [t for t in ("sft", "dpo", "grpo", "rloo") if registry.get(name).is_for(t)] == [
        "grpo",
        "rloo",
    ]


@pytest.mark.parametrize(
    ("context", "shares"),
    [(GPU, 1), (PAIR, 2), (CPU_PAIR, 1)],
)
def test_weights_may_be_divided_among_accelerators(context: Context, shares: int) -> None:
    assert num_shares(context) == shares
    # float32 weights of 6 GiB in a budget of 4 GiB fit only if two processes share them.
    model = replace(context.model, num_parameters=6 * GIB // 4)
    small = replace(context, model=model, budget_bytes=4 * GIB)
    assert (excess(small, "full", "float32") is None) == (shares == 2)
    whole = replace(small, sharding="zero2")
    assert "weights alone take" in (excess(whole, "full", "float32") or "")
    tiny = replace(small, budget_bytes=GIB, num_processes=4)
    divided = "divided by 4" in (excess(tiny, "full", "float32") or "")
    assert divided == (context.device.kind != "cpu")
