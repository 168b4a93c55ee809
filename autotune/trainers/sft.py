"""Supervised fine-tuning: TRL's ``SFTTrainer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from autotune.probe.spec import ProbeSpec
from autotune.trainers.base import registry
from autotune.trainers.hf import HfAdapter, Sample, accumulation, prepared_rows
from autotune.trainers.schedule import num_steps, subset
from autotune.trainers.sft_checks import IGNORED

SPLITTING = ("bfd_split", "wrapped")
"""TRL's packing strategies that cut rows without leaving anything out."""


class SftAdapter(HfAdapter):
    """Builds ``SFTTrainer`` on rows that were tokenised once, by TRL itself."""

    name: ClassVar[str] = "sft"
    batches_decide: ClassVar[bool] = True

    def config_class(self) -> type:
        """Return ``SFTConfig``."""
        return SFTConfig  # type: ignore[no-any-return]

    def make_trainer(self, **kwargs: Any) -> Any:
        """Return the ``SFTTrainer``."""
        return SFTTrainer(**kwargs)

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenise the data set and return its profile and the model's facts."""
        from autotune.trainers.sft_data import prepare

        return prepare(request)

    def load_rows(self, spec: ProbeSpec, training_args: Any) -> Sample:
        """Return enough of the tokenised rows for the probe."""
        rows = prepared_rows(spec)
        lengths = rows["num_tokens"]
        batch_size = training_args.per_device_train_batch_size
        steps = num_steps(spec.warmup_steps + spec.measured_steps, spec.first_worst_steps)
        num_needed = batch_size * spec.processes * accumulation(spec) * steps
        if training_args.packing:
            mean = sum(lengths) / len(lengths)
            num_needed = int(num_needed * max(training_args.max_length / mean, 1.0) * 1.25)
        chosen = subset(lengths, num_needed=num_needed, num_longest=2 * batch_size, seed=spec.seed)
        num_rows = len(rows)
        if len(chosen) < num_rows:
            rows = rows.select(chosen)
        # Packing needs contiguous columns of its own.
        return Sample(
            rows=rows.select_columns(["input_ids", "labels"]),
            rows_ratio=num_rows / len(chosen),
            tokens_ratio=trained_tokens(lengths, training_args)
            / trained_tokens([lengths[row] for row in chosen], training_args),
        )

    def row_lengths(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens per processed row."""
        return [len(row) for row in dataset["input_ids"]]

    def count(self, rows: Sequence[Any], batch: Any) -> Mapping[str, int]:
        """Return a batch's counts; trained tokens are all that are not padding.

        Shapes: ``input_ids`` and ``labels`` are (B, L): B rows (1 if flattened), L padded tokens.
        """
        return {
            "num_tokens": sum(len(row["input_ids"]) for row in rows),
            "num_positions": batch["input_ids"].numel(),
            "num_loss_tokens": int((batch["labels"][..., 1:] != IGNORED).sum()),
        }


def trained_tokens(lengths: Sequence[int], training_args: Any) -> int:
    """Return the tokens that are left of rows of these lengths as TRL cuts them."""
    limit = training_args.max_length
    # What splits rows goes on with the rest of them in another one.
    keeps_all = training_args.packing and training_args.packing_strategy in SPLITTING
    if limit is None or keeps_all:
        return sum(lengths)
    return sum(min(length, limit) for length in lengths)


registry.register("sft", SftAdapter)
