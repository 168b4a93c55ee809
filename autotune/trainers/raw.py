"""Trainers that tokenise their rows themselves in every probe: rows go in as they are.

Preparing measures all rows once, with TRL's own tokenising; a probe hands over only those that its
steps take, the longest among them.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset

from autotune.probe.spec import ProbeSpec
from autotune.trainers import detect
from autotune.trainers.hf import HfAdapter, Sample, accumulation, prepared_rows
from autotune.trainers.schedule import num_steps, subset

LENGTHS, NUM_PROMPT = "autotune_lengths", "autotune_num_prompt"
"""Columns that preparing adds: tokens of each sequence of a row, and of its prompt."""

ROWS_KEPT = 200
"""Typical rows that a probe is given beyond those it uses up, so that the longest are rare."""

PRECOMPUTED_ROWS_KEPT = 16
"""The same where the reference model runs on all rows that the trainer is given, before it trains:
each would cost a forward pass."""


def measured(rows: Dataset, sequences: Sequence[Sequence[int]], prompts: Sequence[int]) -> Dataset:
    """Return ``rows`` with what is known of their lengths. Shapes: (N, S), (N,)."""
    return rows.add_column(LENGTHS, [list(row) for row in sequences]).add_column(
        NUM_PROMPT, list(prompts)
    )


@contextlib.contextmanager
def unhashed(module: Any, model: Any) -> Iterator[None]:
    """Let a trainer's module not hash the weights of ``model``, if it is one and not a name.

    trl 1.16 names the file that keeps precomputed log-probabilities after a hash of all weights
    (``hash_module`` in its trainer/utils.py), which takes a minute and more of each probe with
    large ones. A model that was loaded already has random weights, which are never the same again.
    """
    usual = getattr(module, "hash_module", None)
    if usual is None or isinstance(model, str):
        yield
        return
    module.hash_module = lambda hashed: uuid.uuid4().hex
    try:
        yield
    finally:
        module.hash_module = usual


class RawRowsAdapter(HfAdapter):
    """Base of adapters whose trainer takes raw rows."""

    @abstractmethod
    def is_kept(self, num_tokens: int, num_prompt: int, training_args: Any) -> bool:
        """Whether the trainer trains on a row of such lengths, or drops it."""
        ...

    def load_rows(self, spec: ProbeSpec, training_args: Any) -> Sample:
        """Return enough rows for the probe.

        Raises:
            ValueError: If the trainer drops all rows.
        """
        rows = prepared_rows(spec)
        sequences = rows[LENGTHS]
        limit = training_args.max_length
        usable = [
            number
            for number, (lengths, prompt) in enumerate(
                zip(sequences, rows[NUM_PROMPT], strict=True)
            )
            if self.is_kept(max(lengths), prompt, training_args)
        ]
        if not usable:
            raise ValueError(f"{self.name} trains on no row at max_length={limit}")
        batch_size = training_args.per_device_train_batch_size
        steps = num_steps(spec.warmup_steps + spec.measured_steps, spec.first_worst_steps)
        chosen = subset(
            [max(sequences[number]) for number in usable],
            num_needed=batch_size * spec.processes * accumulation(spec) * steps,
            num_longest=2 * batch_size,
            seed=spec.seed,
            at_least=PRECOMPUTED_ROWS_KEPT
            if getattr(training_args, "precompute_ref_log_probs", False)
            else ROWS_KEPT,
        )
        found = rows.select([usable[number] for number in chosen])

        def tokens(numbers: Iterable[int]) -> int:
            return sum(cut(length, limit) for number in numbers for length in sequences[number])

        return Sample(
            rows=found.remove_columns([LENGTHS, NUM_PROMPT]),
            rows_ratio=len(usable) / len(chosen),
            tokens_ratio=tokens(usable) / tokens(usable[number] for number in chosen),
        )


def cut(length: int, limit: int | None) -> int:
    """Return the tokens that are left of a sequence at a ``max_length``."""
    return length if limit is None else min(length, limit)


def checkpointing(config_class: Any, make_trainer: Any, rows: Dataset) -> dict[str, str]:
    """Return which ways of checkpointing the installed trainer refuses or ignores.

    Args:
        config_class: TRL's.
        make_trainer: Returns the trainer for its arguments and rows.
        rows: A row or more, which is taken twice.
    """

    def train(keys: Mapping[str, Any]) -> None:
        args = config_class(**detect.TWO_STEPS, **keys)
        size = args.per_device_train_batch_size
        make_trainer(args, rows.select([0] * (2 * size))).train()

    values = ("full_reentrant", "selective", "every_2_layers")
    return detect.spread(detect.checkpointing_refusals(train, values))
