"""vLLM beside a trainer that generates: what a probe changes of it, real and virtual."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from autotune.probe.spec import ProbeSpec
from autotune.trainers import models
from autotune.virtual import state, vllm


def least_tokens_key(config: Mapping[str, Any]) -> str:
    """Return what the least length of a completion is called where it is generated.

    Args:
        config: TRL keys; its ``generation_kwargs`` go to transformers or to vLLM's
            ``SamplingParams`` as they are.
    """
    return "min_tokens" if config.get("use_vllm") else "min_new_tokens"


def stand_in(spec: ProbeSpec, training_args: Any) -> None:
    """Let TRL find a modelled engine, if the run is virtual and asks for vLLM."""
    session = state.current()
    if session is None or not getattr(training_args, "use_vllm", False):
        return
    name = spec.config["model_name_or_path"]
    revision = spec.config.get("model_revision")

    def make_shell() -> PreTrainedModel:
        trust = spec.trust_remote_code
        config = models.load_config(name, revision=revision, trust_remote_code=trust)
        return models.on_meta(config, trust_remote_code=trust)

    vllm.install(session, make_shell)


@contextlib.contextmanager
def without_weights(spec: ProbeSpec, training_args: Any) -> Iterator[None]:
    """Let a real engine start without reading weights, where the probe's are random.

    TRL hands it the trainer's before it generates anything. Its ``load_format="dummy"`` takes the
    same memory; TRL has no key for it. Not tried on a card.
    """
    is_random = spec.weights == "random" and getattr(training_args, "use_vllm", False)
    if not is_random or state.current() is not None:
        yield
        return
    from trl.generation import vllm_generation

    usual = getattr(vllm_generation, "LLM", None)
    if usual is None:  # vLLM is missing, as TRL is about to say
        yield
        return
    vllm_generation.LLM = functools.partial(usual, load_format="dummy")
    try:
        yield
    finally:
        vllm_generation.LLM = usual
