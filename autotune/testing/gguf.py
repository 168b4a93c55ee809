"""A worker task that unpacks a real model from a GGUF file, for tests that need real weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def unpack(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``request["file"]`` to ``request["folder"]`` as a plain checkpoint with tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, folder = Path(request["file"]), Path(request["folder"])
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # The weights are plain tensors by now, but a model that says it was quantised is not saved.
    config = copy.deepcopy(model.config)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"model": str(folder)}
