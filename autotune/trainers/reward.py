"""Reward modelling: TRL's ``RewardTrainer``.

A row is a pair of whole sequences, chosen and rejected, padded to the longest of the batch, so
that a micro-batch of B rows is 2 B sequences. A pair with a sequence longer than ``max_length`` is
left out, not cut. Trained tokens are those of both sequences that are not padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from autotune.errors import UsageError
from autotune.trainers import columns, detect, models, preparing, raw
from autotune.trainers.base import registry

PARTS = ("chosen", "rejected")


class RewardAdapter(raw.RawRowsAdapter):
    """Builds ``RewardTrainer`` on raw pairs, of which the lengths are known."""

    name: ClassVar[str] = "reward"
    batches_decide: ClassVar[bool] = True

    def config_class(self) -> type:
        """Return ``RewardConfig``."""
        return RewardConfig  # type: ignore[no-any-return]

    def make_trainer(self, **kwargs: Any) -> Any:
        """Return the ``RewardTrainer``."""
        return RewardTrainer(**kwargs)

    def load_model(
        self, name: str, model_init_kwargs: Mapping[str, Any], quantization: object | None
    ) -> Any:
        """Return the model with a head that gives one score, as TRL loads it."""
        return models.with_random_weights(name, model_init_kwargs, quantization, scores=True)

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenise the pairs to know their lengths; keep the pairs as they are.

        Raises:
            UsageError: If no row can be trained on.
        """
        opened = preparing.open_request(RewardConfig, request)
        folder = Path(request["folder"])
        rows = preparing.open_rows(opened, request)
        columns.require(self.name, rows.column_names)
        tokens = _tokenise(rows, opened, folder)
        lengths = {part: [len(ids) for ids in tokens[f"{part}_ids"]] for part in PARTS}
        sequences = list(zip(*lengths.values(), strict=True))
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
            return _small_trainer(_small_scorer, args, few, opened.tokenizer)

        refused = raw.checkpointing(RewardConfig, make, rows)
        kept = raw.measured(rows, sequences, [0] * len(rows))
        return preparing.answer(opened, kept, profile, folder, refusals={"checkpointing": refused})

    def is_kept(self, num_tokens: int, num_prompt: int, training_args: Any) -> bool:
        """Whether TRL trains on a pair: it leaves out those that are longer than max_length."""
        limit = training_args.max_length
        return limit is None or num_tokens <= limit

    def row_lengths(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each pair's longer sequence."""
        pairs = zip(*(dataset[f"{part}_ids"] for part in PARTS), strict=True)
        return [max(map(len, pair)) for pair in pairs]

    def row_tokens(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of both sequences of each pair."""
        pairs = zip(*(dataset[f"{part}_ids"] for part in PARTS), strict=True)
        return [sum(map(len, pair)) for pair in pairs]

    def count(self, rows: Sequence[Any], batch: Any) -> Mapping[str, int]:
        """Return a batch's counts. Shapes: (2 B, L); each sequence's one score carries loss."""
        tokens = int(batch["attention_mask"].sum())
        return {
            "num_tokens": tokens,
            "num_positions": batch["input_ids"].numel(),
            "num_loss_tokens": tokens,
        }


def _small_scorer(vocab_size: int, layers: int = detect.NUM_LAYERS) -> Any:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_labels=1,
        attn_implementation="sdpa",
    )
    return LlamaForSequenceClassification(config)


def _small_trainer(model: Callable[[int], Any], args: Any, rows: Dataset, tokenizer: Any) -> Any:
    return RewardTrainer(
        model=model(len(tokenizer)), args=args, train_dataset=rows, processing_class=tokenizer
    )


def _tokenise(rows: Dataset, opened: preparing.Opened, folder: Path) -> Dataset:
    """Return the pairs as ``RewardTrainer`` itself tokenises them."""
    args = RewardConfig(
        output_dir=str(folder / "output"),
        max_length=None,
        dataset_num_proc=opened.training_args.dataset_num_proc,
        **preparing.ON_HOST,
    )
    try:
        trainer = _small_trainer(
            lambda size: _small_scorer(size, layers=1), args, rows, opened.tokenizer
        )
    except MemoryError:
        raise
    except Exception as error:
        raise preparing.explained(error) from error
    found = trainer.train_dataset
    if not any(map(len, found["chosen_ids"])) and not any(map(len, found["rejected_ids"])):
        raise UsageError(
            "no pair of the data set holds a token.",
            hint="Check the columns 'chosen' and 'rejected'.",
        )
    return found


def _described(tokens: Dataset) -> Iterator[preparing.Row]:
    for pair in zip(*(tokens[f"{part}_ids"] for part in PARTS), strict=True):
        lengths = tuple(len(ids) for ids in pair)

        def kept(limit: int, lengths: tuple[int, ...] = lengths) -> int:
            return sum(lengths) if max(lengths) <= limit else 0

        yield preparing.Row(sum(lengths), kept, pair)


registry.register("reward", RewardAdapter)
