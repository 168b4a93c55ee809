"""Predicted peak memory and rate beside published measurements on A100 cards.

    python benchmarks/prediction_accuracy.py [--rows ID ...]

Every row of benchmarks/data/published_memory.csv is run virtually with the real transformers
Trainer, PEFT and bitsandbytes, with the loss that the row names: those runs used a TRL of 2024,
whose loss kept the full logits. Rows that third-party fused kernels decide are left out of the
accuracy figures, and said to be. No constant is fitted to a row. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.nn.functional import cross_entropy
from transformers import BitsAndBytesConfig, MistralConfig, Trainer, TrainingArguments

from autotune import virtual
from autotune.trainers import models
from autotune.virtual.trace import Trace

DATA = Path(__file__).with_name("data") / "published_memory.csv"
CARD = "a100-80gb"
NUM_STEPS = 3
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def full_logits_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any
) -> torch.Tensor:
    """Return the causal loss as transformers 4.48 computed it: float32 logits, shifted by copy."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return cross_entropy(shifted, labels[..., 1:].contiguous().view(-1))


def build(row: Mapping[str, str]) -> torch.nn.Module:
    """Return the row's model, on the device."""
    config = MistralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        sliding_window=None,
        tie_word_embeddings=False,
    )
    quantization = None
    if row["method"] == "QLoRA":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    config.architectures = ["MistralForCausalLM"]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = models.with_random_weights(folder, {"dtype": "bfloat16"}, quantization)
    model.loss_function = full_logits_loss
    if row["method"] == "full":
        return model
    stock_prepare = "baseline-peft-bnb" in row["notes"]
    if stock_prepare:
        model = prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs={"use_reentrant": True}
        )
    model.enable_input_require_grads()
    lora = LoraConfig(
        r=16, lora_alpha=16, lora_dropout=0.1, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora)
    if stock_prepare:
        cast_as_trl(model)
    return model


def cast_as_trl(model: torch.nn.Module) -> None:
    """Cast modules as TRL 0.13's ``peft_module_casting_to_bf16`` does for a quantised base."""
    for name, module in model.named_modules():
        if "norm" in name:
            module.to(torch.float32)
        elif any(part in name for part in ("lm_head", "embed_tokens")) and hasattr(module, "weight"):
            module.to(torch.bfloat16)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Packed rows of one length; what they say does not matter."""

    def __init__(self, count: int, length: int) -> None:
        self._count, self._length = count, length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(self._length) % 31000
        return {"input_ids": ids, "labels": ids}


def predict(row: Mapping[str, str]) -> Trace:
    """Train the row's configuration for a few steps on the pretend card."""
    batch, length = int(row["batch_size"]), int(row["seq_len"])
    with virtual.accelerator(CARD) as trace, tempfile.TemporaryDirectory() as folder:
        model = build(row)
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_steps=NUM_STEPS,
            bf16="autocast" in row["compute_dtype"],
            optim="adamw_torch",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": True},
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=Rows(batch * NUM_STEPS, length))
        trainer.train()
        trace.after_bytes = trace.allocated_bytes
        del trainer, model
    gc.collect()
    return trace


def rows(chosen: list[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of the table, all or those named."""
    with DATA.open(newline="") as file:
        for row in csv.DictReader(file):
            if not chosen or row["id"] in chosen:
                yield row


def main() -> None:
    """Predict every row, print it beside what was measured, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=[])
    for row in rows(parser.parse_args().rows):
        trace = predict(row)
        measured = int(row["peak_bytes"] or 0)
        error = 100 * (trace.peak_bytes / measured - 1) if measured else float("nan")
        sec = sum(c.seconds for c in trace.costs.values()) / NUM_STEPS
        rate = int(row["batch_size"]) * int(row["seq_len"]) / sec
        print({k: (round(c.seconds/NUM_STEPS,2), c.num_ops//NUM_STEPS, round(c.flops/NUM_STEPS/1e12)) for k, c in trace.costs.items()}, f"{rate:.0f}", row["throughput"])
        print(row["id"], row["method"], row["batch_size"], f"{trace.peak_bytes:,} {measured:,} {error:+.2f} %  after {trace.after_bytes:,}", row["other_memory"][:40], flush=True)


if __name__ == "__main__":
    main()
