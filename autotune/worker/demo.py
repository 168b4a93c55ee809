"""The embedded default: a small chat data set with a long tail, and a tiny model for it.

Both are made here, from a seed, so that the demo needs no network. The text is nonsense with the
statistics that matter to a memory search: conversations of one to many turns whose token lengths
follow a log-normal law, as chat data sets do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NUM_ROWS = 600
NUM_PREFERENCES = 200
SEED = 7

_SUBJECTS = ("the model", "a tokenizer", "the optimizer", "our cluster", "this layer", "the data")
_VERBS = ("keeps", "shards", "rounds", "packs", "offloads", "recomputes", "pads", "quantises")
_OBJECTS = (
    "the activations",
    "every gradient",
    "two thirds of the tokens",
    "its states",
    "long conversations",
    "the last batch",
    "half of the memory",
)
_ENDINGS = ("overnight", "without a copy", "in bfloat16", "twice per step", "before the loss")
_QUESTIONS = ("How is it that", "Can you explain why", "Is it true that", "What happens when")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversations(num_rows: int = NUM_ROWS, seed: int = SEED) -> list[dict[str, Any]]:
    """Return rows with a ``messages`` column; the same for the same seed."""
    draw = random.Random(seed)
    return [{"messages": _conversation(draw)} for _ in range(num_rows)]


def _conversation(draw: random.Random) -> list[dict[str, str]]:
    # Median of about 3 sentences; a row in a hundred holds more than 24.
    num_sentences = max(2, min(28, round(draw.lognormvariate(1.2, 0.9))))
    num_turns = max(1, min(6, num_sentences // 8))
    messages = []
    for _ in range(num_turns):
        messages.append({"role": "user", "content": f"{draw.choice(_QUESTIONS)} {_clause(draw)}?"})
        answer = [_sentence(draw) for _ in range(max(1, num_sentences // num_turns - 1))]
        messages.append({"role": "assistant", "content": " ".join(answer)})
    return messages


def _clause(draw: random.Random) -> str:
    parts = (draw.choice(_SUBJECTS), draw.choice(_VERBS), draw.choice(_OBJECTS))
    return f"{' '.join(parts)} {draw.choice(_ENDINGS)}"


def _sentence(draw: random.Random) -> str:
    text = f"{_clause(draw)}."
    return text[0].upper() + text[1:]


def preferences(num_rows: int = NUM_PREFERENCES, seed: int = SEED) -> list[dict[str, Any]]:
    """Return rows with ``prompt``, ``chosen`` and ``rejected``; the same for the same seed.

    The answers of a pair differ in length, as those of two models do.
    """
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        *prompt, chosen = _conversation(draw)
        rejected = {"role": "assistant", "content": _conversation(draw)[-1]["content"]}
        rows.append({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    return rows


def unpaired(num_rows: int = NUM_PREFERENCES, seed: int = SEED) -> list[dict[str, Any]]:
    """Return rows with ``prompt``, ``completion`` and ``label``: the pairs, taken apart."""
    rows = []
    for pair in preferences((num_rows + 1) // 2, seed):
        for part, label in (("chosen", True), ("rejected", False)):
            rows.append({"prompt": pair["prompt"], "completion": pair[part], "label": label})
    return rows[:num_rows]


def prompts(num_rows: int = NUM_PREFERENCES, seed: int = SEED) -> list[dict[str, Any]]:
    """Return rows with a ``prompt``; the same for the same seed."""
    return [{"prompt": row["prompt"]} for row in preferences(num_rows, seed)]


DATA: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "chat": conversations,
    "preference": preferences,
    "unpaired": unpaired,
    "prompts": prompts,
}
"""Kind of data to what makes its rows."""


def write_data(path: Path, kind: str = "chat") -> None:
    """Write rows of a kind as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in DATA[kind]()]
    path.write_text("\n".join(lines) + "\n")


def make(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write the demo's model and data set into ``request["folder"]``; keep what is there.

    Args:
        request: ``folder``; ``data``, a key of :data:`DATA`, ``chat`` if it is not there.

    Returns:
        ``model`` and ``dataset``: their paths.
    """
    folder = Path(request["folder"])
    kind = str(request.get("data", "chat"))
    data, model = folder / f"{kind}.jsonl", folder / "tiny-llama"
    if not data.exists():
        write_data(data, kind)
    if not (model / "model.safetensors").exists():
        _write_model(model)
    return {"model": str(model), "dataset": str(data)}


def _write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.train_from_iterator(
        (message["content"] for row in conversations() for message in row["messages"]),
        trainers.BpeTrainer(
            vocab_size=1024,
            special_tokens=specials,
            # Few merges, so that a sentence takes as many tokens as it does in a real model.
            max_token_length=4,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            # More rows than tokens, so that the embedding has a real model's share of the memory.
            vocab_size=4096,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            pad_token_id=fast.pad_token_id,
            bos_token_id=None,
            eos_token_id=fast.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
