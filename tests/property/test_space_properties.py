from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.errors import SpaceError
from autotune.space.domains import Choice, Domain, FloatRange, IntRange, PowerOfTwo, Quantiles
from autotune.space.forms import domain_from_json
from autotune.space.lengths import round_up_useful, useful_lengths
from autotune.space.resolve import ResolvedSpace
from autotune.space.space import SearchSpace
from autotune.testing.contexts import (
    PACKAGES,
    make_context,
    make_cpu,
    make_gpu,
    make_model,
    make_profile,
)

scalars = st.text(max_size=5) | st.integers(-99, 99) | st.floats(-9, 9) | st.booleans() | st.none()
exponents = st.integers(0, 12)
finite = st.floats(-1e6, 1e6)
positive = st.floats(1e-6, 1e6)


def built(make: Callable[..., Domain], *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return domains made of ``parts``, leaving out those that are refused."""

    def attempt(values: Sequence[Any]) -> Domain | None:
        try:
            return make(*values)
        except SpaceError:
            return None

    return st.tuples(*parts).map(attempt).filter(lambda domain: domain is not None)


domains = st.one_of(
    built(Choice, st.lists(scalars, min_size=1, max_size=6).map(tuple)),
    built(Choice, st.lists(st.integers(-9, 9), min_size=1, max_size=6).map(tuple), st.just(True)),
    built(IntRange, st.integers(-50, 50), st.integers(-50, 50), st.integers(1, 9)),
    built(lambda a, b: PowerOfTwo(1 << a, 1 << b), exponents, exponents),
    built(FloatRange, finite, finite, st.integers(2, 20)),
    built(FloatRange, positive, positive, st.integers(2, 20), st.just(True)),
)


@given(domains)
def test_domains_round_trip_and_hold_their_values(domain: Domain) -> None:
    assert domain_from_json(json.loads(json.dumps(domain.to_json()))) == domain
    values = domain.values
    assert len(set(values)) == len(values) > 0
    assert all(domain.validate(value) == value for value in values)
    if domain.ordered:
        assert list(values) == sorted(values)  # type: ignore[type-var]


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5))
def test_quantiles_round_trip(shares: list[float]) -> None:
    domain = Quantiles(tuple(shares))
    assert domain_from_json(json.loads(json.dumps(domain.to_json()))) == domain


@given(st.integers(1, 100_000))
def test_useful_lengths_are_close_and_complete(length: int) -> None:
    rounded = round_up_useful(length)
    lengths = useful_lengths(rounded)
    assert lengths[-1] == rounded >= length
    assert len(lengths) == 1 or lengths[-2] < length
    assert rounded % 8 == 0
    assert rounded - length < max(8, length / 4)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    st.sampled_from([None, 512, 1000, 8192]),
)
def test_default_lengths_are_covered_by_the_profile(
    rows: list[int], positions: int | None
) -> None:
    context = make_context(lengths=rows, model=make_model(max_positions=positions))
    (knob,) = [k for k in SearchSpace.load("sft").knobs if k.name == "max_length"]
    values = knob.values(context)
    assert list(values) == sorted(set(values))
    assert 1024 in values
    for value in values:
        assert 0 < make_profile(rows).coverage(int(str(value))) <= 1


contexts = st.builds(
    make_context,
    device=st.sampled_from(
        [
            make_cpu(),
            make_cpu(supports_bf16=False),
            make_gpu(),
            make_gpu(supports_bf16=False, capability=(7, 5)),
            make_cpu(kind="mps", name="mps"),
        ]
    ),
    model=st.builds(
        make_model,
        model_type=st.sampled_from(["llama", "opt", "gpt2", "mystery"]),
        num_layers=st.sampled_from([None, 1, 3, 24]),
        max_positions=st.sampled_from([None, 512, 8192]),
        keeps_documents_apart=st.sampled_from([{}, {"sdpa": False}, {"eager": False}]),
        quantized=st.just(False),
    ),
    lengths=st.lists(st.integers(8, 4000), min_size=1, max_size=12),
    packages=st.sampled_from(
        [{}, PACKAGES, {**PACKAGES, "flash-attn": "2.8.3", "kernels": "0.18.2"}]
    ),
    global_batch=st.sampled_from([1, 6, 8, 48]),
    num_processes=st.sampled_from([1]),
    min_coverage=st.sampled_from([0.0, 0.9]),
)


def drawing(
    data: st.DataObject, asked: dict[str, Any]
) -> Callable[[str, Sequence[Any], bool], Any]:
    offered: dict[str, tuple[Any, ...]] = {}

    def suggest(name: str, values: Sequence[Any], ordered: bool) -> Any:
        assert len(values) > 1
        assert offered.setdefault(name, tuple(values)) == tuple(values)
        asked[name] = data.draw(st.sampled_from(list(values)), label=name)
        return asked[name]

    return suggest


@settings(max_examples=60, deadline=None)
@given(contexts, st.data())
def test_every_draw_is_legal_and_replays(context: Any, data: st.DataObject) -> None:
    space = SearchSpace.load("sft").resolve(context)
    asked: dict[str, Any] = {}
    candidate = space.draw(drawing(data, asked))
    assert space.params(candidate) == asked
    assert space.draw(lambda name, values, ordered: asked[name]) == candidate
    for knob in space.knobs:
        before = {name: value for name, value in candidate.items() if name in knob.depends_on}
        reason = knob.active_if(before, context) if knob.active_if else None
        assert (reason is None) is (knob.name in candidate)
        if knob.name in candidate and knob.refuse:
            assert knob.refuse(candidate[knob.name], before, context) is None
    config = space.config(candidate)
    rows = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    assert rows == context.global_batch
    assert json.loads(json.dumps(config)) == config
    assert context.min_coverage <= space.coverage(candidate) <= 1.0
    assert space.changes(candidate) <= {"tokens", "method"}
    assert space.demands_at_least(candidate, candidate)


@settings(max_examples=40, deadline=None)
@given(contexts)
def test_the_baseline_is_legal(context: Any) -> None:
    # Rows that the model is too short for cannot be kept whole without bfd_split or wrapped.
    assume(not context.min_coverage or context.model.max_positions in (None, 8192))
    for name in SearchSpace.available():
        loaded = SearchSpace.load(name)
        asks = {knob.name: knob.baseline for knob in loaded.knobs}.get("num_generations", 1)
        if context.global_batch % asks:
            continue  # completions of a prompt must divide it
        if loaded.trainer == "online_dpo":
            # Its max_length cuts prompts alone, so that its rows are trained on whole.
            context = replace(context, min_coverage=0.0)
        space = loaded.resolve(replace(context, trainer=loaded.trainer))
        params = space.params(space.baseline)
        drawn = space.draw(lambda name, values, ordered, known=params: known[name])
        assert drawn == space.baseline
        assert space.changes(space.baseline) == frozenset()


@cache
def quick() -> tuple[ResolvedSpace, tuple[dict[str, Any], ...]]:
    space = SearchSpace.load("quick").resolve(make_context())
    return space, tuple(space.enumerate())


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_draws_are_among_the_enumerated(data: st.DataObject) -> None:
    space, everything = quick()
    assert space.draw(drawing(data, {})) in everything


@cache
def varied() -> tuple[ResolvedSpace, tuple[dict[str, Any], ...]]:
    pins = {"optim": "adafactor", "dtype": "float32", "allocator": "default"}
    space = SearchSpace.load("sft").resolve(make_context(device=make_gpu()), pins)
    return space, tuple(list(space.enumerate())[::13])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_demands_are_transitive(data: st.DataObject) -> None:
    space, everything = varied()
    a = data.draw(st.sampled_from(everything))
    # Change few values, so that the candidates are comparable often enough to say something.
    chain = [a]
    for _ in range(2):
        other = dict(chain[-1])
        for name in ("max_length", "checkpointing", "per_device_train_batch_size", "lora_r"):
            if name in other and data.draw(st.booleans()):
                values = sorted({c[name] for c in everything if name in c}, key=str)
                other[name] = data.draw(st.sampled_from(values))
        chain.append(other)
    a, b, c = chain
    if space.demands_at_least(a, b) and space.demands_at_least(b, c):
        assert space.demands_at_least(a, c)


@given(st.permutations([1, 2, 4, 8, 16]))
def test_micro_batch_demands_are_transitive(order: list[int]) -> None:
    space, everything = quick()
    base = everything[0]
    a, b, c = ({**base, "per_device_train_batch_size": size} for size in order[:3])
    if space.demands_at_least(a, b) and space.demands_at_least(b, c):
        assert space.demands_at_least(a, c)
