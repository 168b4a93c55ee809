"""What vLLM takes of a card, worked out as its engine does when it starts; nothing is run.

vLLM is not installed where probes are virtual, and its kernels, graphs and pools are a card's. So
its memory is **modelled**: neither measured nor traced from tensors. Each figure names what it was
read from: vLLM 0.31.0 and 0.22.0, the newest and oldest that trl 1.16 takes, which size alike.

- The engine asks for a share of the card, and does not start unless so much is free
  (``request_memory`` in vllm/v1/worker/utils.py).
- Of that it takes off what it holds without a KV cache, what a forward pass takes for a moment,
  and what CUDA graphs are expected to take; the rest is KV cache
  (``Worker.determine_available_memory`` in vllm/v1/worker/gpu_worker.py).
- The cache must hold one sequence of the greatest length (``_check_enough_kv_cache_memory`` in
  vllm/v1/core/kv_cache_utils.py).
- Asleep at level 2, which TRL uses, weights and KV cache are given back to the driver; all else
  stays (``CuMemAllocator.sleep`` in vllm/device_allocator/cumem.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autotune.units import MIB, format_gib
from autotune.virtual.errors import NotOnCard, NotVirtual

MODELLED_ON = "0.31.0"
"""The vLLM that was read."""

BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache on CUDA (``CacheConfig.DEFAULT_BLOCK_SIZE``)."""

ELEMENT_BYTES = 2
"""Bytes of a weight and of an element of the cache. With ``dtype="auto"``, which TRL leaves, vLLM
casts float32 checkpoints to a 16-bit type (``_resolve_auto_dtype`` in vllm/config/model.py), and
``kv_cache_dtype="auto"`` is the model's."""

BATCHED_TOKENS = 4096
"""Tokens of a forward pass at most: TRL's ``max_num_batched_tokens`` (vllm_generation.py)."""

GRAPHS_BYTES = 369 * MIB
"""CUDA graphs and what else stays asleep, a figure from logs rather than a formula: 0.36 GiB that
vLLM 0.27.1 expected for 16 sizes (gpustack/runner, pull request 251). For a model of 1B it logged
0.21 GiB (vllm-project/vllm, pull request 11349), and 774 MiB were left of a sleeping engine of 1B,
a context of its own included (NVIDIA-NeMo/RL, issue 223)."""

_LOGITS_BYTES = ELEMENT_BYTES + 4 * 4
"""Per sequence and token of the vocabulary while one is drawn: the logits, and these in float32,
sorted, as probabilities and as log-probabilities (vllm/v1/sample; TRL asks for processed ones)."""

