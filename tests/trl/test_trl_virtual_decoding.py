"""Generations of which few steps are run, against the same ones with all steps run."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import agreement_kit as kit
import pytest
import torch
import transformers
from test_trl_online import SHORT, request_for, rows

from autotune.space.space import SearchSpace
from autotune.trainers.base import load
from autotune.virtual import cards, device, placement, state
from autotune.virtual.api import session_for
from autotune.virtual.decoding import Decoding
from autotune.virtual.device import DEVICE_TYPE
from autotune.virtual.repeats import Repeats
from autotune.virtual.replay import Replay
from autotune.virtual.trace import ALLOC, Trace

pytestmark = pytest.mark.trl

NUM_NEW = 48
PADDED = [[0, 0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9]]
EQUAL = [[2, 3, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9]]
SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {**SIZES},
    "Qwen3": {**SIZES},
    "Mistral": {**SIZES, "sliding_window": 20},
    "Gemma3Text": {
        **SIZES,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Mixtral": {**SIZES, "num_local_experts": 4},
    "GPT2": {"vocab_size": 500, "n_embd": 64, "n_layer": 3, "n_head": 4},
    "OPT": {
        "vocab_size": 500,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
    },
    "Bloom": {"vocab_size": 500, "hidden_size": 64, "n_layer": 3, "n_head": 4},
}
ONE_POSITION_BYTES = 1024
"""More than queries, keys or values of one position take, which rotations put together too."""

CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


@dataclass(frozen=True)
class Generation:
    """What a generation did."""

    shape: tuple[int, ...]
    num_spared: int
    trace: Trace
    reserved_bytes: int


def make(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind], pad_token_id=0)
    return getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config)


@contextlib.contextmanager
def on_card() -> Iterator[Any]:
    device.install()
    card = session_for(cards.find("h100-80gb"))
    state.activate(card)
    try:
        with placement.placed(card):
            yield card
    finally:
        card.trace.close()
        state.activate(None)


def generate(
    model: Any,
    prompts: list[list[int]],
    *,
    is_spared: bool,
    times: int = 1,
    num_new: int = NUM_NEW,
) -> Generation:
    """Generate on a card, ``times`` times."""
    with on_card() as card, torch.no_grad():
        there = model.to(f"{DEVICE_TYPE}:0").eval()
        decoding = Decoding(card.trace)
        if is_spared:
            decoding.install(there)
        ids = torch.tensor(prompts).to(there.device)
        for _ in range(times):
            found = there.generate(
                input_ids=ids,
                attention_mask=(ids != 0).long(),
                max_new_tokens=num_new,
                do_sample=True,
                disable_compile=True,
            )
            shape = tuple(found.shape)
            del found
        gc.collect()
        allocator = Replay(card.trace, settings="", limit_bytes=None)
        allocator.advance()
        return Generation(shape, decoding.num_spared, card.trace, allocator.peak_reserved_bytes)


def compare(spared: Generation, whole: Generation) -> None:
    """Check that both did the same, but for what the small pool holds in between."""
    assert spared.shape == whole.shape
    assert spared.trace.peak_bytes == whole.trace.peak_bytes
    assert spared.trace.allocated_bytes == whole.trace.allocated_bytes
    assert spared.reserved_bytes == whole.reserved_bytes
    assert caches(spared.trace) == caches(whole.trace)
    for phase, cost in whole.trace.costs.items():
        other = spared.trace.costs[phase]
        assert other.num_ops == cost.num_ops
        assert other.flops == pytest.approx(cost.flops, rel=1e-3)
        assert other.moved_bytes == pytest.approx(cost.moved_bytes, rel=1e-3)
        assert other.seconds == pytest.approx(cost.seconds, rel=2e-3)


def caches(trace: Trace) -> list[int]:
    """Return the bytes of each allocation of keys or values that hold all positions."""
    found = [trace.storages[number] for action, number in trace.events if action == ALLOC]
    return [
        entry.nbytes for entry in found if entry.op == "cat" and entry.nbytes > ONE_POSITION_BYTES
    ]


@pytest.mark.parametrize(
    ("kind", "prompts"),
    [(kind, PADDED) for kind in MODELS] + [(kind, EQUAL) for kind in ("Llama", "Mistral", "GPT2")],
    ids=[f"{kind}-padded" for kind in MODELS] + ["Llama-equal", "Mistral-equal", "GPT2-equal"],
)
def test_few_steps_tell_the_same_as_all(kind: str, prompts: list[list[int]]) -> None:
    whole = generate(make(kind), prompts, is_spared=False)
    spared = generate(make(kind), prompts, is_spared=True)
    assert whole.num_spared == 0
    assert spared.num_spared == NUM_NEW - 4
    compare(spared, whole)


def test_a_generation_like_the_last_one_is_not_tried_again() -> None:
    tried = []
    usual = Decoding.learn
    with mock.patch.object(Decoding, "learn", lambda *a: tried.append(1) or usual(*a)):
        spared = generate(make("Llama"), PADDED, is_spared=True, times=3)
    assert len(tried) == 1
    assert spared.num_spared == 3 * (NUM_NEW - 4)
    compare(spared, generate(make("Llama"), PADDED, is_spared=False, times=3))


def test_a_generation_with_another_mask_is_tried_again() -> None:
    """Which positions are masked may decide from where on a window is full."""
    tried = []
    usual = Decoding.learn
    prompts = [PADDED, [[0] * 5 + [5, 6], *PADDED[1:]]]
    told = mock.patch.object(Decoding, "learn", lambda *a: tried.append(1) or usual(*a))
    with told, on_card() as card, torch.no_grad():
        model = make("Llama").to(f"{DEVICE_TYPE}:0").eval()
        Decoding(card.trace).install(model)
        for batch in prompts:
            ids = torch.tensor(batch).to(model.device)
            options = {"do_sample": True, "max_new_tokens": 40, "disable_compile": True}
            model.generate(input_ids=ids, attention_mask=(ids != 0).long(), **options)
    assert len(tried) == len(prompts)


def test_a_greedy_generation_ends() -> None:
    with on_card() as card, torch.no_grad():
        model = make("Llama").to(f"{DEVICE_TYPE}:0").eval()
        Decoding(card.trace).install(model)
        ids = torch.tensor(PADDED).to(model.device)
        found = model.generate(
            input_ids=ids, attention_mask=(ids != 0).long(), max_new_tokens=40, do_sample=False
        )
    assert tuple(found.shape) == (2, 47)


def test_a_short_generation_is_run() -> None:
    assert generate(make("Llama"), PADDED, is_spared=True, num_new=20).num_spared == 0


def test_code_of_a_models_own_is_run() -> None:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        """May do something else at any step."""

    model = make("Llama")
    model.__class__ = Own
    assert generate(model, PADDED, is_spared=True).num_spared == 0


def odd(cache_of: list[Any]) -> Any:
    """Return a model that takes more from the 30th position on, and passes for a library's."""
    model = make("Llama")
    usual = model.model.layers[1].mlp.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        out = usual(hidden)
        cache = cache_of[0]()
        assert cache is not None
        return out + torch.zeros_like(out) if cache.get_seq_length(1) > 30 else out

    forward.__module__ = usual.__module__
    model.model.layers[1].mlp.forward = forward
    return model


