"""Trainers whose rows are prompts, which the model completes before it is trained on them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from autotune.devices.base import MicroBatches
from autotune.trainers import columns, detect, preparing, raw, rewards
from autotune.trainers.hf import HfAdapter
from autotune.virtual.errors import NotVirtual


class PromptsAdapter(HfAdapter):
    """Base of adapters whose trainer generates.

    A subclass says how long completions are, and which tokens of them are trained on.

    Attributes:
        small_keys: TRL keys of what is tried on the smallest of models.
    """

    batches_decide: ClassVar[bool] = True
    small_keys: ClassVar[Mapping[str, Any]]
    _tokenizer: PreTrainedTokenizerBase

    @abstractmethod
    def config_class(self) -> Any:
        """Return TRL's configuration class."""
        ...

    @abstractmethod
    def completion_length(self, training_args: Any) -> int:
        """Return the tokens of the longest completion."""
        ...

    @abstractmethod
    def tokenise(
        self, prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, training_args: Any
    ) -> Sequence[Sequence[int]]:
        """Return the prompts' tokens as the trainer makes them."""
        ...

    @abstractmethod
    def small_arguments(self, args: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return further arguments of a trainer that is tried on the smallest of models."""
        ...

    def row_lengths(self, dataset: Dataset, training_args: Any) -> list[int]:
        """Return the tokens of each prompt, whole, with a completion of full length."""
        ids = self.tokenise(dataset["prompt"], self._tokenizer, training_args)
        return [len(row) + self.completion_length(training_args) for row in ids]

    def completions_per_prompt(self) -> int:
        """Return the completions of a prompt that a row of the profile stands for."""
        return 1

    def check(self, request: Mapping[str, Any]) -> None:
        """Check what the trainer needs beside model and data: rewards.

        Raises:
            UsageError: If it is not there.
        """
        trust = bool(request.get("trust_remote_code"))
        rewards.check(request["config"], self.name, trust_remote_code=trust)

    def prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenise the prompts to know their lengths; keep the rows as they are.

        Raises:
            UsageError: If no row can be generated from, or :meth:`check` misses something.
        """
        opened = preparing.open_request(
            self.config_class(), request, script_class=self.script_class()
        )
        folder = Path(request["folder"])
        self.check(request)
        rows = preparing.open_rows(opened, request)
        columns.require(self.name, rows.column_names)
        try:
            ids = self.tokenise(rows["prompt"], opened.tokenizer, opened.training_args)
        except Exception as error:
            raise preparing.explained(error) from error
        most = self.completion_length(opened.training_args)
        trained = self.completions_per_prompt() * most
        lengths = [len(row) for row in ids]
        chat = isinstance(rows[0]["prompt"], list)
        profile = preparing.profile_of(
            (
                # Completions are never cut, whatever max_length is.
                preparing.Row(length + most, lambda limit: trained, row)
                for length, row in zip(lengths, ids, strict=True)
            ),
            [length + most for length in lengths],
            extra_lengths=request.get("max_lengths", ()),
            kind="prompts, conversational" if chat else "prompts",
            columns={"prompt": lengths},
        )
        refused = raw.checkpointing(
            lambda **keys: self.config_class()(**{**keys, **self.small_keys}),
            lambda args, few: self.make_trainer(
                model=detect.small_model(len(opened.tokenizer)),
                args=args,
                train_dataset=few,
                processing_class=opened.tokenizer,
                **self.small_arguments(args, opened.tokenizer),
            ),
            rows,
        )
        kept = raw.measured(rows, [[length] for length in lengths], lengths)
        return preparing.answer(opened, kept, profile, folder, refusals={"checkpointing": refused})


def generate_less(trainer: Any, repeats: MicroBatches) -> None:
    """Let a prediction not run each step of the generations of ``trainer``.

    What keeps completions from ending early is left out where none would: it makes tables of the
    whole vocabulary at each token, which the user's run does not. A virtual card always draws the
    token in the middle of the vocabulary.

    Raises:
        NotVirtual: If what is generated would hang on values.
    """
    repeats.generate_less(trainer.model)
    config = getattr(trainer, "generation_config", None)
    if config is None:  # an engine of its own generates
        return
    if (config.num_beams or 1) > 1:
        raise NotVirtual("beam search", "which beams go on depends on values")
    ends = config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if trainer.model.config.get_text_config().vocab_size // 2 not in ends:
        config.min_new_tokens = None
