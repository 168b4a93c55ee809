"""What must hold for every registered knob, built-in or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autotune.space.context import Context
from autotune.space.domains import Choice
from autotune.space.knob import Knob, registry
from autotune.space.trainers import BUILTIN
from autotune.testing.contexts import PACKAGES, make_context, make_cpu, make_gpu

KNOBS = [pytest.param(knob, id=name) for name, knob in registry]
RICH = {**PACKAGES, "flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "kernels": "0.18.2"}
CONTEXTS = [make_context(), make_context(device=make_gpu(), packages=RICH)]

every_knob = pytest.mark.parametrize("knob", KNOBS)
every_context = pytest.mark.parametrize("context", CONTEXTS, ids=["cpu", "gpu"])


def dotted(keys: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Return the keys, and the keys of mappings behind a dot."""
    found = set()
    for key, value in keys.items():
        found.add(f"{prefix}{key}")
        if isinstance(value, Mapping):
            found |= dotted(value, f"{prefix}{key}.")
    return found


def written(knob: Knob, context: Context) -> dict[Any, dict[str, Any]]:
    return {v: knob.written(v, {knob.name: v}, context) for v in knob.values(context)}


@every_knob
def test_it_explains_itself(knob: Knob) -> None:
    assert knob.help.strip().endswith(".")
    assert len(knob.help) < 600
    assert set(knob.needed_keys) <= set(knob.keys)
    assert registry.get(knob.name) is knob


@every_knob
@every_context
def test_its_values_are_its_own(knob: Knob, context: Context) -> None:
    values = knob.values(context)
    assert len(set(values)) == len(values) > 0
    for value in (*values, knob.baseline):
        assert knob.parse(value) == value
        assert type(knob.parse(str(value))) is type(value)
        assert knob.change(value) in ("nothing", "tokens", "method")


@every_knob
@every_context
def test_it_writes_only_what_belongs_to_it(knob: Knob, context: Context) -> None:
    allowed = {*knob.keys, "max_length" if knob.name == "batching" else knob.name}
    for keys in written(knob, context).values():
        for key in dotted(keys):
            owned = any(key == own or key.startswith(f"{own}.") for own in allowed)
            parent = any(own.startswith(f"{key}.") for own in allowed)
            assert owned or parent, key


@every_knob
@every_context
def test_different_values_write_different_keys(knob: Knob, context: Context) -> None:
    keys = list(written(knob, context).values())
    for index, one in enumerate(keys):
        assert one not in keys[:index]


@every_knob
@every_context
def test_its_rules_answer_for_every_value(knob: Knob, context: Context) -> None:
    """With nothing drawn yet, as when a space lacks the knobs it depends on."""
    for value in knob.values(context):
        for rule in (knob.refuse, knob.no_effect):
            reason = rule(value, {}, context) if rule else None
            assert reason is None or (reason and not reason.endswith("."))
        effective = knob.effect(value, {knob.name: value}, context)
        assert knob.effect(effective, {knob.name: effective}, context) == effective
        if knob.memory_at_least:
            assert knob.memory_at_least(value, value, {knob.name: value}, context) in (True, False)


@every_knob
@every_context
def test_memory_order_is_a_partial_order(knob: Knob, context: Context) -> None:
    rule, values = knob.memory_at_least, knob.values(context)
    if rule is None:
        return
    for a in values:
        for b in values:
            if a != b and rule(a, b, {}, context):
                assert not rule(b, a, {}, context)
            for c in values:
                if rule(a, b, {}, context) and rule(b, c, {}, context):
                    assert rule(a, c, {}, context)


@every_knob
def test_the_order_of_fidelity_is_of_its_own_values(knob: Knob) -> None:
    if knob.fidelity is None:
        return
    named = [
        value
        for item in knob.fidelity.order
        for value in (item if isinstance(item, tuple) else (item,))
    ]
    assert len(set(named)) == len(named)
    assert set(named) <= set(knob.accepted.values)
    ranks = [knob.fidelity.rank(value) for value in named]
    assert ranks == sorted(ranks)
    assert knob.fidelity.rank("no such value") == len(knob.fidelity.order)


@every_knob
@every_context
def test_leaner_values_are_its_own(knob: Knob, context: Context) -> None:
    values = knob.values(context)
    if isinstance(knob.leanest, tuple):
        assert set(knob.leanest) <= set(knob.accepted.values)
    else:
        assert knob.ordered
        assert knob.lean(values) == min(values)
    assert knob.lean(values) in values
    assert knob.lean(values[-1:]) == values[-1]


