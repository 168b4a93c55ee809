"""Kahneman-Tversky optimisation: TRL's ``KTOTrainer``.

A row is one completion with a label. With the losses that estimate the KL term (``kto``), the
model also sees each prompt with another row's completion, in a forward pass of its own. Trained
tokens are those of the labelled sequences that are not padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from trl import KTOConfig, KTOTrainer
from trl.trainer import kto_trainer

from autotune.errors import UsageError
from autotune.probe.spec import ProbeSpec
from autotune.space.knobs.batching import KTO_LOSS, with_loss
from autotune.trainers import columns, detect, preparing, raw
from autotune.trainers.base import registry

OTHER_IDS = "KL_completion_ids"


class KtoAdapter(raw.RawRowsAdapter):
    """Builds ``KTOTrainer`` on raw rows, of which the lengths are known."""

    name: ClassVar[str] = "kto"
    batches_decide: ClassVar[bool] = True

    def config_class(self) -> type:
        """Return ``KTOConfig``."""
        return KTOConfig  # type: ignore[no-any-return]

    def make_trainer(self, **kwargs: Any) -> Any:
        """Return the ``KTOTrainer``."""
        with raw.unhashed(kto_trainer, kwargs["model"]):
            return KTOTrainer(**kwargs)

    def further_arguments(
        self, spec: ProbeSpec, training_args: Any, load: Callable[[], Any]
    ) -> dict[str, Any]:
        """Return the reference model where TRL would load one; it would load real weights."""
        needs_none = spec.config.get("use_peft") or training_args.precompute_ref_log_probs
        return {} if needs_none or spec.weights == "real" else {"ref_model": load()}

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenise the rows to know their lengths; keep them as they are, pairs taken apart.

        Raises:
            UsageError: If no row can be trained on.
        """
        opened = preparing.open_request(KTOConfig, request)
        folder = Path(request["folder"])
        rows = preparing.open_rows(opened, request)
        columns.require(self.name, rows.column_names)
        tokens = _tokenise(rows, opened, folder)
        lengths = {
            "prompt": [len(ids) for ids in tokens["prompt_ids"]],
            "completion": [len(ids) for ids in tokens["completion_ids"]],
        }
        longest = [sum(pair) for pair in zip(*lengths.values(), strict=True)]
        # TRL takes pairs apart; its own columns are what a probe may hand over again.
        apart = tokens.select_columns(["prompt", "completion", "label"])
        chat = isinstance(apart[0]["completion"], list)
        profile = preparing.profile_of(
            _described(tokens),
            longest,
            extra_lengths=request.get("max_lengths", ()),
            positions=opened.facts.max_positions,
            kind="unpaired preference, conversational" if chat else "unpaired preference",
            columns=lengths,
        )

        def make(args: Any, few: Dataset) -> Any:
            return _small_trainer(detect.small_model, args, few, opened.tokenizer)

        few = apart.select(range(min(2, len(apart))))
        refusals = {"checkpointing": raw.checkpointing(_pairwise, make, few)}
        reason = _why_not_one(make, few)
        if reason is not None:
            refusals[with_loss(KTO_LOSS)] = {"1": reason}
        kept = raw.measured(apart, [[length] for length in longest], lengths["prompt"])
        return preparing.answer(opened, kept, profile, folder, refusals=refusals)

    def is_kept(self, num_tokens: int, num_prompt: int, training_args: Any) -> bool:
        """Whether TRL trains on a row: it drops those whose prompt alone fills max_length."""
        limit = training_args.max_length
        return limit is None or num_prompt < limit

    def row_lengths(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each row's longer sequence, as the collator cuts it."""
        limit = training_args.max_length
        completions = [len(ids) for ids in dataset["completion_ids"]]
        if OTHER_IDS in dataset.column_names:
            completions = [
                max(own, len(ids))
                for own, ids in zip(completions, dataset[OTHER_IDS], strict=True)
            ]
        return [
            raw.cut(len(prompt) + completion, limit)
            for prompt, completion in zip(dataset["prompt_ids"], completions, strict=True)
        ]

    def row_tokens(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each labelled sequence, as the collator cuts it."""
        return [
            raw.cut(len(prompt) + len(completion), training_args.max_length)
            for prompt, completion in zip(
                dataset["prompt_ids"], dataset["completion_ids"], strict=True
            )
        ]

    def count(self, rows: Sequence[Any], batch: Any) -> Mapping[str, int]:
        """Return a batch's counts. Shapes: (B, L), and (B, L') with others' completions."""
        positions = batch["input_ids"].numel()
        if "KL_input_ids" in batch:
            positions += batch["KL_input_ids"].numel()
        return {
            "num_tokens": int(batch["attention_mask"].sum()),
            "num_positions": positions,
            "num_loss_tokens": int(batch["completion_mask"][..., 1:].sum()),
        }


def _pairwise(**kwargs: Any) -> Any:
    """Return a ``KTOConfig`` with the smallest batch that its loss allows."""
    return KTOConfig(**{**kwargs, "per_device_train_batch_size": 2})


def _why_not_one(make: Callable[[Any, Dataset], Any], rows: Dataset) -> str | None:
    """Return why a micro-batch of one row cannot be trained by TRL's default loss."""
    args = {**detect.TWO_STEPS, "output_dir": "kto", "per_device_train_batch_size": 1}
    try:
        make(KTOConfig(**args), rows)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  TRL may raise anything
        return preparing.one_line(error)
    return None


def _small_trainer(model: Callable[[int], Any], args: Any, rows: Dataset, tokenizer: Any) -> Any:
    return KTOTrainer(
        model=model(len(tokenizer)),
        ref_model=model(len(tokenizer)),
        args=args,
        train_dataset=rows,
        processing_class=tokenizer,
    )


def _tokenise(rows: Dataset, opened: preparing.Opened, folder: Path) -> Dataset:
    """Return the rows as ``KTOTrainer`` itself tokenises them."""
    args = KTOConfig(
        output_dir=str(folder / "output"),
        max_length=None,
        per_device_train_batch_size=2,
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
    if not any(map(len, found["completion_ids"])):
        raise UsageError(
            "no row of the data set has a completion that holds a token.",
            hint="Check the column 'completion'.",
        )
    return found


def _described(tokens: Dataset) -> Iterator[preparing.Row]:
    for prompt, completion in zip(tokens["prompt_ids"], tokens["completion_ids"], strict=True):
        start, end = len(prompt), len(prompt) + len(completion)

        def kept(limit: int, start: int = start, end: int = end) -> int:
            return max(min(limit, end) - start, 0)

        yield preparing.Row(end, kept, (prompt, completion))


registry.register("kto", KtoAdapter)
