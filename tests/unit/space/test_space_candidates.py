"""Drawing and listing candidates, the baseline, and the configurations they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from space_kit import FULL, knob, resolve, space_of

from autotune.errors import SpaceError
from autotune.space.plan import in_order
from autotune.space.space import SearchSpace
from autotune.testing.contexts import PACKAGES, make_context, make_cpu, make_gpu, make_model

# -- drawing -------------------------------------------------------------------------------------


def first(name: str, values: Sequence[Any], ordered: bool) -> Any:
    return values[0]


def test_drawing_order_follows_dependencies_and_then_the_file() -> None:
    a, b, c = knob("a", 1, depends_on=("c",)), knob("b", 1), knob("c", 1)
    assert [k.name for k in in_order((a, b, c))] == ["c", "a", "b"]
    with pytest.raises(SpaceError, match="a -> c -> a"):
        SearchSpace((a, knob("c", 1, depends_on=("a",))))
    space = space_of("checkpointing", "batching", "adaptation", "attn_implementation")
    names = [k.name for k in space.resolve(make_context()).knobs]
    assert names.index("attn_implementation") < names.index("batching")
    assert names.index("adaptation") < names.index("checkpointing")


def test_a_filtered_set_has_a_name_of_its_own() -> None:
    asked: dict[str, tuple[Sequence[Any], bool]] = {}

    def suggest(name: str, values: Sequence[Any], ordered: bool) -> Any:
        asked[name] = (values, ordered)
        return "lora" if name == "adaptation" else values[0]

    resolve().draw(suggest)
    shown = "none,full,full_reentrant,every_2_layers,every_4_layers"
    assert asked[f"checkpointing@{shown}"] == (tuple(shown.split(",")), False)
    assert asked["per_device_train_batch_size"] == ((1, 2, 4, 8, 16), True)
    assert asked["lora_r"] == ((8, 16, 32, 64), True)
    assert asked["adaptation"][1] is False
    assert "use_kernels" not in asked  # a single value is not a question


def test_long_parameter_names_are_shortened() -> None:
    values = [f"value_number_{index}" for index in range(8)]
    switch = knob("switch", "a", "b")
    other = knob(
        "other",
        *values,
        depends_on=("switch",),
        refuse=lambda value, candidate, context: (
            "no" if candidate["switch"] == "b" and value == values[0] else None
        ),
    )
    names = set()

    def suggest(name: str, values: Sequence[Any], ordered: bool) -> Any:
        names.add(name)
        return values[-1]

    SearchSpace((switch, other)).resolve(make_context()).draw(suggest)
    (long,) = names - {"switch"}
    assert long.startswith("other@")
    assert len(long) == len("other@") + 8


def test_wrong_answers_and_candidates_are_refused() -> None:
    space = resolve()
    with pytest.raises(SpaceError, match="was drawn for"):
        space.draw(lambda name, values, ordered: "nonsense")
    good = space.draw(first)
    for bad in (
        {**good, "batching": "nonsense"},
        {**good, "mine": 1},
        {k: v for k, v in good.items() if k != "dtype"},
        {**good, "activation_offloading": "on"},
        {**good, "batching": "padding_free"},
    ):
        with pytest.raises(SpaceError):
            space.params(bad)


def test_dead_ends_are_taken_out() -> None:
    switch = knob("switch", "a", "b")
    middle = knob("middle", 1, 2)
    last = knob(
        "last",
        "x",
        depends_on=("switch", "middle"),
        refuse=lambda value, candidate, context: (
            "no" if candidate["switch"] == "b" or candidate["middle"] == 2 else None
        ),
    )
    space = SearchSpace((switch, middle, last)).resolve(make_context())
    assert space.size() == 1
    assert [c["switch"] for c in space.enumerate()] == ["a"]
    removed = {(name, value): reason for name, value, reason in space.removed}
    assert set(removed) == {("switch", "b"), ("middle", 2)}
    assert removed["switch", "b"] == "it leaves last without a legal value (x: no)"


@pytest.mark.parametrize("device", [make_cpu(), make_gpu()])
@pytest.mark.parametrize("model_type", ["llama", "opt"])
@pytest.mark.parametrize("min_coverage", [0.0, 0.95, 1.0])
def test_no_way_through_the_full_space_ends_early(
    device: Any, model_type: str, min_coverage: float
) -> None:
    """Follow every legal value in every state; each must lead on, and the count must agree."""
    space = resolve(
        make_context(
            device=device, model=make_model(model_type=model_type), min_coverage=min_coverage
        )
    )
    for steps in space._plan.steps:
        assert steps
        for step in steps.values():
            assert step.inactive is not None or step.legal
    small = resolve(
        space.context, optim="adafactor", dtype="float32", lora_r=8, allocator="default"
    )
    listed = list(small.enumerate())
    assert len(listed) == small.size(10**9)
    assert len({tuple(c.items()) for c in listed}) == len(listed)


def test_size_stops_at_the_limit() -> None:
    space = resolve()
    assert space.size() > 500_000
    assert space.size(limit=1000) == 1000
    assert len(list(space.enumerate(7))) == 7


# -- baseline and configuration ------------------------------------------------------------------


def test_the_baseline_is_what_trl_does_by_itself() -> None:
    space = resolve(make_context(device=make_gpu()))
    assert space.notices == ()
    assert space.coverage(space.baseline) < 1.0
    assert space.changes(space.baseline) == frozenset()
    assert space.config(space.baseline) == {
        "bf16": True,
        "attn_implementation": "sdpa",
        "packing": False,
        "padding_free": False,
        "max_length": 1024,
        "pad_to_multiple_of": None,
        "use_peft": False,
        "load_in_8bit": False,
        "load_in_4bit": False,
        "dtype": "float32",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": True,
        "activation_offloading": False,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "torch_empty_cache_steps": None,
        "torch_compile": False,
    }


@pytest.mark.parametrize(
    ("changes", "name", "value", "notice"),
    [
        ({"global_batch": 12}, "per_device_train_batch_size", 4, "global batch of 12"),
        ({"global_batch": 5}, "per_device_train_batch_size", 1, "global batch of 5"),
        ({"min_coverage": 1.0}, "max_length", 3072, "keeps"),
        ({"model": make_model(quantized=True)}, "adaptation", "lora", "quantised"),
        (
            {"model": make_model(max_positions=512)},
            "max_length",
            512,
            "512 positions",
        ),
    ],
)
def test_the_baseline_gives_way_and_says_so(
    changes: dict[str, Any], name: str, value: Any, notice: str
) -> None:
    space = resolve(make_context(**changes))
    assert space.baseline[name] == value
    (note,) = [note for note in space.notices if f"{name}={value}" in note]
    assert notice in note


def test_the_baseline_stays_inside_the_space() -> None:
    space = space_of(batching=["bfd", "wrapped"]).resolve(make_context())
    assert space.baseline["batching"] == "bfd"
    assert "does not offer" in space.notices[0]
    assert resolve(batching="bfd").notices == ()  # asked for


def test_fixed_keys_reach_every_candidate_and_merge() -> None:
    space = replace(
        FULL,
        fixed={"learning_rate": 1e-4, "env": {"A": "1"}, "model_init_kwargs": {"x": 1}},
    )
    resolved = space.resolve(
        make_context(device=make_gpu(), packages={**PACKAGES, "kernels": "0.18.2"}),
        {"allocator": "expandable_segments", "use_kernels": "on"},
    )
    config = resolved.config(resolved.baseline)
    assert config["learning_rate"] == 1e-4
    assert config["env"]["A"] == "1"
    assert config["env"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert config["model_init_kwargs"] == {"use_kernels": True, "x": 1}
    config["env"]["A"] = "2"
    assert resolved.config(resolved.baseline)["env"]["A"] == "1"


def test_fixed_precision_replaces_the_device_s() -> None:
    space = replace(FULL, fixed={"fp16": True}).resolve(make_context())
    config = space.config(space.baseline)
    assert config["fp16"] is True
    assert "bf16" not in config


def test_knobs_may_not_disagree() -> None:
    write = {"shared": 1}
    one = knob("one", 1, keys=("shared",), write=lambda value, candidate, context: write)
    two = knob("two", 1, keys=("shared",), write=lambda value, candidate, context: {"shared": 2})
    space = SearchSpace((one, two)).resolve(make_context())
    with pytest.raises(SpaceError, match="disagree on shared"):
        space.config(space.baseline)