@every_knob
@every_context
def test_what_loading_needs_is_ordered(knob: Knob, context: Context) -> None:
    # Not over None: without adapters it is gradients, after loading, that take their place.
    rule, values = knob.loads_at_least, knob.values(context)
    if rule is None:
        return
    for a in values:
        for b in values:
            for c in values:
                if rule(a, b, {}, context) and rule(b, c, {}, context):
                    assert a == c or rule(a, c, {}, context)


@every_knob
def test_it_needs_no_package_that_it_does_not_declare(knob: Knob) -> None:
    """What a rule refuses for want of a package is what the header of an export names."""
    bare = make_context(device=make_gpu(), packages={})
    refused = (
        {
            value
            for value in knob.accepted.values
            if knob.refuse and "package" in str(knob.refuse(value, {}, bare))
        }
        if isinstance(knob.accepted, Choice)
        else set()
    )
    assert refused == set(knob.needs)


@every_knob
def test_it_depends_on_knobs_that_exist(knob: Knob) -> None:
    assert set(knob.depends_on) <= set(registry.names()) - {knob.name}


@every_knob
def test_memory_rules_are_not_claimed_for_what_changes_the_method(knob: Knob) -> None:
    if knob.memory_at_least is not None:
        assert knob.name == "lora_r" or knob.changes in ("nothing", "tokens")


@pytest.mark.trl
@every_knob
@pytest.mark.parametrize("trainer", BUILTIN)
def test_trl_knows_every_key(knob: Knob, trainer: str) -> None:
    from dataclasses import fields

    pytest.importorskip("trl")
    from trl import ModelConfig, ScriptArguments

    from autotune.trainers.base import load

    classes = (load(trainer).config_class(), ModelConfig, ScriptArguments)
    known = {f.name for kind in classes for f in fields(kind)}
    meant = not knob.trainers or trainer in knob.trainers
    assert knob.is_for(trainer) == (meant and known.issuperset(knob.needed_keys))
    if not knob.is_for(trainer):
        return
    known |= {"env", "accelerate_config"}  # read by the command line itself
    for context in CONTEXTS:
        for keys in written(knob, context).values():
            assert set(keys) <= known
    if trainer == "sft":
        assert {key.partition(".")[0] for key in knob.keys} <= known


@pytest.mark.trl
@pytest.mark.parametrize("bf16", [True, False])
def test_trl_knows_the_keys_of_the_context(bf16: bool) -> None:
    from dataclasses import fields

    pytest.importorskip("trl")
    from trl import SFTConfig

    from autotune.space.knobs.precision import context_keys

    known = {f.name for f in fields(SFTConfig)}
    for device in (make_cpu(supports_bf16=bf16), make_gpu(supports_bf16=bf16)):
        assert set(context_keys(make_context(device=device))) <= known


@pytest.mark.trl
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("max_length", "max_length"),
        ("optim", "optim"),
        ("per_device_train_batch_size", "per_device_train_batch_size"),
        ("lora_r", "lora_r"),
        ("dtype", "dtype"),
        ("adaptation", "use_peft"),
        ("checkpointing", "gradient_checkpointing"),
        ("activation_offloading", "activation_offloading"),
        ("batching", "packing"),
        ("batching", "padding_free"),
        ("torch_compile", "torch_compile"),
    ],
)
def test_baselines_are_trl_s_defaults(name: str, field: str) -> None:
    """If TRL changes a default, the baseline is no longer what changes nothing."""
    pytest.importorskip("trl")
    from trl import ModelConfig, SFTConfig

    knob = registry.get(name)
    keys = knob.written(knob.baseline, {name: knob.baseline}, CONTEXTS[1])
    config = SFTConfig if field in SFTConfig.__dataclass_fields__ else ModelConfig
    default = config.__dataclass_fields__[field].default
    assert keys[field] == getattr(default, "value", default)


@pytest.mark.trl
@pytest.mark.parametrize("trainer", BUILTIN)
def test_baselines_are_the_defaults_of_every_trainer(trainer: str) -> None:
    """Numbers and texts that one key takes as they are; the others have tests of their own."""
    from dataclasses import fields

    pytest.importorskip("trl")
    from autotune.trainers.base import load

    defaults = {field.name: field.default for field in fields(load(trainer).config_class())}
    compared = 0
    for name, knob in registry:
        if name in defaults and knob.write is None and knob.is_for(trainer):
            default = getattr(defaults[name], "value", defaults[name])
            assert knob.of(trainer).baseline == default, name
            compared += 1
    assert compared >= 1


def test_cpu_without_packages_still_has_a_baseline() -> None:
    context = make_context(device=make_cpu(supports_bf16=False), packages={})
    for _, knob in registry:
        if knob.active_if is None or knob.active_if({}, context) is None:
            assert knob.refuse is None or knob.refuse(knob.baseline, {}, context) is None
