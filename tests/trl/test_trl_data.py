"""Tokenising once gives what TRL itself would train on, for every format and kind of file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_kit import FILES, Rows, write_lines
from datasets import Dataset
from transformers import AutoTokenizer
from trl import pack_dataset
from trl_kit import keys_for, num_loss_tokens, prepare, prepared, raw_rows, trl_rows, write_jsonl

from autotune.executors.subprocess import SubprocessExecutor
from autotune.space.packing import packed_rows
from autotune.testing.contexts import make_profile
from autotune.trainers.sft_data import _without_empty

pytestmark = pytest.mark.trl


def as_text(chats: Rows, model: str) -> Rows:
    return [{"text": " ".join(m["content"] for m in row["messages"])} for row in chats]


def as_prompt(chats: Rows, model: str) -> Rows:
    return [
        {"prompt": row["messages"][0]["content"], "completion": row["messages"][1]["content"]}
        for row in chats
    ]


def as_prompt_chat(chats: Rows, model: str) -> Rows:
    return [{"prompt": row["messages"][:1], "completion": row["messages"][1:2]} for row in chats]


def as_ids(chats: Rows, model: str) -> Rows:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [{"input_ids": tokenizer(row["text"])["input_ids"]} for row in as_text(chats, model)]


def as_ids_and_labels(chats: Rows, model: str) -> Rows:
    rows = [row["input_ids"] for row in as_ids(chats, model)]
    return [{"input_ids": ids, "labels": [-100] * 5 + ids[5:]} for ids in rows]


def as_from_value(chats: Rows, model: str) -> Rows:
    return [
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in row["messages"]]}
        for row in chats
    ]


FORMATS: dict[str, tuple[Callable[[Rows, str], Rows], str]] = {
    "text": (as_text, "text"),
    "messages": (lambda chats, model: chats, "messages"),
    "prompt-completion": (as_prompt, "prompt-completion"),
    "prompt-completion-chat": (as_prompt_chat, "prompt-completion conversational"),
    "input_ids": (as_ids, "pre-tokenised"),
    "input_ids-and-labels": (as_ids_and_labels, "pre-tokenised"),
    "from-value": (as_from_value, "conversations"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_that_sft_trainer_makes(
    name: str,
    executor: SubprocessExecutor,
    model: str,
    chats: Rows,
    tmp_path: Path,
    work: Path,
) -> None:
    make, kind = FORMATS[name]
    keys = keys_for(model, write_jsonl(tmp_path / "rows.jsonl", make(chats, model)))
    answer = prepare(executor, work, keys)
    profile, rows = prepared(answer)
    expected = trl_rows(tmp_path, keys, model, max_length=None)
    assert profile.format == kind
    assert list(rows["input_ids"]) == list(expected["input_ids"])
    assert list(rows["labels"]) == list(expected["labels"])
    assert list(rows["num_tokens"]) == [len(ids) for ids in expected["input_ids"]]
    assert profile.num_rows == len(expected) == len(chats)
    assert profile.num_tokens == sum(len(ids) for ids in expected["input_ids"])
    assert profile.num_loss_tokens == num_loss_tokens(expected)
    assert profile.longest == max(len(ids) for ids in expected["input_ids"])
    assert profile.num_empty_rows == 0
    assert answer["model"]["has_chat_template"]
    assert answer["model"]["architecture"] == "LlamaForCausalLM"
    assert answer["model"]["keeps_documents_apart"] == {"sdpa": True, "eager": True}


@pytest.mark.parametrize("name", ["messages", "from-value", "prompt-completion-chat"])
def test_roles_that_trl_hands_on_to_the_template_are_counted(
    name: str,
    executor: SubprocessExecutor,
    model: str,
    chats: Rows,
    tmp_path: Path,
    work: Path,
) -> None:
    make, _ = FORMATS[name]
    text = json.dumps(make(chats, model)).replace('"user"', '"usr"')
    rows = json.loads(text)
    keys = keys_for(model, write_jsonl(tmp_path / "rows.jsonl", rows))
    profile, _ = prepared(prepare(executor, work, keys))
    assert profile.odd_roles == {"usr": text.count('"usr"')}
    assert "'usr'" in profile.notices()[0]


def test_a_model_s_positions_are_tabled_where_rows_are_longer(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 21}))
    keys = keys_for(str(folder), write_jsonl(tmp_path / "rows.jsonl", chats))
    profile, _ = prepared(prepare(executor, work, keys))
    assert 21 in profile.max_lengths
    assert profile.longest > 21


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_read_by_trl_as_by_us(
    name: str,
    executor: SubprocessExecutor,
    model: str,
    chats: Rows,
    tmp_path: Path,
    work: Path,
) -> None:
    rows = as_prompt(chats, model) if name == "csv" else chats
    keys = keys_for(model, FILES[name](tmp_path, rows))
    read = raw_rows(tmp_path, keys)
    columns = list(rows[0])
    assert [{name: row[name] for name in columns} for row in read] == rows
    profile, _ = prepared(prepare(executor, work, keys))
    assert profile.num_rows == len(rows)


@pytest.mark.parametrize("name", ["saved-dict", "folder"])
def test_another_split_can_be_chosen(
    name: str,
    executor: SubprocessExecutor,
    model: str,
    chats: Rows,
    tmp_path: Path,
    work: Path,
) -> None:
    path = FILES[name](tmp_path, chats)
    if name == "folder":
        write_jsonl(path / "test.jsonl", chats[:1])
    keys = keys_for(model, path, split="test")
    profile, _ = prepared(prepare(executor, work, keys))
    assert profile.num_rows == 1
    assert len(raw_rows(tmp_path, keys)) == 1


def test_a_slice_of_a_file_can_be_chosen(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    keys = keys_for(model, write_lines(tmp_path, chats), split="train[:5]")
    assert len(raw_rows(tmp_path, keys)) == 5
    assert prepared(prepare(executor, work, keys))[0].num_rows == 5


def test_another_text_column_can_be_fixed(
    prepare_rows: Callable[..., dict[str, Any]], model: str, chats: Rows
) -> None:
    rows = [{"content": row["text"]} for row in as_text(chats, model)]
    rows[3]["content"] = None
    profile, _ = prepared(prepare_rows(rows, dataset_text_field="content"))
    assert profile.format == "text"
    assert profile.num_rows == len(rows) - 1
    assert profile.num_empty_rows == 1


def test_null_rows_are_left_out_and_counted(
    prepare_rows: Callable[..., dict[str, Any]], model: str, chats: Rows
) -> None:
    rows = as_text(chats, model)
    rows[2]["text"] = rows[7]["text"] = None
    profile, _ = prepared(prepare_rows(rows))
    assert profile.num_rows == len(rows) - 2
    assert profile.num_empty_rows == 2


def test_an_empty_text_is_the_one_token_that_trl_makes_of_it(
    prepare_rows: Callable[..., dict[str, Any]], model: str, chats: Rows
) -> None:
    rows = as_text(chats, model)
    rows[2]["text"] = ""
    profile, _ = prepared(prepare_rows(rows))
    assert (profile.num_rows, profile.num_empty_rows) == (len(rows), 0)
    assert profile.length_counts[1] == 1


def test_a_prompt_may_be_empty(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    rows = as_prompt(chats, model)
    rows[2]["prompt"] = ""
    keys = keys_for(model, write_lines(tmp_path, rows))
    expected = trl_rows(tmp_path, keys, model, max_length=None)
    profile, _ = prepared(prepare(executor, work, keys))
    assert profile.num_rows == len(expected)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_rows_are_counted_as_trl_packs(strategy: str) -> None:
    draw = random.Random(0)
    for num_rows, max_length in [(1, 64), (10, 64), (10, 1024), (100, 100), (300, 37)]:
        lengths = [draw.randint(1, 150) for _ in range(num_rows)]
        rows = Dataset.from_dict({"input_ids": [[7] * length for length in lengths]})
        expected = len(pack_dataset(rows, max_length, strategy))
        counted = packed_rows(make_profile(lengths), strategy, max_length, enough=10**6)
        assert counted == expected


def test_rows_without_empty_ones_are_not_touched() -> None:
    data = Dataset.from_list([{"text": "a", "other": None}, {"text": "b", "other": None}])
    assert _without_empty(data, "text")[0] is data
