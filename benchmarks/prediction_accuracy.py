"""Predicted peak memory and rate beside published measurements on an A100.

    python benchmarks/prediction_accuracy.py [--rows ID ...]

Every single-card row of benchmarks/data/published_memory.csv (its columns name the source) is run
virtually: the real transformers Trainer, PEFT and bitsandbytes on the pretend card, with the loss
that the row names, since those runs used a TRL of 2024, whose loss kept the full logits. No
constant is fitted to a row.

What a row is used for:

- stock rows (no third-party kernels): peak memory, rate, and whether it fits;
- rows with fused kernels for the norms, the rotation or the loss: those kernels are not modelled
  here, so memory is compared only where they can't decide the peak (where that is reached in the
  optimizer's step), and a failed row must be predicted not to fit with the layers' stock
  kernels. The others are listed, and not counted.

The last line is one JSON object.
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
from autotune.probe.prediction import MEMORY_MARGIN
from autotune.trainers import models
from autotune.virtual import cards
from autotune.virtual.allocator import OutOfMemory
from autotune.virtual.replay import Replay
from autotune.virtual.summary import summarise
from autotune.virtual.trace import Trace

DATA = Path(__file__).with_name("data") / "published_memory.csv"
CARD = "a100-80gb"
NUM_STEPS = 3
GB = 1e9
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
        elif name.endswith(("lm_head", "embed_tokens")):
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


def predict(row: Mapping[str, str]) -> tuple[Trace, float]:
    """Train the row's configuration for a few steps; return its trace and tokens per second."""
    batch, length = int(row["batch_size"]), int(row["seq_len"])
    with virtual.accelerator(CARD) as trace, tempfile.TemporaryDirectory() as folder:
        model = build(row)
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_steps=NUM_STEPS,
            bf16="bf16=True" in row["compute_dtype"],
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
        loaded_s = seconds(trace)
        trainer.train()
        step_s = (seconds(trace) - loaded_s) / NUM_STEPS
        del trainer, model
    gc.collect()
    return trace, batch * length / step_s


def seconds(trace: Trace) -> float:
    """Return the predicted time of what has run so far."""
    return sum(cost.seconds for cost in trace.costs.values())


def fits(trace: Trace) -> bool:
    """Return whether the card's allocator can serve the run, with the margin of a search."""
    card = cards.find(CARD)
    limit = int(card.memory_bytes * (1 - MEMORY_MARGIN)) - card.context_bytes
    replay = Replay(trace, limit_bytes=limit)
    try:
        replay.advance()
    except OutOfMemory:
        return False
    return True


def rows(chosen: list[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of the table, all or those named."""
    with DATA.open(newline="") as file:
        for row in csv.DictReader(file):
            if not chosen or row["id"] in chosen:
                yield row


def is_stock(row: Mapping[str, str]) -> bool:
    """Return whether no third-party kernel took part."""
    return "foak" not in row["notes"]


def ranks(values: list[float]) -> list[float]:
    """Return each value's rank; equal values share the mean of theirs."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def main() -> None:
    """Predict every row, print it beside what was measured, end with one line of JSON."""
    parser = argparse.ArgumentParser(description="Predictions beside published measurements.")
    parser.add_argument("--rows", nargs="*", default=[])
    errors: list[float] = []
    rates: list[tuple[float, float]] = []
    num_stock = false_fits = false_ooms = 0
    for row in rows(parser.parse_args().rows):
        trace, rate = predict(row)
        replay = Replay(trace, limit_bytes=None)
        replay.advance()
        peak = replay.peak_allocated_bytes
        failed = not row["peak_bytes"]
        # The optimizer's step has no fused kernel in it.
        decided = is_stock(row) or summarise(trace)["peak_event"]["phase"] == "optimizer"
        fit = fits(trace)
        text = f"{row['id']:14} {row['method']:5} batch {row['batch_size']:>2}: predicted "
        text += f"{peak / GB:7.3f} GB"
        if failed:
            false_fits += fit
            text += f", measured: out of memory; predicted to {'fit' if fit else 'run out'}"
        else:
            measured = int(row["peak_bytes"])
            error = 100 * (peak / measured - 1)
            text += f", measured {measured / GB:7.3f} GB, error {error:+6.2f} %"
            if not decided:
                text += " (fused kernels decide: not counted)"
            else:
                false_ooms += not fit
                num_stock += is_stock(row)
                errors.append(error)
            if is_stock(row):
                known = float(row["throughput"].split()[0])
                rates.append((rate, known))
                text += (
                    f"; {rate:,.0f} and {known:,.0f} tokens/s, {100 * (rate / known - 1):+.1f} %"
                )
        print(text, flush=True)
    figures = {
        "stock_rows": num_stock,
        "max_abs_error_pct": round(max(map(abs, errors), default=0.0), 3),
        "median_abs_error_pct": round(statistics.median(map(abs, errors or [0.0])), 3),
        "false_fits": false_fits,
        "false_ooms": false_ooms,
        "rate_median_abs_error_pct": round(
            statistics.median(100 * abs(p / m - 1) for p, m in rates or [(1.0, 1.0)]), 1
        ),
        "rate_rank_correlation": round(
            statistics.correlation(ranks([p for p, _ in rates]), ranks([m for _, m in rates])), 3
        )
        if len(rates) > 1
        else None,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
