"""What preparing data has in common for all trainers: opening, checking, describing, keeping.

A trainer's own file says which columns it takes, how TRL tokenises them, and which tokens of a row
carry loss at a given ``max_length``.
"""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from trl import ScriptArguments

from autotune.errors import UnknownNameError, UsageError
from autotune.space.context import DataProfile, ModelFacts
from autotune.space.lengths import useful_lengths
from autotune.trainers.facts import model_facts
from autotune.trainers.hf import parse
from autotune.trainers.loading import check_weights, open_dataset, open_model

ON_HOST = {"use_cpu": True, "bf16": False, "fp16": False, "tf32": None, "report_to": "none"}
"""Tokenising needs no accelerator, whatever the search runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a request to prepare names, opened.

    Attributes:
        script_args: TRL's, which name the data set.
        training_args: Of the trainer's own class.
        model_args: TRL's, which name the model.
        dataset_args: TRL's, for mixtures.
        tokenizer: The model's.
        facts: What the model's configuration says.
    """

    script_args: Any
    training_args: Any
    model_args: Any
    dataset_args: Any
    tokenizer: PreTrainedTokenizerBase
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one row of the data.

    Attributes:
        num_tokens: Of all its sequences.
        kept: Tokens with loss that are left at a ``max_length``; none where TRL drops the row.
        key: All that its tokens are, for the data's fingerprint.
    """

    num_tokens: int
    kept: Callable[[int], int]
    key: object


def open_request(
    config_class: type, request: Mapping[str, Any], *, script_class: type = ScriptArguments
) -> Opened:
    """Return what ``request`` names: parsed as TRL parses it, model and tokenizer opened.

    Raises:
        UsageError: If TRL refuses the configuration, or the model cannot be trained.
        PrerequisiteError: If there is no such model.
    """
    disable_progress_bars()
    folder = Path(request["folder"])
    mapping = {**request["config"], "output_dir": str(folder / "output"), **ON_HOST}
    try:
        script_args, training_args, model_args, dataset_args = parse(
            config_class, mapping, folder, script_class
        )
    except UnknownNameError:
        raise
    except ValueError as error:
        raise UsageError(
            f"TRL refuses the configuration: {error}.", hint="Look at `fixed:` in the space."
        ) from error
    trust = bool(request.get("trust_remote_code"))
    config, tokenizer = open_model(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=trust,
    )
    check_weights(model_args.model_name_or_path, str(request.get("weights", "random")))
    return Opened(
        script_args=script_args,
        training_args=training_args,
        model_args=model_args,
        dataset_args=dataset_args,
        tokenizer=tokenizer,
        facts=model_facts(config, tokenizer, trust_remote_code=trust),
    )


def open_rows(opened: Opened, request: Mapping[str, Any]) -> Dataset:
    """Return the training split that a request names, as :func:`loading.open_dataset` does.

    Raises:
        UsageError: If the request asks to make rows up, which only whole sequences can be.
    """
    if request.get("assume") is not None:
        raise UsageError(
            f"rows cannot be made up for {request['trainer']}, whose rows have several parts.",
            hint="Leave out --assume-length, and name a data set in the file.",
        )
    return open_dataset(
        opened.script_args,
        opened.dataset_args,
        eval_strategy=opened.training_args.eval_strategy,
    )


def answer(
    opened: Opened, rows: Dataset, profile: DataProfile, folder: Path, **more: Any
) -> dict[str, Any]:
    """Write the rows that probes use to ``folder`` and return the prepare task's answer."""
    data_folder = folder / "data"
    rows.save_to_disk(str(data_folder))
    return {
        "model": opened.facts.to_dict(),
        "data": profile.to_dict(),
        "data_folder": str(data_folder),
        **more,
    }


def smallest_model(vocab_size: int) -> LlamaForCausalLM:
    """Return a model that does for what TRL only builds a trainer for: preparing data."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )


def explained(error: Exception) -> UsageError:
    """Return what TRL said of data that it cannot prepare; raise again what is no word on data."""
    if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
        raise error  # a full disk and the like, not the rows or a file that `fixed:` names
    return UsageError(
        f"TRL cannot prepare this data set: {one_line(error)}",
        hint="Look at the first rows and at the chat template: every row must have the same, "
        "non-empty fields, and the template must accept its roles.",
    )


def one_line(error: BaseException) -> str:
    """Return an error in one line; of a KeyError, the text is but the key."""
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__} {text}" if isinstance(error, LookupError) or not text else text


def profile_of(
    rows: Iterable[Row],
    lengths: Sequence[int],
    *,
    extra_lengths: Sequence[int],
    kind: str,
    positions: int | None = None,
    num_empty: int = 0,
    odd_roles: Mapping[str, int] | None = None,
    sequences_per_row: int = 1,
    columns: Mapping[str, Sequence[int]] | None = None,
) -> DataProfile:
    """Return the lengths of the data, with what each ``max_length`` would leave.

    Args:
        rows: As TRL tokenises them; gone through once.
        lengths: Tokens of each row's longest sequence. Shape (N,).
        extra_lengths: Lengths to tabulate beyond the useful ones.
        kind: Data format, for people.
        positions: Longest sequence that the model was made for; None if it does not say.
        num_empty: Rows without a token, dropped before.
        odd_roles: Roles that chat templates do not commonly know, to their number.
        sequences_per_row: Sequences that the model sees per row: 2 for pairs.
        columns: Column to the tokens of each row in it. Shape (N,) each.
    """
    longest = max(lengths)
    extra = {int(length) for length in extra_lengths}
    if positions is not None and positions < longest:
        extra.add(positions)  # offered in place of what is beyond it, and may be any number
    max_lengths = sorted({*useful_lengths(longest), *extra, longest})
    kept = [0] * len(max_lengths)
    dropped = [0] * len(max_lengths)
    num_tokens = 0
    digest = hashlib.sha256()
    for row in rows:
        num_tokens += row.num_tokens
        digest.update(repr(row.key).encode())
        for index, limit in enumerate(max_lengths):
            share = row.kept(limit)
            kept[index] += share
            dropped[index] += share == 0
    return DataProfile(
        num_rows=len(lengths),
        num_tokens=num_tokens,
        num_loss_tokens=kept[-1] if max_lengths[-1] >= longest else 0,
        length_counts=dict(sorted(Counter(lengths).items())),
        max_lengths=tuple(max_lengths),
        loss_tokens_kept=tuple(kept),
        rows_cut=tuple(sum(length > limit for length in lengths) for limit in max_lengths),
        rows_dropped=tuple(dropped),
        format=kind,
        fingerprint=digest.hexdigest()[:16],
        num_empty_rows=num_empty,
        odd_roles=odd_roles or {},
        sequences_per_row=sequences_per_row,
        column_counts={
            name: dict(sorted(Counter(tokens).items())) for name, tokens in (columns or {}).items()
        },
    )
