"""The engine that stands for vLLM's: what it holds when, and what it counts."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from autotune.units import GIB
from autotune.virtual import cards, engine
from autotune.virtual.errors import NotVirtual
from autotune.virtual.replay import Replay
from autotune.virtual.roofline import BANDWIDTH_EFFICIENCY, Roofline
from autotune.virtual.trace import ENGINE, Trace
from autotune.virtual.vllm import Engine, _Sampling

TOTAL_BYTES = 80 * GIB
PARAMETERS = 1_000_000_000


def make_shell() -> Any:
    config = types.SimpleNamespace(
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        vocab_size=32_000,
        max_position_embeddings=8192,
    )
    config.get_text_config = lambda: config
    weight = torch.empty(PARAMETERS, device="meta", dtype=torch.float32)
    return types.SimpleNamespace(config=config, parameters=lambda: [weight])


def make_engine(session: Any, **changes: Any) -> Engine:
    asked: dict[str, Any] = {"gpu_memory_utilization": 0.3, "max_num_seqs": 8, **changes}
    return Engine(session, make_shell, **asked)


def held(trace: Trace) -> int:
    """Return the bytes that the engine holds now."""
    sizes: dict[int, int] = {}
    for action, number in trace.events:
        if action == 0 and trace.storages[number].kind == ENGINE:
            sizes[number] = trace.storages[number].nbytes
        elif action == 1:
            sizes.pop(number, None)
    return sum(sizes.values())


def peak_of(trace: Trace, **options: Any) -> int:
    replay = Replay(trace, limit_bytes=None, **options)
    replay.advance()
    return replay.peak_reserved_bytes


def test_it_holds_its_share_while_it_is_awake(session: Any) -> None:
    made = make_engine(session)
    found = session.modelled["vllm"]
    assert found["weights_bytes"] == 2 * PARAMETERS
    assert held(session.trace) == found["awake_bytes"]
    assert made.llm_engine.model_config.max_model_len == 8192


def test_a_share_that_is_not_free_runs_out(session: Any) -> None:
    from autotune.virtual.errors import OutOfMemory

    session.trace.reserve(60 * GIB, "a model")
    make_engine(session)
    replay = Replay(session.trace, limit_bytes=TOTAL_BYTES)
    with pytest.raises(OutOfMemory):
        replay.advance()


def test_asleep_it_gives_all_but_graphs_back(session: Any) -> None:
    made = make_engine(session, enable_sleep_mode=True)
    made.sleep(level=2)
    assert held(session.trace) == engine.GRAPHS_BYTES
    made.wake_up(tags=["weights"])
    assert held(session.trace) == engine.GRAPHS_BYTES + 2 * PARAMETERS
    made.wake_up(tags=["kv_cache"])
    assert held(session.trace) == session.modelled["vllm"]["awake_bytes"]
    made.wake_up()
    assert held(session.trace) == session.modelled["vllm"]["awake_bytes"]


def test_only_the_sleep_that_trl_uses_is_known(session: Any) -> None:
    with pytest.raises(NotVirtual, match="level 1"):
        make_engine(session).sleep()


@pytest.mark.parametrize("expands", ["", "expandable_segments:True"])
def test_the_peak_is_the_larger_phase_with_sleep_and_their_sum_without(
    session: Any, expands: str
) -> None:
    """The trainer's cache is given back before the engine wakes, and its pool when it sleeps."""
    peaks, training_bytes = {}, 30 * GIB
    for sleeps in (True, False):
        session.trace = trace = Trace()
        made = make_engine(session, enable_sleep_mode=sleeps)
        for _ in range(2):
            if sleeps:
                made.sleep(level=2)
            trace.flash((training_bytes,), "training")
            if sleeps:
                made.wake_up()
            made.generate([{"prompt_token_ids": [5] * 10}], _Sampling(max_tokens=4))
        peaks[sleeps] = peak_of(trace, settings=expands)
    found = session.modelled["vllm"]
    slack = 64 << 20  # segments are whole
    assert peaks[True] == pytest.approx(training_bytes + found["graphs_bytes"], abs=slack)
    assert peaks[False] == pytest.approx(training_bytes + found["awake_bytes"], abs=slack)


def test_completions_have_full_length_and_no_end(session: Any) -> None:
    prompts = [{"prompt_token_ids": [7, 8]}, {"prompt_token_ids": [9]}]
    found = make_engine(session).generate(prompts, _Sampling(max_tokens=5))
    assert [item.prompt_token_ids for item in found] == [[7, 8], [9]]
    for item in found:
        (completion,) = item.outputs
        assert completion.token_ids == [16_000] * 5
        assert [list(step) for step in completion.logprobs] == [[16_000]] * 5


def test_decoding_reads_weights_and_cache_once_per_token(session: Any) -> None:
    card = cards.find("a100-sxm-80gb")
    session.roofline = Roofline(card)
    made = make_engine(session)
    before = sum(cost.seconds for cost in session.trace.costs.values())
    made.generate([{"prompt_token_ids": [5] * 10}] * 4, _Sampling(max_tokens=11))
    seconds = sum(cost.seconds for cost in session.trace.costs.values()) - before
    # A pass over 40 prompt tokens, bound by reading weights, and ten over one token each, which
    # read keys and values of 11 to 20 tokens in 8 layers of 4 heads of 64, 2 bytes each.
    weights = 11 * 2 * PARAMETERS
    cache = sum(4 * tokens * 8 * 2 * 4 * 64 * 2 for tokens in range(11, 21))
    bandwidth = card.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY
    assert seconds == pytest.approx((weights + cache) / bandwidth, rel=1e-6)


def test_handing_weights_over_reads_and_writes_each(session: Any) -> None:
    session.roofline = Roofline(cards.find("a100-sxm-80gb"))
    runner = make_engine(session).llm_engine.model_executor.driver_worker.model_runner
    before = sum(cost.moved_bytes for cost in session.trace.costs.values())
    runner.model.load_weights([("w", torch.empty(1000, device="meta", dtype=torch.float32))])
    moved = sum(cost.moved_bytes for cost in session.trace.costs.values()) - before
    assert moved == 1000 * (4 + 2)


def test_quantised_weights_are_not_modelled(session: Any) -> None:
    with pytest.raises(NotVirtual, match="bitsandbytes"):
        make_engine(session, quantization="bitsandbytes")
