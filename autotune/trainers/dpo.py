"""Direct preference optimisation: TRL's ``DPOTrainer``.

A row is a pair: the model sees the prompt with the chosen and with the rejected completion, both
padded to the longest of the batch, so that a micro-batch of B rows is 2 B sequences. Trained
tokens are those of both sequences that are not padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer

from autotune.errors import UsageError
from autotune.probe.spec import ProbeSpec
from autotune.trainers import columns, detect, preparing, raw
from autotune.trainers.base import registry

PARTS = ("prompt", "chosen", "rejected")


class DpoAdapter(raw.RawRowsAdapter):
    """Builds ``DPOTrainer`` on raw pairs, of which the lengths are known."""

    name: ClassVar[str] = "dpo"
    batches_decide: ClassVar[bool] = True

    def config_class(self) -> type:
        """Return ``DPOConfig``."""
        return DPOConfig  # type: ignore[no-any-return]

    def make_trainer(self, **kwargs: Any) -> Any:
        """Return the ``DPOTrainer``."""
        with raw.unhashed(dpo_trainer, kwargs["model"]):
            return DPOTrainer(**kwargs)

    def further_arguments(
        self, spec: ProbeSpec, training_args: Any, load: Callable[[], Any]
    ) -> dict[str, Any]:
        """Return the reference model where TRL would load one; it would load real weights."""
        needs_none = spec.config.get("use_peft") or training_args.precompute_ref_log_probs
        return {} if needs_none or spec.weights == "real" else {"ref_model": load()}

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenise the pairs to know their lengths; keep the pairs as they are.

        Raises:
            UsageError: If no row can be trained on.
        """
        opened = preparing.open_request(DPOConfig, request)
        folder = Path(request["folder"])
        rows = preparing.open_rows(opened, request)
        columns.require(self.name, rows.column_names)
        tokens = _tokenise(rows, opened, folder)
        lengths = {part: [len(ids) for ids in tokens[f"{part}_ids"]] for part in PARTS}
        sequences = list(_sequences(tokens))
        longest = [max(pair) for pair in sequences]
        chat = isinstance(rows[0]["chosen"], list)
        profile = preparing.profile_of(
            _described(tokens),
            longest,
            extra_lengths=request.get("max_lengths", ()),
            positions=opened.facts.max_positions,
            kind="preference, conversational" if chat else "preference",
            sequences_per_row=2,
            columns=lengths,
        )

        def make(args: Any, few: Dataset) -> Any:
            return _small_trainer(detect.small_model, args, few, opened.tokenizer)

        refused = raw.checkpointing(DPOConfig, make, rows)
        kept = raw.measured(rows, sequences, lengths["prompt"])
        return preparing.answer(opened, kept, profile, folder, refusals={"checkpointing": refused})

    def is_kept(self, num_tokens: int, num_prompt: int, training_args: Any) -> bool:
        """Whether TRL trains on a pair: it drops those whose prompt alone fills max_length."""
        limit = training_args.max_length
        return limit is None or training_args.truncation_mode != "keep_start" or num_prompt < limit

    def row_lengths(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each pair's longer sequence, as the collator cuts it."""
        return [raw.cut(max(pair), training_args.max_length) for pair in _sequences(dataset)]

    def row_tokens(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of both sequences of each pair, as the collator cuts them."""
        limit = training_args.max_length
        return [sum(raw.cut(length, limit) for length in pair) for pair in _sequences(dataset)]

    def count(self, rows: Sequence[Any], batch: Any) -> Mapping[str, int]:
        """Return a batch's counts. Shapes: (2 B, L), the chosen sequences first."""
        return {
            "num_tokens": int(batch["attention_mask"].sum()),
            "num_positions": batch["input_ids"].numel(),
            "num_loss_tokens": int(batch["completion_mask"][..., 1:].sum()),
        }


def _small_trainer(model: Callable[[int], Any], args: Any, rows: Dataset, tokenizer: Any) -> Any:
    return DPOTrainer(
        model=model(len(tokenizer)),
        ref_model=model(len(tokenizer)),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
    )


def _tokenise(rows: Dataset, opened: preparing.Opened, folder: Path) -> Dataset:
    """Return the pairs as ``DPOTrainer`` itself tokenises them."""
    args = DPOConfig(
        output_dir=str(folder / "output"),
        max_length=None,
        dataset_num_proc=opened.training_args.dataset_num_proc,
        **preparing.ON_HOST,
    )
    try:
        trainer = _small_trainer(preparing.smallest_model, args, rows, opened.tokenizer)
    except MemoryError:
        raise
    except Exception as error:
        raise preparing.explained(error) from error
    found = trainer.train_dataset
    if not any(map(len, found["chosen_ids"])) and not any(map(len, found["rejected_ids"])):
        raise UsageError(
            "no pair of the data set has a completion that holds a token.",
            hint="Check the columns 'chosen' and 'rejected'.",
        )
    return found


def _sequences(tokens: Dataset) -> Iterator[tuple[int, int]]:
    """Yield the tokens of each pair's two sequences, the chosen one first."""
    for prompt, chosen, rejected in zip(*(tokens[f"{part}_ids"] for part in PARTS), strict=True):
        yield len(prompt) + len(chosen), len(prompt) + len(rejected)


def _described(tokens: Dataset) -> Iterator[preparing.Row]:
    parts = (tokens[f"{part}_ids"] for part in PARTS)
    for prompt, chosen, rejected in zip(*parts, strict=True):
        start = len(prompt)
        ends = (start + len(chosen), start + len(rejected))

        def kept(limit: int, start: int = start, ends: tuple[int, ...] = ends) -> int:
            return sum(max(min(limit, end) - start, 0) for end in ends)

        yield preparing.Row(sum(ends), kept, (prompt, chosen, rejected))


registry.register("dpo", DpoAdapter)
