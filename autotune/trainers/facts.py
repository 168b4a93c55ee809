"""What a model's configuration says about it, without a weight being read."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from autotune.errors import UsageError
from autotune.space.context import ModelFacts
from autotune.trainers import models

_DOCUMENT = 12
"""Tokens per document of the check below."""


def model_facts(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> ModelFacts:
    """Return the facts that the knobs' rules look at.

    Raises:
        UsageError: If transformers cannot build the architecture from its configuration.
    """
    try:
        shell = models.on_meta(config, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError) as error:
        raise UsageError(
            f"transformers cannot build {config.architectures[0]} from its configuration: {error}",
            hint="Choose a causal language model that the installed transformers knows.",
        ) from error
    text = config.get_text_config()
    return ModelFacts(
        model_type=config.model_type,
        architecture=config.architectures[0],
        num_parameters=sum(parameter.numel() for parameter in shell.parameters()),
        num_layers=getattr(text, "num_hidden_layers", None),
        max_positions=getattr(text, "max_position_embeddings", None),
        vocab_size=text.vocab_size,
        revision=getattr(config, "_commit_hash", None),
        keeps_documents_apart=documents_kept_apart(config),
        has_chat_template=tokenizer.chat_template is not None,
        quantized=getattr(config, "quantization_config", None) is not None,
    )


def documents_kept_apart(config: PretrainedConfig) -> dict[str, bool]:
    """Return, per attention implementation, whether flattened documents ignore each other.

    Padding-free batches and ``bfd`` packing tell documents apart by restarting ``position_ids``
    alone. Architectures that build their mask without looking at them let documents attend to
    their predecessors, silently. So a shrunken model of the same architecture is asked: does the
    second of two flattened documents get the logits that it gets alone? An implementation that
    cannot be tried here is left out.
    """
    answers = {}
    for implementation in ("sdpa", "eager"):
        try:
            answers[implementation] = _second_document_unchanged(_shrunken(config), implementation)
        except Exception:  # noqa: BLE001  any architecture's code may refuse; then nothing is known
            continue
    return answers


def _shrunken(config: PretrainedConfig) -> PretrainedConfig:
    small = copy.deepcopy(config)
    text = small.get_text_config()
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "intermediate_size": 32,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    for name, value in sizes.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    for name in ("quantization_config",):
        if hasattr(small, name):
            delattr(small, name)
    return small


def _second_document_unchanged(config: PretrainedConfig, implementation: str) -> bool:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        model = model.float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    # Small random weights attend evenly; sharper ones make a leak visible.
                    parameter.mul_(10.0)
        ids = torch.randint(2, 60, (1, 2 * _DOCUMENT))
        positions = torch.arange(_DOCUMENT).repeat(2)[None]
        with torch.no_grad():
            both = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            alone = model(input_ids=ids[:, _DOCUMENT:], use_cache=False).logits
    difference = (both[:, _DOCUMENT:] - alone).abs().max()
    return bool(difference <= 1e-3 * alone.abs().max().clamp(min=1e-6))
