"""vLLM's knobs: where they apply, what goes with them, what they write."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.space.context import Context
from autotune.space.knob import registry
from autotune.space.knobs import vllm
from autotune.space.space import SearchSpace
from autotune.testing.contexts import (
    PACKAGES,
    make_context,
    make_gpu,
    make_model,
    make_profile,
)
from autotune.units import GIB

INSTALLED = {**PACKAGES, "vllm": "0.31.0"}
CARD = make_gpu(name="virtual:h100")


def context(**changes: Any) -> Context:
    known: dict[str, Any] = {
        "trainer": "grpo",
        "device": make_gpu(),
        "packages": INSTALLED,
        "data": make_profile((300, 400), column_counts={"prompt": {44: 1, 144: 1}}),
    }
    return make_context(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": None}, "TRL's vLLM needs a CUDA device, and this is cpu"),
        (
            {"device": make_gpu(capability=(7, 0))},
            "vLLM needs compute capability 7.5, and this is 7.0",
        ),
        ({"packages": PACKAGES}, "the package vllm>=0.22,<0.32 is not installed"),
        ({"packages": {"vllm": "0.21.0"}}, "it needs vllm>=0.22,<0.32, but 0.21.0 is installed"),
        ({"packages": {"vllm": "0.33.0"}}, "it needs vllm>=0.22,<0.32, but 0.33.0 is installed"),
        ({}, None),
        ({"device": CARD, "packages": PACKAGES}, None),
    ],
)
def test_where_they_apply(changes: dict[str, Any], reason: str | None) -> None:
    known = context(**changes)
    for name in vllm.NAMES:
        rule = registry.get(name).active_if
        assert rule is not None
        assert rule({"use_vllm": "colocate"}, known) == reason


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_space_says_why_they_are_left_out(trainer: str) -> None:
    space = SearchSpace.load(trainer).resolve(context(trainer=trainer, packages=PACKAGES), {})
    reasons = dict(space.inactive)
    assert all("vllm>=0.22,<0.32 is not installed" in reasons[name] for name in vllm.NAMES)
    assert not {"use_vllm", "vllm_mode"} & set(space.config(space.baseline))


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_they_are_searched_on_a_card_that_is_not_here(trainer: str) -> None:
    space = SearchSpace.load(trainer).resolve(
        context(trainer=trainer, device=CARD, packages=PACKAGES), {}
    )
    assert space.values()["use_vllm"] == ("off", "colocate")
    assert space.values()["vllm_enable_sleep_mode"] == ("off", "on")
    assert space.baseline["use_vllm"] == "off"
    assert "vllm_gpu_memory_utilization" not in space.baseline


@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto", "reward"])
def test_trainers_that_generate_nothing_have_none(trainer: str) -> None:
    assert not any(registry.get(name).is_for(trainer) for name in vllm.NAMES)


@pytest.mark.parametrize(
    ("adaptation", "word"),
    [
        ("full", None),
        ("lora", None),
        ("lora_8bit", "8 bits"),
        ("lora_4bit", "scales"),
        ("lora_4bit_nested", "scales"),
    ],
)
def test_quantised_weights_do_not_go_with_it(adaptation: str, word: str | None) -> None:
    rule = registry.get("use_vllm").refuse
    assert rule is not None
    reason = rule("colocate", {"adaptation": adaptation}, context())
    assert reason is None if word is None else word in str(reason)
    assert rule("off", {"adaptation": adaptation}, context()) is None


def test_the_longest_sequence_is_the_datas() -> None:
    write = registry.get("use_vllm").write
    assert write is not None
    keys = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 144 + 512}
    assert write("colocate", {}, context()) == keys
    # Longer completions than those that the profile was made with.
    longer = write("colocate", {"max_completion_length": 1000}, context())
    assert longer["vllm_max_model_length"] == 1144
    positions = write("colocate", {"max_completion_length": 10**6}, context())
    assert positions["vllm_max_model_length"] == 8192
    assert write("off", {}, context()) == {"use_vllm": False}


def test_the_others_need_it() -> None:
    for name in vllm.NAMES[1:]:
        rule = registry.get(name).active_if
        assert rule is not None
        assert rule({"use_vllm": "off"}, context()) == "it needs vLLM, and use_vllm is off"


def test_a_pin_where_it_cannot_run_says_why() -> None:
    from autotune.errors import SpaceError

    with pytest.raises(SpaceError, match="is not installed"):
        SearchSpace.load("grpo").resolve(context(packages=PACKAGES), {"use_vllm": "colocate"})


def test_a_candidate_with_it_has_all_of_its_keys() -> None:
    space = SearchSpace.load("grpo").resolve(context(device=CARD), {})
    candidate = {
        **space.baseline,
        "use_vllm": "colocate",
        "vllm_enable_sleep_mode": "on",
        "vllm_gpu_memory_utilization": 0.45,
        "allocator": "expandable_segments",
    }
    space.params(candidate)  # it can be drawn
    config = space.config(candidate)
    assert config["vllm_enable_sleep_mode"] is True
    assert config["vllm_gpu_memory_utilization"] == 0.45
    # vLLM 0.22 looks for expandable segments, to switch them off around its pool, under the older
    # name alone.
    assert set(config["env"]) == {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    assert len(set(config["env"].values())) == 1


@pytest.mark.parametrize(
    ("share", "billions", "budget_gib", "words"),
    [
        (0.3, 8, None, None),
        (0.2, 10, None, "copy of the weights alone takes 18.63 GiB"),  # 16 GiB of 80
        (0.6, 18, None, "exceeds 80.00 GiB"),  # 48 GiB and 33.5 GiB
        (0.3, 8, 36, "exceeds 36.00 GiB"),  # 24 GiB and 14.9 GiB
    ],
)
def test_a_share_has_room_for_the_weights_and_leaves_room_for_the_trainers(
    share: float, billions: int, budget_gib: int | None, words: str | None
) -> None:
    rule = registry.get("vllm_gpu_memory_utilization").refuse
    assert rule is not None
    model = make_model(num_parameters=billions * 10**9)
    budget = None if budget_gib is None else budget_gib * GIB
    reason = rule(share, {}, context(model=model, budget_bytes=budget))
    assert reason is None if words is None else words in str(reason)
