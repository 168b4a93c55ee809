"""Tokenising an SFT data set once, by TRL itself, and describing its lengths."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from autotune.errors import UsageError
from autotune.trainers import preparing
from autotune.trainers.columns import TAKES, require
from autotune.trainers.sft_checks import IGNORED, check_ids, check_rows, odd_roles

_FORMATS = (
    ("input_ids", ("input_ids",), "pre-tokenised"),
    ("messages", ("messages",), "messages"),
    ("conversations", ("conversations",), "conversations"),
    ("prompt", ("prompt", "completion"), "prompt-completion"),
)


def prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Tokenise the data that ``request["config"]`` names and write the rows to a folder.

    Args:
        request: ``config`` (TRL keys), ``folder`` (takes the rows in ``data/``), ``max_lengths``
            (lengths to tabulate beyond the useful ones), ``trust_remote_code``; ``assume``
            (``length`` and ``count``) for rows that are made up, whatever data it names.

    Returns:
        ``model`` and ``data``: facts and profile as plain JSON; ``data_folder``.

    Raises:
        UsageError: If no row can be trained on.
    """
    opened = preparing.open_request(SFTConfig, request)
    folder, tokenizer, training_args = (
        Path(request["folder"]),
        opened.tokenizer,
        opened.training_args,
    )
    kind, num_empty, num_embeddings = "assumed", 0, 0
    roles: dict[str, int] = {}
    if request.get("assume") is not None:
        rows = _made_up(opened.facts.vocab_size, **request["assume"])
    else:
        raw = preparing.open_rows(opened, request)
        kind = _format(raw, training_args.dataset_text_field)
        _check_chat_template(raw, tokenizer, kind, opened.model_args.model_name_or_path)
        check_rows(raw, kind, training_args.dataset_text_field)
        roles = odd_roles(raw, kind)
        rows, num_empty, num_embeddings = _tokenise(raw, tokenizer, training_args, folder)
    check_ids(
        rows,
        vocab_size=max(opened.facts.vocab_size, num_embeddings),
        pad_token_id=tokenizer.pad_token_id,
        tokenised=kind == "pre-tokenised",
    )
    if not any(label != IGNORED for labels in rows["labels"] for label in labels):
        raise UsageError(
            "no token of the data set carries loss: every label is masked.",
            hint="Check completion_only_loss, assistant_only_loss and the labels column.",
        )
    lengths = [len(row) for row in rows["input_ids"]]
    profile = preparing.profile_of(
        _described(rows),
        lengths,
        extra_lengths=request.get("max_lengths", ()),
        positions=opened.facts.max_positions,
        kind=kind,
        num_empty=num_empty,
        odd_roles=roles,
    )
    kept = rows.select_columns(["input_ids", "labels"]).add_column("num_tokens", lengths)
    return preparing.answer(opened, kept, profile, folder)


def _described(rows: Dataset) -> Iterator[preparing.Row]:
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        running = [0, *accumulate(int(label != IGNORED) for label in labels)]

        def kept(limit: int, running: list[int] = running) -> int:
            return running[min(limit, len(running) - 1)]

        yield preparing.Row(len(ids), kept, (ids, labels))


def _made_up(vocab_size: int, *, length: int, count: int) -> Dataset:
    """Return rows of one length in which every token carries loss."""
    row = [index % vocab_size for index in range(length)]
    return Dataset.from_dict({"input_ids": [row] * count, "labels": [row] * count})


def _format(raw: Dataset, text_field: str) -> str:
    columns = set(raw.column_names)
    for name, needed, kind in _FORMATS:
        if name in columns and columns.issuperset(needed):
            if kind != "prompt-completion":
                return kind
            is_chat = isinstance(raw[0]["prompt"], list)
            return "prompt-completion conversational" if is_chat else kind
    if text_field in columns:
        return "text"
    takes = [(text_field,) if needed == ("text",) else needed for needed in TAKES["sft"]]
    otherwise = "Rename one, or set dataset_text_field under `fixed:` in the space."
    require("sft", raw.column_names, takes, otherwise=otherwise)
    raise AssertionError("formats and columns differ")


