"""vLLM's place in TRL's trainers where there is no card: an engine that only reserves and counts.

TRL's own ``VLLMGeneration`` runs as it is: it starts the engine, wakes it, hands it each weight,
asks for completions and puts it to sleep. Only what it calls in vLLM is replaced, because that
runs on a card alone: by :func:`install`, and nowhere else. ``LLM`` becomes :class:`Engine`, whose
memory is that of :mod:`autotune.virtual.engine`. All completions have the full length, and what
they say is one word again and again.

The engine's blocks lie beside PyTorch's pools: its own are never shared with the trainer's. While
it sleeps they count as gone, as they are for the driver.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from autotune.virtual import engine
from autotune.virtual.errors import NotVirtual
from autotune.virtual.session import Session
from autotune.virtual.trace import ENGINE

_SLEEP_LEVEL = 2


def install(session: Session, make_shell: Callable[[], Any]) -> None:
    """Let TRL find an engine until the device is no longer placed.

    Not where the device is placed: it is that only trainers with ``use_vllm`` look for vLLM, and
    importing TRL's part for it takes time.

    Args:
        session: Of the card; trainers choose it (:func:`autotune.virtual.placement.placed`).
        make_shell: Returns the model without memory behind its parameters.
    """
    from trl.generation import vllm_generation

    stack = session.until_end
    assert stack is not None, "the device is not placed"
    stand_ins = {
        "is_vllm_available": lambda *args, **kwargs: True,
        "LLM": functools.partial(Engine, session, make_shell),
        "SamplingParams": _Sampling,
        "StructuredOutputsParams": _no_structure,
        "VLLMClient": _no_server,
    }
    for name, stand_in in stand_ins.items():
        # Names that TRL only has where vLLM is installed must be made.
        stack.enter_context(mock.patch.object(vllm_generation, name, stand_in, create=True))


class _Sampling:
    """What TRL asks of a generation (``vllm.SamplingParams``)."""

    def __init__(self, *, max_tokens: int, n: int = 1, **others: Any) -> None:
        self.max_tokens = max_tokens
        self.n = n


def _no_structure(*args: Any, **kwargs: Any) -> Any:
    raise NotVirtual("vLLM", "what a pattern leaves of a completion is known to its grammar only")


def _no_server(*args: Any, **kwargs: Any) -> Any:
    raise NotVirtual("vllm_mode=server", "the server is another process, on other cards")


class Engine:
    """Stands for ``vllm.LLM``: reserves what it would, and counts the work of generating.

    Args:
        session: Of the card.
        make_shell: Returns the model without memory.
        gpu_memory_utilization: Share (0 to 1) of the card.
        max_model_len: Longest sequence; None for the model's own.
        max_num_seqs: Sequences at once; vLLM's own default of 256 for None.
        enable_sleep_mode: Whether weights and cache can be given back.
        quantization: How weights are stored; None for as they are.
        others: What changes neither memory nor work here.
    """

    def __init__(
        self,
        session: Session,
        make_shell: Callable[[], Any],
        *,
        gpu_memory_utilization: float,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        enable_sleep_mode: bool = False,
        quantization: str | None = None,
        **others: Any,
    ) -> None:
        if quantization is not None:
            raise NotVirtual(
                f"vLLM with weights of {quantization}", "how it stores those is not modelled"
            )
        self._session = session
        self._trace = session.trace
        shell = make_shell()
        self._shape = engine.shape_of(
            shell.config, sum(weight.numel() for weight in shell.parameters())
        )
        text = shell.config.get_text_config()
        self._word = int(text.vocab_size) // 2  # tokens that mean an end lie at the table's ends
        longest = max_model_len or int(text.max_position_embeddings)
        self._reserved = engine.reserve(
            self._shape,
            total_bytes=session.total_bytes,
            utilization=float(gpu_memory_utilization),
            max_model_len=longest,
            num_sequences=max_num_seqs or 256,
            sleeps=enable_sleep_mode,
        )
        session.modelled["vllm"] = self._reserved.to_dict()
        self._held: dict[str, int] = {}
        self._start()
        self.llm_engine = types.SimpleNamespace(
            model_config=types.SimpleNamespace(max_model_len=longest),
            model_executor=types.SimpleNamespace(
                driver_worker=types.SimpleNamespace(
                    model_runner=types.SimpleNamespace(
                        model=types.SimpleNamespace(load_weights=self._load_weights)
                    )
                )
            ),
        )

    def _start(self) -> None:
        trace, found = self._trace, self._reserved
        trace.empty_cache()
        # It looks whether all of its share is free, and does not start otherwise.
        trace.let_go(trace.hold(found.requested_bytes, "vLLM's share, modelled", ENGINE))
        trace.hold(found.graphs_bytes, "vLLM's CUDA graphs, modelled", ENGINE)
        self._take(("weights", "kv_cache"))

    def _take(self, tags: Iterable[str]) -> None:
        sizes = {
            "weights": (self._reserved.weights_bytes, "vLLM's weights, modelled"),
            "kv_cache": (self._reserved.kv_cache_bytes, "vLLM's KV cache, modelled"),
        }
        for tag in tags:
            if tag not in self._held:
                nbytes, name = sizes[tag]
                self._held[tag] = self._trace.hold(nbytes, name, ENGINE)

    def sleep(self, level: int = 1) -> None:
        """Give weights and cache back to the driver.

        Raises:
            NotVirtual: If they are to be kept on the host, which TRL never asks for.
        """
        if level != _SLEEP_LEVEL:
            raise NotVirtual(f"vLLM's sleep at level {level}", "TRL uses level 2 only")
        for number in self._held.values():
            self._trace.let_go(number)
        self._held.clear()
        self._trace.empty_cache()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take weights, cache or both again; PyTorch's cache is given back before."""
        self._trace.empty_cache()
        self._take(tags if tags is not None else ("weights", "kv_cache"))

    def reset_prefix_cache(self) -> None:
        """Do nothing: no prompt is found in the cache again, so that none is forgotten."""

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Count a copy of each weight on the card: read as the trainer's, written as its own."""
        for _, weight in weights:
            moved = weight.numel() * (weight.element_size() + engine.ELEMENT_BYTES)
            self._session.charge_move("vLLM's copy of a weight", moved)

    def generate(
        self,
        prompts: Sequence[Mapping[str, Any]],
        sampling_params: _Sampling,
        use_tqdm: bool = False,
    ) -> list[Any]:
        """Return a completion of full length for each prompt, and count what they take."""
        if sampling_params.n != 1:
            raise NotVirtual("vLLM", "TRL asks it for one completion per prompt")
        lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
        # From PyTorch's own pools, where the trainer may find it again.
        self._trace.flash((self._reserved.transient_bytes,), "vLLM's forward pass, modelled")
        self._charge(lengths, sampling_params.max_tokens)
        certain = types.SimpleNamespace(logprob=0.0, rank=1)
        tokens = [self._word] * sampling_params.max_tokens
        logprobs = [{self._word: certain}] * sampling_params.max_tokens
        return [
            types.SimpleNamespace(
                prompt_token_ids=list(prompt["prompt_token_ids"]),
                outputs=[types.SimpleNamespace(token_ids=list(tokens), logprobs=logprobs)],
            )
            for prompt in prompts
        ]

    def _charge(self, lengths: Sequence[int], num_tokens: int) -> None:
        """Count reading the prompts and writing the completions, by the card's roofline.

        The least that it takes: a pass reads the weights, of experts those of one token, and
        attention the cache. Left out are
        scheduling, drawing tokens, and attention's arithmetic; no prompt is found in the cache.
        """
        shape, dtype = self._shape, self._dtype()
        weights_bytes = shape.active_ratio * shape.weights_bytes
        for first in range(0, sum(lengths), engine.BATCHED_TOKENS):
            count = min(engine.BATCHED_TOKENS, sum(lengths) - first)
            self._pass(count, weights_bytes, dtype)
        longest = max(lengths, default=0)
        batch = engine.at_once(shape, self._reserved, longest + num_tokens)
        for first in range(0, len(lengths), batch):
            part = lengths[first : first + batch]
            mean = math.ceil(sum(part) / len(part))
            for written in range(1, num_tokens):
                read = len(part) * shape.read_bytes(mean + written)
                self._pass(len(part), weights_bytes + read, dtype)

    def _pass(self, num_tokens: int, moved_bytes: float, dtype: torch.dtype) -> None:
        flops = 2.0 * self._shape.active_ratio * self._shape.num_parameters * num_tokens
        self._session.charge_matmul(flops, moved_bytes, dtype)

    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._session.supports_bf16 else torch.float16