_FULL, _WINDOWS = (
    "full_attention",
    {
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a model decides its share of the engine.

    Attributes:
        num_parameters: All, tied ones once.
        windows: Per layer with a cache, the tokens that it looks back; None for all.
        kv_heads: Heads of keys and values.
        head_size: Elements of a head.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside of the MLP.
        vocab_size: Rows of the embedding.
        active_ratio: Least share of the parameters that a token passes: of experts, those chosen.
    """

    num_parameters: int
    windows: tuple[int | None, ...]
    kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    active_ratio: float = 1.0

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of the engine's copy of the weights."""
        return self.num_parameters * ELEMENT_BYTES

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a block of one layer's cache: keys and values of 16 tokens."""
        return BLOCK_TOKENS * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_size * ELEMENT_BYTES

    @property
    def transient_bytes(self) -> int:
        """Return what the largest forward pass takes for a moment.

        An estimate: of an MLP both inner projections, their product and two copies of the stream.
        It shifts bytes between this and the cache; their sum is the reservation in any case.
        """
        width = 3 * self.intermediate_size + 2 * self.hidden_size
        return BATCHED_TOKENS * width * ELEMENT_BYTES

    def sampling_bytes(self, num_sequences: int) -> int:
        """Return what drawing one token for each sequence takes for a moment."""
        return num_sequences * self.vocab_size * _LOGITS_BYTES

    def request_bytes(self, num_tokens: int) -> int:
        """Return the cache that one sequence of ``num_tokens`` needs, in whole blocks.

        A layer with a window keeps that and the tokens of a pass
        (``SlidingWindowSpec.max_admission_blocks_per_request`` in vllm/v1/kv_cache_interface.py).
        """
        blocks = 0
        for window in self.windows:
            kept = num_tokens if window is None else min(window - 1 + BATCHED_TOKENS, num_tokens)
            blocks += math.ceil(kept / BLOCK_TOKENS) + (window is not None)
        return blocks * self.page_bytes

    def read_bytes(self, num_tokens: int) -> int:
        """Return what attention reads of the cache for one more token after ``num_tokens``."""
        seen = sum(num_tokens if w is None else min(w, num_tokens) for w in self.windows)
        return seen * self._token_bytes


def shape_of(config: Any, num_parameters: int) -> Shape:
    """Return the shape of a model from transformers' configuration.

    Raises:
        NotVirtual: If its cache is another than keys and values of attention, or its
            configuration says other than most do what that takes.
    """
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise NotVirtual("vLLM", "its cache of latent attention is not modelled")
    try:
        heads = int(text.num_attention_heads)
        hidden = int(text.hidden_size)
        return Shape(
            num_parameters=num_parameters,
            windows=_windows(text),
            kv_heads=_kv_heads(text, heads),
            head_size=int(getattr(text, "head_dim", None) or hidden // heads),
            hidden_size=hidden,
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * hidden),
            vocab_size=int(text.vocab_size),
            active_ratio=_active_ratio(text),
        )
    except (AttributeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise NotVirtual(
            "vLLM", f"the model's configuration is not understood ({said})"
        ) from error


def _kv_heads(text: Any, heads: int) -> int:
    """Return the heads of keys and values, which Falcon and MPT name in their own ways."""
    if getattr(text, "multi_query", False) and not getattr(
        text, "new_decoder_architecture", False
    ):
        return 1
    own = getattr(getattr(text, "attn_config", None), "kv_n_heads", None)
    names = ("num_key_value_heads", "num_kv_heads")
    return int(next((n for n in (getattr(text, name, None) for name in names) if n), own or heads))


def _active_ratio(text: Any) -> float:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((n for n in (getattr(text, name, None) for name in names) if n), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return min(int(chosen) / int(experts), 1.0) if experts and chosen else 1.0


def _windows(text: Any) -> tuple[int | None, ...]:
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
    if not kinds:
        # Mistral's first configurations: one window for all layers.
        return (getattr(text, "sliding_window", None),) * int(text.num_hidden_layers)
    found: list[int | None] = []
    for kind in kinds:
        if kind != _FULL and kind not in _WINDOWS:
            raise NotVirtual("vLLM", f"what it keeps for layers of {kind} is not modelled")
        found.append(None if kind == _FULL else getattr(text, _WINDOWS[kind]))
    # The last ones may read the cache of an earlier one (Gemma 3n).
    return tuple(found[: len(found) - int(getattr(text, "num_kv_shared_layers", 0) or 0)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What an engine takes of a card, in bytes; modelled.

    Attributes:
        utilization: The share (0 to 1) of the card that it was given.
        requested_bytes: That share: all that it takes while it generates.
        weights_bytes: Its copy of the weights.
        kv_cache_bytes: Its KV cache.
        graphs_bytes: CUDA graphs and buffers, which stay while it sleeps.
        transient_bytes: For a moment in each forward pass, of PyTorch's own allocator.
        num_blocks: Blocks of the cache, one of which stays empty.
        max_model_len: The longest sequence, in tokens.
        num_sequences: Sequences at once at most.
        sleeps: Whether it sleeps while the trainer trains.
    """

    utilization: float
    requested_bytes: int
    weights_bytes: int
    kv_cache_bytes: int
    graphs_bytes: int
    transient_bytes: int
    num_blocks: int
    max_model_len: int
    num_sequences: int
    sleeps: bool

    @property
    def training_bytes(self) -> int:
        """Return what it holds while the trainer trains."""
        return self.graphs_bytes if self.sleeps else self.awake_bytes

    @property
    def awake_bytes(self) -> int:
        """Return what it holds while it is awake, between forward passes."""
        return self.weights_bytes + self.kv_cache_bytes + self.graphs_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        derived = {"awake_bytes": self.awake_bytes, "training_bytes": self.training_bytes}
        return {**asdict(self), **derived, "vllm": MODELLED_ON}


def reserve(
    shape: Shape,
    *,
    total_bytes: int,
    utilization: float,
    max_model_len: int,
    num_sequences: int,
    sleeps: bool,
) -> Reservation:
    """Return how an engine divides its share of a card.

    Args:
        shape: Of the model.
        total_bytes: The card's memory.
        utilization: ``vllm_gpu_memory_utilization``.
        max_model_len: Tokens of prompt and completion at most.
        num_sequences: ``max_num_seqs``: TRL gives the completions of a generation.
        sleeps: ``vllm_enable_sleep_mode``.

    Raises:
        NotOnCard: If no sequence of the greatest length would find room, with which vLLM does not
            start. A larger share, or card, helps.
    """
    requested = math.ceil(total_bytes * utilization)
    drawing = shape.sampling_bytes(min(num_sequences, BATCHED_TOKENS))
    transient = max(shape.transient_bytes, drawing)
    left = requested - shape.weights_bytes - GRAPHS_BYTES - transient
    block = len(shape.windows) * shape.page_bytes
    num_blocks = max(left, 0) // block
    # The pool keeps one block empty (BlockPool.null_block).
    available, needed = (num_blocks - 1) * block, shape.request_bytes(max_model_len)
    if num_blocks < 1 or available < needed:
        raise NotOnCard(
            f"vLLM would not start: vllm_gpu_memory_utilization={utilization:g} of the card is"
            f" {format_gib(requested)}, of which {format_gib(shape.weights_bytes)} of weights"
            f" leave {format_gib(max(left, 0))} for the KV cache (modelled), and a sequence of"
            f" {max_model_len:,} tokens takes {format_gib(needed)} of it. Raise"
            " vllm_gpu_memory_utilization, or lower vllm_max_model_length"
        )
    return Reservation(
        utilization=utilization,
        requested_bytes=requested,
        weights_bytes=shape.weights_bytes,
        kv_cache_bytes=num_blocks * block,
        graphs_bytes=GRAPHS_BYTES,
        transient_bytes=transient,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        num_sequences=num_sequences,
        sleeps=sleeps,
    )


def at_once(shape: Shape, reservation: Reservation, num_tokens: int) -> int:
    """Return how many sequences of ``num_tokens`` are generated at once: at least one.

    More wait: the scheduler admits what the cache has blocks for.
    """
    room = reservation.kv_cache_bytes - len(shape.windows) * shape.page_bytes
    fitting = room // max(shape.request_bytes(num_tokens), 1)
    return int(max(1, min(fitting, reservation.num_sequences)))