def _check_chat_template(
    raw: Dataset, tokenizer: PreTrainedTokenizerBase, kind: str, model: str
) -> None:
    chats = kind in ("messages", "conversations", "prompt-completion conversational")
    if chats and tokenizer.chat_template is None:
        raise UsageError(
            f"the data holds conversations but the tokenizer of {model!r} has no chat template.",
            hint="Use the instruction-tuned model, or set chat_template_path under `fixed:` in "
            "the space.",
        )


def _tokenise(
    raw: Dataset, tokenizer: PreTrainedTokenizerBase, training_args: Any, folder: Path
) -> tuple[Dataset, int, int]:
    """Return the rows as ``SFTTrainer`` itself tokenises and labels them, and how many are empty.

    TRL prepares data while it builds a trainer, which needs a model; the smallest one does. Where
    TRL adds tokens to it (``chat_template_path``), their number with those is returned as well, 0
    otherwise.
    """
    raw, num_empty = _without_empty(raw, training_args.dataset_text_field)
    args = SFTConfig(
        output_dir=str(folder / "output"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_length=None,
        eos_token=training_args.eos_token,
        pad_token=training_args.pad_token,
        chat_template_path=training_args.chat_template_path,
        dataset_text_field=training_args.dataset_text_field,
        dataset_kwargs=training_args.dataset_kwargs,
        dataset_num_proc=training_args.dataset_num_proc or _num_processes(len(raw)),
        assistant_only_loss=training_args.assistant_only_loss,
        completion_only_loss=training_args.completion_only_loss,
    )
    num_known = len(tokenizer)
    model = preparing.smallest_model(num_known)
    try:
        trainer = SFTTrainer(model=model, args=args, train_dataset=raw, processing_class=tokenizer)
    except MemoryError:
        raise
    except Exception as error:
        raise preparing.explained(error) from error
    rows = trainer.train_dataset
    if not {"input_ids", "labels"}.issubset(rows.column_names):
        raise UsageError(
            "TRL does not tokenise this data set: its rows are of no format that SFT knows.",
            hint="Give a column `text`, `messages`, or `prompt` and `completion`.",
        )
    kept = [index for index, ids in enumerate(rows["input_ids"]) if len(ids) > 0]
    num_empty += len(rows) - len(kept)
    if not kept:
        raise UsageError(
            "no row of the data set holds a token.", hint="Check the text column's content."
        )
    rows = rows.select(kept) if len(kept) < len(rows) else rows
    num_embeddings = trainer.model.get_input_embeddings().num_embeddings
    return rows, num_empty, num_embeddings if num_embeddings > num_known else 0


def _without_empty(raw: Dataset, text_field: str) -> tuple[Dataset, int]:
    """Return the rows that TRL can train on, and how many are null or empty: it fails on those.

    An empty text is no failure: TRL makes it an end-of-text token.
    """
    names = ("input_ids", "messages", "conversations", "prompt", "completion", text_field)
    columns = [name for name in dict.fromkeys(names) if name in raw.column_names]
    columns = [name for name in columns if name != "prompt" or "completion" in columns]
    kept = list(range(len(raw)))
    has_content = not columns
    for name in columns:
        values = raw[name]
        has_content = has_content or (name != "prompt" and any(values))
        kept = [index for index in kept if values[index] or values[index] == ""]
    if has_content and len(kept) == len(raw):
        return raw, 0
    if not kept or not has_content:
        raise _nothing_to_train_on(raw, columns)
    return raw.select(kept), len(raw) - len(kept)


def _nothing_to_train_on(raw: Dataset, columns: Sequence[str]) -> UsageError:
    """Return the error for rows of which none has content in all of ``columns``."""
    empty = [name for name in columns if not any(raw[name])]
    if empty:
        return UsageError(
            f"every row of the data set is empty in {', '.join(empty)}.",
            hint="Check the file, or choose another split.",
        )
    has = [[name for name in columns if row[name]] for row in raw.select_columns(list(columns))]
    other = next(number for number, names in enumerate(has) if names != has[0])
    found = (
        f"row {number + 1} has {', '.join(has[number]) or 'nothing there'}"
        for number in (0, other)
    )
    return UsageError(
        f"no row of the data set has all of {', '.join(columns)}: {', '.join(found)}.",
        hint="Rows of one format alone can be trained on: put those of each into a file of their"
        " own.",
    )


def _num_processes(num_rows: int) -> int | None:
    return min(os.cpu_count() or 1, 8) if num_rows > 20_000 else None
