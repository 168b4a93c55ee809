"""The model and the rows of predicted_vs_measured.py, made without a network."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_comparison import LONG

NUM_ROWS = 240
SEED = 0

MODELS: Mapping[str, Mapping[str, Any]] = {
    # The shape of meta-llama/Llama-3.2-1B, from its config.json on the Hugging Face Hub.
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    # For a look at whether everything runs.
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}


def make_model(folder: Path, source: Path, shape: Mapping[str, Any]) -> Path:
    """Write a model folder: the demo's tokenizer and a configuration, no weights."""
    ignored = shutil.ignore_patterns("*.safetensors", "generation_config.json")
    shutil.copytree(source, folder, ignore=ignored)
    tokens = json.loads((folder / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
        **{key: tokens.get(key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")},
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_rows(path: Path) -> Path:
    """Write tokenised rows: some of the full length, most shorter, as in chat data."""
    draw = random.Random(SEED)
    lengths = [LONG] * 24
    while len(lengths) < NUM_ROWS:
        lengths.append(max(32, min(LONG, round(draw.lognormvariate(6.3, 0.7)))))
    draw.shuffle(lengths)
    with path.open("w") as file:
        for length in lengths:
            ids = [draw.randrange(5, 1000) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return path
