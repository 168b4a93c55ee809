"""What a model's configuration says about it, without a weight being read."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from autotune.errors import UsageError
from autotune.space.context import ModelFacts
from autotune.trainers import models

_DOCUMENT = 12
"""Tokens per document of the check below."""

_MASKED = frozenset(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
# Those that read images as well are trained by SFT on their text.
_CAUSAL = frozenset(
    {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
    }
)
# Encoders that have a causal head as well, which is one only where is_decoder is set.
_BIDIRECTIONAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & frozenset(
    MODEL_FOR_MASKED_LM_MAPPING_NAMES
)


def model_facts(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool
) -> ModelFacts:
    """Return the facts that the knobs' rules look at.

    Raises:
        UsageError: If transformers cannot build the architecture from its configuration, or it
            is no causal language model.
    """
    declared = config.architectures[0]
    try:
        shell = models.on_meta(config, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        vocab_size = int(text.vocab_size)
    except MemoryError:
        raise
    except Exception as error:
        raise UsageError(
            f"transformers cannot build {declared} from its configuration: {_one_line(error)}",
            hint="Check the config.json, or choose a causal language model that the installed "
            "transformers knows.",
        ) from error
    reason = _why_no_causal_lm(config, shell) or _why_heads_do_not_fit(text)
    if reason is not None:
        raise UsageError(
            f"the model cannot be fine-tuned by SFT: {reason}.",
            hint="Choose a causal language model, such as Qwen/Qwen3-0.6B; of a folder of your "
            "own, check the config.json.",
        )
    return ModelFacts(
        model_type=config.model_type,
        architecture=type(shell).__name__,
        num_parameters=sum(parameter.numel() for parameter in shell.parameters()),
        num_layers=getattr(text, "num_hidden_layers", None),
        max_positions=getattr(text, "max_position_embeddings", None),
        vocab_size=vocab_size,
        revision=getattr(config, "_commit_hash", None),
        keeps_documents_apart=documents_kept_apart(config),
        has_chat_template=tokenizer.chat_template is not None,
        quantized=getattr(config, "quantization_config", None) is not None,
        declared_architecture=declared,
        num_experts=_num_experts(text),
        share_in_linear=_share_in_linear(shell),
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _num_experts(text: PretrainedConfig) -> int:
    found = [getattr(text, name, None) for name in _EXPERTS]
    return max((number for number in found if isinstance(number, int) and number > 1), default=0)


def _share_in_linear(shell: PreTrainedModel) -> float:
    known = {
        id(parameter): parameter.numel()
        for module in shell.modules()
        # Some models' own class, such as GPT-2's, is another name for a linear layer.
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding, Conv1D))
        for parameter in module.parameters(recurse=False)
    }
    total = sum(parameter.numel() for parameter in shell.parameters())
    return sum(known.values()) / total if total else 1.0


def _why_no_causal_lm(config: PretrainedConfig, shell: PreTrainedModel) -> str | None:
    """Return why the model does not predict the next token; None if it does, for all we know."""
    name = type(shell).__name__
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder with a decoder, which reads a prompt in another way"
    # xlm's name for is_decoder is causal; most configurations have neither.
    is_causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if config.model_type in _BIDIRECTIONAL and not is_causal:
        return f"{name} ({config.model_type}) is an encoder, which sees the tokens to come as well"
    if name in _CAUSAL or type(shell).__module__.startswith("transformers_modules"):
        return None
    if name in _MASKED or shell.get_output_embeddings() is None:
        return f"{name} has no head that predicts the next token"
    return None


def _why_heads_do_not_fit(text: PretrainedConfig) -> str | None:
    """Return why attention would fail in the first step; transformers does not check this."""
    heads = getattr(text, "num_attention_heads", None)
    shared = getattr(text, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        return f"num_attention_heads={heads} is no multiple of num_key_value_heads={shared}"
    return None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__} {text}" if isinstance(error, LookupError) or not text else text


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
