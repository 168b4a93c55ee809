"""Rows, files and fixed keys that nothing can be trained with, and how they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_kit import (
    Broken,
    Case,
    Rows,
    copy_model,
    of_file,
    of_rows,
    of_split,
    refused,
    with_config,
    with_text,
    without,
    write_dict,
    write_folder,
    write_lines,
)
from datasets import Dataset

from autotune.errors import PrerequisiteError, UsageError
from autotune.executors.subprocess import SubprocessExecutor

pytestmark = pytest.mark.trl


def said(**message: Any) -> Rows:
    return [{"messages": [message]}]


ROWS: dict[str, tuple[Rows, str]] = {
    "unknown keys": (said(speaker="user", text="a"), "'speaker', 'text'"),
    "no role": (said(content="a"), "no 'role'"),
    "null role": (said(role=None, content="a"), "no 'role'"),
    "text elsewhere": (said(role="user", text="a"), "no 'content'"),
    "nothing said": (said(role="user"), "'content'"),
    "unknown keys later": (said(role="user", content="a") + said(speaker="b", text="c"), "row 2"),
    "text for messages": ([{"messages": "a"}], "is text"),
    "mapping for messages": ([{"messages": {"role": "user", "content": "a"}}], "a mapping"),
    "text for a message": ([{"messages": ["a", "b"]}], "text where a message"),
    "list for a message": ([{"messages": [[{"role": "user", "content": "a"}]]}], "a list where"),
    "number for messages": ([{"messages": 5}], "a whole number"),
    "role in conversations": ([{"conversations": [{"role": "user", "content": "a"}]}], "'from'"),
    "text in conversations": (
        [{"conversations": [{"from": "human", "text": "a"}]}], "no 'value'"
    ),
    "a label's -100 for an id": ([{"input_ids": [1, -100], "labels": [1, -100]}], "-100"),
    "number for text": ([{"text": 5}], "row 1"),
    "list for text": ([{"text": ["a"]}], "a list, not text"),
    "number for prompt": ([{"prompt": 5, "completion": "a"}], "'prompt'"),
    "text after a chat": (
        [{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}], "'completion'"
    ),
    "chat after text": (
        [{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}], "'completion'"
    ),
    "tools that are no JSON": (
        [{"messages": [{"role": "user", "content": "a"}], "tools": "none"}], "prepare"
    ),
    "text for ids": ([{"input_ids": "abc"}], "is text"),
    "fractions for ids": ([{"input_ids": [1.5, 2.5]}], "a fraction"),
    "null among ids": ([{"input_ids": [1, None, 3]}], "null"),
    "lists for ids": ([{"input_ids": [[1, 2]]}], "a list"),
    "negative ids": ([{"input_ids": [1, -2]}], "-2"),
    "ids beyond the model": ([{"input_ids": [1, 99_999]}], "99999"),
    "labels beyond the model": ([{"input_ids": [1, 2], "labels": [1, 99_999]}], "99999"),
    "no labels": ([{"input_ids": [1, 2], "labels": None}], "'labels'"),
    "few labels": ([{"input_ids": [1, 2], "labels": [1]}], "1 label."),
    "chats and texts": (
        [*said(role="user", content="a") * 2, {"text": "b"}],
        "row 1 has messages, row 3 has text",
    ),
    "pairs and texts": (
        [{"prompt": "a", "completion": "b"}, {"text": "c"}],
        "row 1 has prompt, completion, row 2 has text",
    ),
    "halves of pairs": (
        [{"prompt": "a"}, {"completion": "b"}], "row 1 has prompt, row 2 has completion"
    ),
    "a row of nothing": ([{"text": None}, {"text": None}], "empty in text"),
    "prompts alone": ([{"prompt": "a", "completion": ""}] * 2, "empty in completion"),
    "prompts and null": ([{"prompt": "a", "completion": None}] * 2, "empty in completion"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_no_format_are_named(
    case: str, executor: SubprocessExecutor, model: str, tmp_path: Path, work: Path
) -> None:
    rows, named = ROWS[case]
    refused(executor, work, of_rows(rows)(model, tmp_path, []), UsageError, named)


def test_messages_may_have_further_keys(prepare_rows: Callable[..., dict[str, Any]]) -> None:
    rows = said(role="user", content="a", weight=1) + said(role="assistant", content=None)
    rows += said(role="assistant", content=None, tool_calls=[{"name": "f"}])
    assert prepare_rows(rows)["data"]["num_rows"] == 3


def no_such_model(model: str, path: Path, chats: Rows) -> Case:
    return str(path / "nowhere"), write_lines(path, chats), {}


def no_special_tokens(model: str, path: Path, chats: Rows) -> Case:
    found = copy_model(model, path / "model", without=("special_tokens_map.json",))
    file = found / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in config.items() if not k.endswith("_token")}))
    return str(found), write_lines(path, chats), {}


def all_ids_empty(model: str, path: Path, chats: Rows) -> Case:
    data = Dataset.from_dict({"input_ids": [[], []], "labels": [[], []]})
    data.to_parquet(path / "rows.parquet")
    return model, path / "rows.parquet", {}


def damaged_lines(model: str, path: Path, chats: Rows) -> Case:
    file = write_lines(path, chats)
    file.write_text(file.read_text()[:-50])
    return model, file, {}


def no_file(model: str, path: Path, chats: Rows) -> Case:
    return model, path / "rows.jsonl", {}


def empty_folder(model: str, path: Path, chats: Rows) -> Case:
    (path / "folder").mkdir()
    return model, path / "folder", {}


BROKEN: dict[str, tuple[Broken, type[Exception], str]] = {
    "no_such_model": (no_such_model, PrerequisiteError, "no model folder"),
    "no_config": (without("config.json"), PrerequisiteError, "config.json"),
    "broken_config": (
        with_text("config.json", '{"model_type": '), PrerequisiteError, "config"
    ),
    "unknown_architecture": (
        with_text("config.json", '{"model_type": "of_next_year", "architectures": ["X"]}'),
        UsageError,
        "transformers",
    ),
    "no_architecture": (with_config(architectures=None), UsageError, "architecture"),
    "no_tokenizer": (
        without("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        PrerequisiteError,
        "holds no tokenizer",
    ),
    # transformers makes an empty tokenizer for some architectures, which then lacks a template.
    "no_tokenizer_at_all": (
        without(
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
        ),
        PrerequisiteError,
        "holds no tokenizer",
    ),
    "no_special_tokens": (no_special_tokens, UsageError, "eos token"),
    "no_chat_template": (without("chat_template.jinja"), UsageError, "chat template"),
    "no_column": (of_rows([{"question": "a", "answer": "b"}]), UsageError, "'answer', 'question'"),
    "empty_file": (of_file("rows.jsonl"), UsageError, "rows.jsonl"),
    "empty_csv": (of_file("rows.csv"), UsageError, "rows.csv"),
    "empty_list": (of_file("rows.json", b"[]"), UsageError, "rows.json"),
    "no_column_names": (of_file("rows.csv", b"1,2\n3,4\n"), UsageError, "no column"),
    "all_rows_empty": (
        of_rows([{"text": ""}, {"text": None}, {"text": ""}]), UsageError, "empty"
    ),
    "all_ids_empty": (all_ids_empty, UsageError, "empty"),
    "all_masked": (
        of_rows([{"input_ids": [5, 6], "labels": [-100, -100]}] * 3), UsageError, "loss"
    ),
    "damaged_lines": (damaged_lines, UsageError, "rows.jsonl"),
    "not_json": (of_file("rows.json", b"these are no rows"), UsageError, "rows.json"),
    "not_parquet": (of_file("rows.parquet", b"PAR1 or not"), UsageError, "rows.parquet"),
    "mixed_rows": (of_rows([{"text": "a"}, {"text": ["b", "c"]}]), UsageError, ""),
    "no_split": (of_split("validation", write_lines), UsageError, "validation"),
    "no_split_in_folder": (of_split("validation", write_folder), UsageError, "validation"),
    "no_split_in_dict": (of_split("validation", write_dict), UsageError, "validation"),
    "no_file": (no_file, PrerequisiteError, "rows.jsonl"),
    "other_kind": (of_file("rows.xlsx"), UsageError, "xlsx"),
    "empty_folder": (empty_folder, UsageError, "no data file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_trained_on_is_refused_with_a_hint(
    case: str, executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    make, kind, named = BROKEN[case]
    refused(executor, work, make(model, tmp_path, chats), kind, named)


def test_a_misspelt_fixed_key_is_named_with_the_nearest(
    prepare_rows: Callable[..., dict[str, Any]], chats: Rows
) -> None:
    with pytest.raises(UsageError, match="learning_rte") as caught:
        prepare_rows(chats, learning_rte=1e-4)
    assert "learning_rate" in caught.value.hint


def test_a_fixed_value_that_trl_refuses_is_one_clear_line(
    prepare_rows: Callable[..., dict[str, Any]], chats: Rows
) -> None:
    with pytest.raises(UsageError, match="invalid float value: 'fast'") as caught:
        prepare_rows(chats, learning_rate="fast")
    assert "usage:" not in caught.value.message
