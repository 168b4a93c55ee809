"""Building the model of a probe: with random weights by default, through the real loading path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from autotune.virtual.errors import NotVirtual


class _RandomWeight:
    """A weight of a checkpoint that does not exist, drawn when it is read.

    Implements the part of a safetensors slice that transformers' loader uses.
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, std: float, device: torch.device
    ) -> None:
        self._device = device
        self.shape = shape
        self.dtype = dtype
        self._std = std

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __getitem__(self, index: object) -> torch.Tensor:
        empty = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        return empty.normal_(std=self._std)


def load_config(name: str, *, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """Return the model's configuration; no weights are read."""
    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def architecture(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class that TRL's ``create_model_from_path`` would load ``config`` with."""
    names = config.architectures or ()
    found = getattr(transformers, names[0], None) if names else None
    return AutoModelForCausalLM if found is None else found  # type: ignore[no-any-return]


def with_random_weights(
    name: str,
    model_init_kwargs: Mapping[str, Any],
    quantization_config: object | None,
    *,
    scores: bool = False,
) -> PreTrainedModel:
    """Return the model ``name`` with random weights, loaded as a checkpoint would be.

    transformers' loader is given an empty checkpoint: what is missing from one it initialises by
    the model's own rules, on the device and in the dtype asked for. Only quantised weights must
    come from a checkpoint to be quantised, so for those one is made up, a weight at a time.

    Args:
        name: Hub id or folder that holds the configuration.
        model_init_kwargs: As TRL hands them to ``from_pretrained``.
        quantization_config: transformers' configuration of the quantisation; None for none.
        scores: Whether to build the architecture with a head that scores a sequence
            (``AutoModelForSequenceClassification``) in place of its own.
    """
    kwargs = dict(model_init_kwargs)
    trust = bool(kwargs.get("trust_remote_code"))
    config = load_config(name, revision=kwargs.pop("revision", None), trust_remote_code=trust)
    if scores:
        config.num_labels = 1
    _check_stored(config)
    dtype = kwargs.get("dtype", "float32")
    if isinstance(dtype, str) and dtype != "auto":
        kwargs["dtype"] = getattr(torch, dtype)
    if "device_map" not in kwargs:
        # The rule of TRL's create_model_from_path; accelerate divides a model ("auto") only among
        # device types that it knows by name.
        device = PartialState().device
        # TRL's trainers: several processes hold a whole model each ("auto" fails).
        shared = PartialState().distributed_type in ("MULTI_GPU", "MULTI_XPU", "DEEPSPEED")
        on_host = device.type in ("cpu", "mps") or shared
        divided = "auto" if device.type in ("cuda", "xpu") else {"": device}
        kwargs["device_map"] = None if on_host else divided
    weights: dict[str, _RandomWeight] = {}
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
        shell = on_meta(config, trust_remote_code=trust, scores=scores)
        weights = _made_up_checkpoint(shell, config, kwargs.get("dtype"))
    kind = AutoModelForSequenceClassification if scores else architecture(config)
    if kind in _FINDERS:
        # Without a path it does not find the class; it does for a model without weights.
        kind = type(on_meta(config, trust_remote_code=trust, scores=scores))
    model = _from_pretrained(kind, config, weights, kwargs)
    # Lost when no path is given; TRL finds the tokenizer by it.
    model.config._name_or_path = name
    return model


def _check_stored(config: PretrainedConfig) -> None:
    """Check that weights can be stored on a virtual card as they would be on a real one.

    Raises:
        NotVirtual: If only a real card could tell: without one, transformers dequantises.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None or PartialState().device.type != "virtual":
        return
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    name = str(getattr(method, "value", method))
    if name not in ("bitsandbytes", "None"):
        raise NotVirtual(
            f"a checkpoint quantised by {name}",
            "on a machine without a card transformers dequantises its weights",
        )


def _from_pretrained(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    weights: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> PreTrainedModel:
    verbosity = transformers.logging.get_verbosity()
    # Its report would name every weight as missing, which is the point.
    transformers.logging.set_verbosity_error()
    try:
        found: PreTrainedModel = kind.from_pretrained(
            None, config=config, state_dict=dict(weights), **kwargs
        )
        return found
    finally:
        transformers.logging.set_verbosity(verbosity)


def _made_up_checkpoint(
    shell: PreTrainedModel, config: PretrainedConfig, dtype: object
) -> dict[str, _RandomWeight]:
    std = float(getattr(config, "initializer_range", 0.02) or 0.02)
    linear = {
        f"{path}.weight"
        for path, module in shell.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not shell.get_output_embeddings()
    }
    kind = dtype if isinstance(dtype, torch.dtype) else torch.float32
    # A checkpoint is read on the host; on a device without data its weights are never made.
    place = PartialState().device
    device = place if place.type == "virtual" else torch.device("cpu")
    return {
        path: _RandomWeight(weight.shape, kind, std, device)
        for path, weight in shell.state_dict().items()
        if path in linear
    }


_FINDERS = (AutoModelForCausalLM, AutoModelForSequenceClassification)
"""What finds a model's class instead of being one."""


def on_meta(
    config: PretrainedConfig, *, trust_remote_code: bool, scores: bool = False
) -> PreTrainedModel:
    """Return the model without any memory behind its parameters: shapes only.

    Args:
        config: Of the model.
        trust_remote_code: Whether code of its repository may run.
        scores: As for :func:`with_random_weights`.
    """
    found = AutoModelForSequenceClassification if scores else architecture(config)
    with torch.device("meta"):
        if found in _FINDERS:
            return found.from_config(config, trust_remote_code=trust_remote_code)
        return found(config)