def test_a_step_that_does_something_else_is_found_by_trying() -> None:
    cache_of: list[Any] = []
    usual = transformers.DynamicCache.update

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache_of[:] = [weakref.ref(self)]
        return usual(self, *args, **kwargs)

    with mock.patch.object(transformers.DynamicCache, "update", update):
        spared = generate(odd(cache_of), EQUAL, is_spared=True)
        whole = generate(odd(cache_of), EQUAL, is_spared=False)
    assert spared.num_spared == NUM_NEW - 4
    compare(spared, whole)


def test_the_model_is_as_it_was_afterwards() -> None:
    model = make("Llama")
    before = model.forward
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate(model, PADDED, is_spared=True, num_new=-1)
    assert model.forward == before
    generate(model, PADDED, is_spared=True)
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("trainer", "changes"),
    [
        ("grpo", {}),
        ("grpo", {"use_peft": True, "beta": 0.04, "gradient_accumulation_steps": 2}),
        ("rloo", {"beta": 0.04, "gradient_accumulation_steps": 2}),
        ("rloo", {"gradient_checkpointing": False}),
    ],
    ids=str,
)
def test_a_probe_of_an_online_trainer_tells_the_same(
    trainer: str, changes: dict[str, Any], tmp_path: Path, tiny: str
) -> None:
    keys = {**SHORT, "max_completion_length": 40, **changes}
    work = tmp_path / "rows"
    answer = load(trainer).prepare(request_for(trainer, tiny, work, rows(), **keys))
    runs = []
    with kit.quiet():
        for name in ("all", "spared"):
            config = {**SearchSpace.load(trainer).fixed, **keys}
            spec = kit.make_spec(
                tmp_path / name, tiny, answer["data_folder"], config, trainer=trainer
            )
            card = session_for(cards.find("a100-sxm-80gb"))
            repeats = Repeats(card.trace)
            if name == "all":
                repeats.decoding.install = lambda model: None  # type: ignore[method-assign]
                repeats._plan = lambda *args: None  # type: ignore[method-assign]
            steps = kit.run_on(card, spec, repeats)
            allocator = Replay(card.trace, settings="", limit_bytes=None)
            allocator.advance()
            runs.append((steps, repeats, card.trace, allocator.peak_reserved_bytes))
    (all_steps, ran, whole, reserved), (steps, copied, spared, reserved_spared) = runs
    assert ran.num_spared == ran.decoding.num_spared == 0
    assert copied.decoding.num_spared > 0
    assert kit.figures(steps) == kit.figures(all_steps)
    assert reserved_spared == reserved
    for phase, cost in whole.costs.items():
        assert spared.costs[phase].num_ops == cost.num_ops
        assert spared.costs[phase].seconds == pytest.approx(cost.seconds, rel=2e-3)
