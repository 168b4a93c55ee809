"""A space in a context: what is left, pins, the baseline, and the rules of comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from autotune.errors import SpaceError, UnknownNameError
from autotune.space.context import Context
from autotune.space.domains import Choice, IntRange
from autotune.space.knob import Knob, registry
from autotune.space.plan import in_order
from autotune.space.resolve import ResolvedSpace
from autotune.space.space import SearchSpace
from autotune.testing.contexts import PACKAGES, make_context, make_cpu, make_gpu, make_model

FULL = SearchSpace.load("sft")
QUICK = SearchSpace.load("quick")


def resolve(
    context: Context | None = None, space: SearchSpace = FULL, **pins: Any
) -> ResolvedSpace:
    return space.resolve(context or make_context(), pins)


def space_of(*names: str, **domains: Sequence[Any]) -> SearchSpace:
    knobs = [registry.get(name) for name in names]
    knobs += [replace(registry.get(n), domain=Choice(tuple(v))) for n, v in domains.items()]
    return SearchSpace(tuple(knobs))


def knob(name: str, *values: Any, **changes: Any) -> Knob:
    return Knob(
        **{
            "name": name,
            "domain": Choice(values),
            "baseline": values[0],
            "changes": "nothing",
            "help": "x",
            **changes,
        }
    )


def first(name: str, values: Sequence[Any], ordered: bool) -> Any:
    return values[0]


# -- pins ----------------------------------------------------------------------------------------


def test_pins_are_read_as_the_knob_s_type() -> None:
    space = resolve(
        per_device_train_batch_size="4",
        batching="bfd",
        max_length="2048",
        torch_compile="true",
        pad_to_multiple_of="none",
    )
    assert space.pins == {
        "per_device_train_batch_size": 4,
        "batching": "bfd",
        "max_length": 2048,
        "torch_compile": "on",
        "pad_to_multiple_of": "none",
    }
    for candidate in space.enumerate(200):
        assert candidate["per_device_train_batch_size"] == 4
        assert candidate["batching"] == "bfd"
        assert candidate["max_length"] == 2048
        assert candidate["torch_compile"] == "on"


def test_a_pin_may_go_beyond_the_space() -> None:
    space = resolve(
        space=QUICK, batching="padding_free", adaptation="lora_4bit", optim="adafactor"
    )
    assert space.baseline == {
        "batching": "padding_free",
        "adaptation": "lora_4bit",
        "lora_r": 16,
        "lora_target_modules": "all-linear",
        "checkpointing": "full",
        "per_device_train_batch_size": 8,
        "optim": "adafactor",
    }


def test_unknown_pins() -> None:
    with pytest.raises(UnknownNameError, match=r"--pin: unknown knob 'batchin'.*'batching'"):
        resolve(batchin="bfd")


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"batching": "bdf"}, "padded, padding_free, bfd, bfd_split, wrapped.*'bfd'"),
        ({"lora_r": "x"}, "whole number"),
        ({"lora_r": 0}, "1 to 4096"),
        ({"max_length": None}, "whole number"),
        ({"dtype": "float16"}, "float32, bfloat16"),
    ],
)
def test_values_that_no_pin_can_have(pin: dict[str, Any], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        resolve(**pin)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"batching": "padding_free", "max_length": 512}, ["max_length: null"]),
        ({"batching": "padding_free", "max_length": 1024}, ["max_length: null"]),
        ({"adaptation": "full", "lora_r": 8}, ["adaptation is full"]),
        ({"adaptation": "full", "lora_r": 16}, ["adaptation is full"]),
        ({"checkpointing": "selective", "adaptation": "lora"}, ["adapters"]),
        ({"checkpointing": "selective", "attn_implementation": "eager"}, ["eager"]),
        ({"pad_to_multiple_of": 64, "batching": "bfd"}, ["pad"]),
    ],
)
def test_pins_that_contradict_each_other(pins: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpaceError, match="contradict each other") as caught:
        resolve(**pins)
    for word in [*words, *(f"{name}={value}" for name, value in pins.items())]:
        assert word in str(caught.value)
    assert caught.value.hint == "Drop one of them."


def test_only_the_guilty_pin_is_named() -> None:
    pins = {"checkpointing": "selective", "adaptation": "lora", "attn_implementation": "sdpa"}
    with pytest.raises(SpaceError) as caught:
        resolve(**pins)
    assert "adaptation=lora" in str(caught.value)
    assert "attn_implementation" not in str(caught.value)


@pytest.mark.parametrize(
    ("pins", "changes", "message"),
    [
        ({"activation_offloading": "on"}, {}, "activation_offloading=on is not possible here"),
        ({"adaptation": "lora_4bit"}, {"packages": {"peft": "0.21"}}, "bitsandbytes"),
        ({"per_device_train_batch_size": 3}, {}, "global batch of 16"),
        ({"max_length": 128}, {"min_coverage": 0.99}, None),
        ({"max_length": 128, "batching": "padded"}, {"min_coverage": 0.99}, "128 tokens keeps"),
        ({"attn_implementation": "flash_attention_2"}, {}, "CUDA"),
    ],
)
def test_pins_that_the_context_forbids(
    pins: dict[str, Any], changes: dict[str, Any], message: str | None
) -> None:
    context = make_context(**changes)
    if message is None:
        # bfd_split and wrapped lose nothing, so that the pin leaves those.
        layouts = {c["batching"] for c in resolve(context, **pins).enumerate(100_000)}
        assert layouts == {"bfd_split", "wrapped"}
        return
    with pytest.raises(SpaceError, match=message):
        resolve(context, **pins)


def test_a_pin_takes_out_what_it_cannot_go_with() -> None:
    space = resolve(checkpointing="selective")
    assert {c["adaptation"] for c in space.enumerate()} == {"full"}
    assert {c["attn_implementation"] for c in space.enumerate()} == {"sdpa"}
    space = resolve(space=QUICK, max_length=512, checkpointing="full")
    assert {c["batching"] for c in space.enumerate()} == {"padded", "bfd"}
    space = resolve(max_length=512, checkpointing="full", optim="adafactor", lora_r=8)
    layouts = {c["batching"] for c in space.enumerate()}
    assert layouts == {"padded", "bfd", "bfd_split", "wrapped"}


def test_a_pin_on_a_conditional_knob_holds_where_it_applies() -> None:
    space = resolve(space=QUICK, lora_r=8)
    assert {c.get("lora_r") for c in space.enumerate()} == {None, 8}
    assert space.baseline["adaptation"] == "full"


def test_pins_without_effect_are_told() -> None:
    space = resolve(optim="paged_adamw_8bit", allocator="expandable_segments")
    assert len(space.notices) == 2
    assert any("allocator=expandable_segments has no effect here" in n for n in space.notices)
    assert any("optim=paged_adamw_8bit: its paging has no effect" in n for n in space.notices)
    assert space.config(space.baseline)["optim"] == "paged_adamw_8bit"
    assert "env" not in space.config(space.baseline)
    gpu = make_context(device=make_gpu())
    assert resolve(gpu, optim="paged_adamw_8bit").notices == ()


def test_pinning_what_happens_anyway_is_fine() -> None:
    assert resolve(activation_offloading="off", allocator="default").notices == ()


# -- what is left here ---------------------------------------------------------------------------


def test_what_cannot_be_drawn_is_told_with_the_reason() -> None:
    space = resolve(make_context(packages={}))
    removed = {(name, value): reason for name, value, reason in space.removed}
    assert "peft" in removed["adaptation", "lora"]
    assert "paging" not in removed["optim", "paged_adamw_8bit"]
    assert "bitsandbytes" in removed["optim", "paged_adamw_8bit"]
    inactive = dict(space.inactive)
    assert "full is the only value left" in inactive["adaptation"]
    assert "needs adapters" in inactive["lora_r"]
    assert "CPU" in inactive["activation_offloading"]
    assert "torch_compile" not in inactive  # held by the space, not by the machine
    assert "batching" not in inactive


def test_paging_is_not_searched_on_a_cpu() -> None:
    removed = {(name, value) for name, value, _ in resolve().removed}
    assert ("optim", "paged_adamw_8bit") in removed
    removed = {(n, v) for n, v, _ in resolve(make_context(device=make_gpu())).removed}
    assert ("optim", "paged_adamw_8bit") not in removed


@pytest.mark.parametrize(
    ("space", "context", "message"),
    [
        (FULL, make_context(global_batch=15, num_processes=2), "per_device_train_batch_size"),
        (
            space_of(dtype=["bfloat16"]),
            make_context(device=make_cpu(supports_bf16=False)),
            "dtype",
        ),
        (space_of(optim=["paged_adamw_8bit"]), make_context(), "no effect on a CPU"),
        (
            space_of(adaptation=["lora"], checkpointing=["selective"]),
            make_context(),
            "selective: selective checkpointing raises with adapters",
        ),
        (space_of(batching=["padded"]), make_context(min_coverage=1.0), None),
    ],
)
def test_a_space_without_candidates(
    space: SearchSpace, context: Context, message: str | None
) -> None:
    if message is None:
        # The smallest sufficient length stands in where a space does not mention max_length.
        assert space.resolve(context).baseline["max_length"] == 3072
        return
    with pytest.raises(SpaceError, match=message):
        space.resolve(context)


def test_the_trainer_must_agree() -> None:
    with pytest.raises(SpaceError, match="not for 'dpo'"):
        resolve(make_context(trainer="dpo"))


def test_a_custom_knob_without_values() -> None:
    empty = knob("mine", 1, domain=None, accepts=IntRange(1, 2), default_values=lambda c, q: ())
    with pytest.raises(SpaceError, match="'mine' has no values"):
        SearchSpace((empty,)).resolve(make_context())


def test_size_and_micro_batch_are_part_of_every_space() -> None:
    space = space_of(dtype=["float32", "bfloat16"]).resolve(make_context())
    assert space.size() == 2
    assert space.baseline == {
        "dtype": "float32",
        "max_length": 1024,
        "per_device_train_batch_size": 8,
    }
    assert space.config(space.baseline)["gradient_accumulation_steps"] == 2
    assert space.inactive == space.removed == ()


# -- drawing -------------------------------------------------------------------------------------


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
    assert "later knob" in removed["switch", "b"]


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


# -- comparison ----------------------------------------------------------------------------------


def differing(space: ResolvedSpace, **values: Any) -> dict[str, Any]:
    """Return the baseline with other values, without the knobs that those make inactive."""
    wanted: Mapping[str, Any] = {**space.baseline, **values}

    def suggest(name: str, offered: Sequence[Any], ordered: bool) -> Any:
        base = name.partition("@")[0]
        return wanted.get(base, registry.get(base).baseline)

    candidate = space.draw(suggest)
    for name, value in values.items():
        assert candidate[name] == value
    return candidate


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ({"checkpointing": "none"}, set()),
        ({"per_device_train_batch_size": 1}, set()),
        ({"optim": "adamw_torch"}, set()),
        ({"optim": "adamw_8bit"}, {"method"}),
        ({"dtype": "bfloat16"}, {"method"}),
        ({"adaptation": "lora"}, {"method"}),
        ({"batching": "bfd"}, {"tokens"}),
        ({"batching": "padding_free"}, {"tokens"}),  # the baseline cuts rows, this does not
        ({"max_length": 512}, {"tokens"}),
        ({"max_length": 2048, "dtype": "bfloat16"}, {"tokens", "method"}),
        ({"pad_to_multiple_of": 64}, set()),
    ],
)
def test_changes(values: dict[str, Any], changes: set[str]) -> None:
    space = resolve(make_context(device=make_gpu()))
    assert space.changes(differing(space, **values)) == changes


def test_lengths_above_the_longest_row_change_nothing_when_padded() -> None:
    space = resolve(make_context(lengths=(100, 300, 700)))
    assert space.baseline["max_length"] == 1024
    shorter = differing(space, max_length=768)
    assert space.changes(shorter) == set()
    assert space.digest(shorter) == space.digest(space.baseline)
    assert space.demands_at_least(shorter, space.baseline)
    assert space.changes(differing(space, batching="padding_free")) == set()
    assert space.digest(differing(space, batching="padding_free")) != space.digest(space.baseline)
    bins = [differing(space, batching="bfd", max_length=n) for n in (768, 1024)]
    assert space.digest(bins[0]) != space.digest(bins[1])
    assert all(space.changes(candidate) == {"tokens"} for candidate in bins)


def test_digests_are_short_and_stable() -> None:
    space = resolve(space=QUICK)
    digests = [space.digest(candidate) for candidate in space.enumerate()]
    assert all(len(digest) == 16 for digest in digests)
    assert len(set(digests)) == len(digests)
    again = resolve(space=QUICK)
    assert [again.digest(candidate) for candidate in again.enumerate()] == digests


@pytest.mark.parametrize(
    ("values", "coverage"),
    [
        ({"max_length": 512}, (100 + 200 + 300 + 400 + 500 + 5 * 512) / 9500),
        ({"max_length": 3072}, 1.0),
        ({"batching": "bfd", "max_length": 512}, (1500 + 5 * 512) / 9500),
        ({"batching": "bfd_split", "max_length": 512}, 1.0),
        ({"batching": "wrapped", "max_length": 512}, 1.0),
        ({"batching": "padding_free"}, 1.0),
    ],
)
def test_coverage(values: dict[str, Any], coverage: float) -> None:
    space = resolve()
    assert space.coverage(differing(space, **values)) == pytest.approx(coverage)


CHECKPOINTING_ORDER = {
    "none": {"none", "full", "full_reentrant", "selective", "every_2_layers", "every_4_layers"},
    "every_4_layers": {"every_4_layers", "every_2_layers", "full"},
    "every_2_layers": {"every_2_layers", "full"},
    "selective": {"selective", "full"},
    "full": {"full"},
    "full_reentrant": {"full_reentrant"},
}


def test_checkpointing_is_partly_ordered() -> None:
    space = resolve(make_context(device=make_gpu()))
    for larger, smaller in product(CHECKPOINTING_ORDER, repeat=2):
        a, b = differing(space, checkpointing=larger), differing(space, checkpointing=smaller)
        expected = smaller in CHECKPOINTING_ORDER[larger]
        assert space.demands_at_least(a, b) is expected, (larger, smaller)
        a, b = {**a, "activation_offloading": "on"}, {**b, "activation_offloading": "on"}
        assert space.demands_at_least(a, b) is (larger == smaller)


@pytest.mark.parametrize(
    ("larger", "smaller", "expected"),
    [
        (8, 4, True),  # both accumulate
        (4, 8, False),
        (16, 8, False),  # 16 needs no accumulation, so that gradients do not outlive a step
        (16, 1, False),
        (16, 16, True),
        (8, 16, False),
    ],
)
def test_micro_batches_compare_only_while_gradients_accumulate(
    larger: int, smaller: int, expected: bool
) -> None:
    space = resolve(space=QUICK)
    a = differing(space, per_device_train_batch_size=larger)
    b = differing(space, per_device_train_batch_size=smaller)
    assert space.demands_at_least(a, b) is expected


@pytest.mark.parametrize(
    ("larger", "smaller", "expected"),
    [
        ({"max_length": 2048}, {"max_length": 512}, True),
        ({"max_length": 512}, {"max_length": 2048}, False),
        ({"max_length": 2048, "checkpointing": "none"}, {"max_length": 512}, True),
        ({"max_length": 2048}, {"max_length": 512, "checkpointing": "none"}, False),
        (
            {"batching": "bfd", "max_length": 2048},
            {"batching": "bfd", "max_length": 512},
            True,
        ),
        ({"batching": "bfd"}, {"batching": "padded"}, False),
        ({"batching": "padding_free"}, {}, False),
        ({"batching": "padding_free"}, {"batching": "padding_free"}, True),
        ({"adaptation": "lora", "lora_r": 64}, {"adaptation": "lora", "lora_r": 8}, True),
        ({"adaptation": "lora"}, {}, False),
        ({}, {"adaptation": "lora"}, False),
        ({"pad_to_multiple_of": 128}, {"pad_to_multiple_of": 64}, True),
        ({"pad_to_multiple_of": 8}, {"pad_to_multiple_of": "none"}, False),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, False),
        ({"attn_implementation": "eager"}, {}, False),
    ],
)
def test_demands(larger: dict[str, Any], smaller: dict[str, Any], expected: bool) -> None:
    space = resolve()
    a, b = differing(space, **larger), differing(space, **smaller)
    assert space.demands_at_least(a, b) is expected
