"""Tokenising once gives what TRL itself would train on, for every format and kind of file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer
from trl import pack_dataset
from trl_kit import keys_for, num_loss_tokens, prepare, prepared, raw_rows, trl_rows, write_jsonl

from autotune.errors import PrerequisiteError, UsageError
from autotune.executors.subprocess import SubprocessExecutor
from autotune.space.packing import packed_rows
from autotune.testing.contexts import make_profile
from autotune.trainers.loading import check_weights
from autotune.trainers.sft_data import _without_empty

pytestmark = pytest.mark.trl

Rows = list[dict[str, Any]]


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


def write_json(path: Path, rows: Rows) -> Path:
    (path / "rows.json").write_text(json.dumps(rows))
    return path / "rows.json"


def write_lines(path: Path, rows: Rows) -> Path:
    return write_jsonl(path / "rows.jsonl", rows)


def write_parquet(path: Path, rows: Rows) -> Path:
    Dataset.from_list(rows).to_parquet(path / "rows.parquet")
    return path / "rows.parquet"


def write_csv(path: Path, rows: Rows) -> Path:
    Dataset.from_list(rows).to_csv(path / "rows.csv", index=False)
    return path / "rows.csv"


def write_saved(path: Path, rows: Rows) -> Path:
    Dataset.from_list(rows).save_to_disk(path / "saved")
    return path / "saved"


def write_shards(path: Path, rows: Rows) -> Path:
    Dataset.from_list(rows).save_to_disk(path / "shards", num_shards=3)
    return path / "shards"


def write_arrow(path: Path, rows: Rows) -> Path:
    return next(write_saved(path, rows).glob("*.arrow"))


def write_dict(path: Path, rows: Rows) -> Path:
    data = Dataset.from_list(rows)
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(path / "dict")
    return path / "dict"


def write_folder(path: Path, rows: Rows) -> Path:
    write_jsonl(path / "folder" / "train.jsonl", rows)
    return path / "folder"


def write_folder_of_parts(path: Path, rows: Rows) -> Path:
    write_jsonl(path / "parts" / "a.jsonl", rows[:10])
    write_jsonl(path / "parts" / "b.jsonl", rows[10:])
    return path / "parts"


def write_pattern(path: Path, rows: Rows) -> Path:
    write_jsonl(path / "a[1]" / "r1ws.jsonl", rows[:1])
    return write_jsonl(path / "a[1]" / "r*ws.jsonl", rows)


def write_saved_under_a_pattern(path: Path, rows: Rows) -> Path:
    return write_saved(path / "a[1]", rows)


FILES = {
    "json": write_json,
    "jsonl": write_lines,
    "parquet": write_parquet,
    "csv": write_csv,
    "arrow": write_arrow,
    "saved": write_saved,
    "saved-in-shards": write_shards,
    "saved-dict": write_dict,
    "folder": write_folder,
    "folder-of-parts": write_folder_of_parts,
    "pattern": write_pattern,
    "saved-under-a-pattern": write_saved_under_a_pattern,
}


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
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    rows = [{"content": row["text"]} for row in as_text(chats, model)]
    rows[3]["content"] = None
    path = write_lines(tmp_path, rows)
    keys = {**keys_for(model, path), "dataset_text_field": "content"}
    profile, _ = prepared(prepare(executor, work, keys))
    assert profile.format == "text"
    assert profile.num_rows == len(rows) - 1
    assert profile.num_empty_rows == 1


def test_null_rows_are_left_out_and_counted(
    executor: SubprocessExecutor,
    model: str,
    chats: Rows,
    tmp_path: Path,
    work: Path,
) -> None:
    rows = as_text(chats, model)
    rows[2]["text"] = rows[7]["text"] = None
    profile, _ = prepared(prepare(executor, work, keys_for(model, write_lines(tmp_path, rows))))
    assert profile.num_rows == len(rows) - 2
    assert profile.num_empty_rows == 2


def test_an_empty_text_is_the_one_token_that_trl_makes_of_it(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    rows = as_text(chats, model)
    rows[2]["text"] = ""
    profile, _ = prepared(prepare(executor, work, keys_for(model, write_lines(tmp_path, rows))))
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


# --- what cannot be trained on ------------------------------------------------------------------

Broken = Callable[[str, Path, Rows], tuple[str, Path, dict[str, Any]]]


def copy_model(model: str, folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    folder.mkdir(parents=True)
    for file in Path(model).iterdir():
        if file.name not in without and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def no_such_model(model: str, path: Path, chats: Rows) -> Any:
    return str(path / "nowhere"), write_lines(path, chats), {}


def no_config(model: str, path: Path, chats: Rows) -> Any:
    found = copy_model(model, path / "model", without=("config.json",))
    return str(found), write_lines(path, chats), {}


def broken_config(model: str, path: Path, chats: Rows) -> Any:
    found = copy_model(model, path / "model")
    (found / "config.json").write_text('{"model_type": ')
    return str(found), write_lines(path, chats), {}


def unknown_architecture(model: str, path: Path, chats: Rows) -> Any:
    found = copy_model(model, path / "model")
    (found / "config.json").write_text('{"model_type": "of_next_year", "architectures": ["X"]}')
    return str(found), write_lines(path, chats), {}


def no_architecture(model: str, path: Path, chats: Rows) -> Any:
    found = copy_model(model, path / "model")
    config = json.loads((found / "config.json").read_text())
    del config["architectures"]
    (found / "config.json").write_text(json.dumps(config))
    return str(found), write_lines(path, chats), {}


def no_tokenizer(model: str, path: Path, chats: Rows) -> Any:
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    found = copy_model(model, path / "model", without=names)
    return str(found), write_lines(path, chats), {}


def no_special_tokens(model: str, path: Path, chats: Rows) -> Any:
    found = copy_model(model, path / "model", without=("special_tokens_map.json",))
    file = found / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in config.items() if not k.endswith("_token")}))
    return str(found), write_lines(path, chats), {}


def no_chat_template(model: str, path: Path, chats: Rows) -> Any:
    found = copy_model(model, path / "model", without=("chat_template.jinja",))
    return str(found), write_lines(path, chats), {}


def no_column(model: str, path: Path, chats: Rows) -> Any:
    return model, write_lines(path, [{"question": "a", "answer": "b"}]), {}


def empty_file(model: str, path: Path, chats: Rows) -> Any:
    (path / "rows.jsonl").touch()
    return model, path / "rows.jsonl", {}


def all_rows_empty(model: str, path: Path, chats: Rows) -> Any:
    return model, write_lines(path, [{"text": ""}, {"text": None}, {"text": ""}]), {}


def all_ids_empty(model: str, path: Path, chats: Rows) -> Any:
    data = Dataset.from_dict({"input_ids": [[], []], "labels": [[], []]})
    data.to_parquet(path / "rows.parquet")
    return model, path / "rows.parquet", {}


def all_masked(model: str, path: Path, chats: Rows) -> Any:
    return model, write_lines(path, [{"input_ids": [5, 6], "labels": [-100, -100]}] * 3), {}


def damaged_lines(model: str, path: Path, chats: Rows) -> Any:
    file = write_lines(path, chats)
    file.write_text(file.read_text()[:-50])
    return model, file, {}


def not_json(model: str, path: Path, chats: Rows) -> Any:
    (path / "rows.json").write_text("these are no rows")
    return model, path / "rows.json", {}


def not_parquet(model: str, path: Path, chats: Rows) -> Any:
    (path / "rows.parquet").write_bytes(b"PAR1 or not")
    return model, path / "rows.parquet", {}


def mixed_rows(model: str, path: Path, chats: Rows) -> Any:
    return model, write_lines(path, [{"text": "a"}, {"text": ["b", "c"]}]), {}


def no_split(model: str, path: Path, chats: Rows) -> Any:
    return model, write_lines(path, chats), {"split": "validation"}


def no_split_in_folder(model: str, path: Path, chats: Rows) -> Any:
    return model, write_folder(path, chats), {"split": "validation"}


def no_split_in_dict(model: str, path: Path, chats: Rows) -> Any:
    return model, write_dict(path, chats), {"split": "validation"}


def no_file(model: str, path: Path, chats: Rows) -> Any:
    return model, path / "rows.jsonl", {}


def other_kind(model: str, path: Path, chats: Rows) -> Any:
    (path / "rows.xlsx").touch()
    return model, path / "rows.xlsx", {}


def empty_folder(model: str, path: Path, chats: Rows) -> Any:
    (path / "folder").mkdir()
    return model, path / "folder", {}


def empty_csv(model: str, path: Path, chats: Rows) -> Any:
    (path / "rows.csv").touch()
    return model, path / "rows.csv", {}


def empty_list(model: str, path: Path, chats: Rows) -> Any:
    (path / "rows.json").write_text("[]")
    return model, path / "rows.json", {}


def no_column_names(model: str, path: Path, chats: Rows) -> Any:
    (path / "rows.csv").write_text("1,2\n3,4\n")
    return model, path / "rows.csv", {}


def with_config(**changes: Any) -> Broken:
    """Return a case whose model has a changed config.json; None takes a key out."""

    def case(model: str, path: Path, chats: Rows) -> Any:
        found = copy_model(model, path / "model")
        config = {**json.loads((found / "config.json").read_text()), **changes}
        config = {key: value for key, value in config.items() if value is not None}
        (found / "config.json").write_text(json.dumps(config))
        return str(found), write_lines(path, chats), {}

    return case


ENCODER = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 384}
CUSTOM = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
PACKAGE = {"quant_method": "hqq", "quant_config": {}}

MODELS: dict[str, tuple[Broken, type[Exception], str]] = {
    "heads": (with_config(num_attention_heads=7, head_dim=None), UsageError, "multiple of"),
    "shared heads": (with_config(num_key_value_heads=4), UsageError, "num_key_value_heads=4"),
    "no heads": (with_config(num_key_value_heads=0), UsageError, "LlamaForCausalLM"),
    "few tokens": (with_config(vocab_size=200), UsageError, "vocab_size 200"),
    "no token": (with_config(vocab_size=0), UsageError, "LlamaForCausalLM"),
    "text for a number": (with_config(vocab_size="many"), UsageError, "vocab_size"),
    "unknown activation": (with_config(hidden_act="nosuch"), UsageError, "nosuch"),
    "unknown dtype": (with_config(dtype="nosuch"), UsageError, "nosuch"),
    "pad id": (with_config(pad_token_id=99_999), UsageError, "adding"),
    "unknown type": (with_config(model_type="nosuch"), UsageError, "nosuch"),
    "no type": (with_config(model_type=None), PrerequisiteError, "model_type"),
    "text for a list": (with_config(architectures="LlamaForCausalLM"), UsageError, "architecture"),
    "other architecture": (with_config(architectures=["Qwen2ForCausalLM"]), UsageError, "Qwen2"),
    "no head": (with_config(architectures=["LlamaModel"]), UsageError, "no head"),
    "other head": (
        with_config(architectures=["LlamaForSequenceClassification"]), UsageError, "no head"
    ),
    "encoder": (with_config(**ENCODER), UsageError, "encoder"),
    "encoder's own head": (
        with_config(**{**ENCODER, "architectures": ["BertLMHeadModel"]}), UsageError, "encoder"
    ),
    "encoder-decoder": (
        with_config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
        UsageError,
        "encoder with a decoder",
    ),
    "images": (
        with_config(model_type="vit", architectures=["ViTForImageClassification"]),
        UsageError,
        "ViT",
    ),
    "own code": (
        with_config(model_type="custom", auto_map=CUSTOM), PrerequisiteError, "own repository"
    ),
    "quantisation": (
        with_config(quantization_config={"quant_method": "nosuch"}), UsageError, "quantised"
    ),
    "a package for it": (
        with_config(quantization_config=PACKAGE), PrerequisiteError, "needs a package"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_trained_is_refused_with_a_hint(
    case: str, executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    make, kind, named = MODELS[case]
    found, dataset, _ = make(model, tmp_path, chats)
    with pytest.raises(kind) as caught:
        prepare(executor, work, keys_for(found, dataset))
    assert type(caught.value) is kind
    assert named in caught.value.message
    assert caught.value.hint


def test_an_unknown_architecture_is_what_trl_makes_of_it(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    make = with_config(architectures=["LLaMAForCausalLM"])
    found, dataset, _ = make(model, tmp_path, chats)
    facts = prepare(executor, work, keys_for(found, dataset))["model"]
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["declared_architecture"] == "LLaMAForCausalLM"


def test_more_tokens_than_the_model_knows_are_fine_where_no_row_holds_them(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    num_known = len(AutoTokenizer.from_pretrained(model)) - 1
    found, _, _ = with_config(vocab_size=num_known)(model, tmp_path, chats)
    rows = [{"input_ids": [3, 4, 5, num_known - 1]}] * 3
    answer = prepare(executor, work, keys_for(found, write_lines(tmp_path, rows)))
    assert answer["data"]["num_rows"] == 3


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("model.safetensors", b"", UsageError),
        ("model.safetensors", b"\xff" * 100, UsageError),
        ("model.safetensors.index.json", b"{", UsageError),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            PrerequisiteError,
        ),
        ("notes.md", b"", PrerequisiteError),
    ],
)
def test_real_weights_must_be_there_and_whole(
    name: str,
    content: bytes,
    kind: type[Exception],
    model: str,
    tmp_path: Path,
) -> None:
    found = copy_model(model, tmp_path / "model")
    (found / name).write_bytes(content)
    check_weights(str(found), "random")
    with pytest.raises(kind) as caught:
        check_weights(str(found), "real")
    assert str(found) in caught.value.message
    assert caught.value.hint


def test_whole_weights_are_fine(model: str) -> None:
    check_weights(model, "real")


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
    "few labels": ([{"input_ids": [1, 2], "labels": [1]}], "1 labels"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_rows_of_no_format_are_named(
    case: str, executor: SubprocessExecutor, model: str, tmp_path: Path, work: Path
) -> None:
    rows, named = ROWS[case]
    with pytest.raises(UsageError) as caught:
        prepare(executor, work, keys_for(model, write_lines(tmp_path, rows)))
    assert named in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ raise_exception('roles must alternate') }}"]
)
def test_a_template_that_refuses_is_an_error_of_ours(
    template: str,
    executor: SubprocessExecutor,
    model: str,
    chats: Rows,
    tmp_path: Path,
    work: Path,
) -> None:
    found = copy_model(model, tmp_path / "model")
    (found / "chat_template.jinja").write_text(template)
    with pytest.raises(UsageError, match="TRL cannot prepare") as caught:
        prepare(executor, work, keys_for(str(found), write_lines(tmp_path, chats)))
    assert "template" in caught.value.hint


def test_messages_may_have_further_keys(
    executor: SubprocessExecutor, model: str, tmp_path: Path, work: Path
) -> None:
    rows = said(role="user", content="a", weight=1) + said(role="assistant", content=None)
    rows += said(role="assistant", content=None, tool_calls=[{"name": "f"}])
    answer = prepare(executor, work, keys_for(model, write_lines(tmp_path, rows)))
    assert answer["data"]["num_rows"] == 3


BROKEN: dict[Broken, tuple[type[Exception], str]] = {
    no_such_model: (PrerequisiteError, "no model folder"),
    no_config: (PrerequisiteError, "config.json"),
    broken_config: (PrerequisiteError, "config"),
    unknown_architecture: (UsageError, "transformers"),
    no_architecture: (UsageError, "architecture"),
    no_tokenizer: (PrerequisiteError, "tokenizer"),
    no_special_tokens: (UsageError, "eos token"),
    no_chat_template: (UsageError, "chat template"),
    no_column: (UsageError, "answer, question"),
    empty_file: (UsageError, "rows.jsonl"),
    empty_csv: (UsageError, "rows.csv"),
    empty_list: (UsageError, "rows.json"),
    no_column_names: (UsageError, "no column"),
    all_rows_empty: (UsageError, "empty"),
    all_ids_empty: (UsageError, "empty"),
    all_masked: (UsageError, "loss"),
    damaged_lines: (UsageError, "rows.jsonl"),
    not_json: (UsageError, "rows.json"),
    not_parquet: (UsageError, "rows.parquet"),
    mixed_rows: (UsageError, ""),
    no_split: (UsageError, "validation"),
    no_split_in_folder: (UsageError, "validation"),
    no_split_in_dict: (UsageError, "validation"),
    no_file: (PrerequisiteError, "rows.jsonl"),
    other_kind: (UsageError, "xlsx"),
    empty_folder: (UsageError, "no data file"),
}


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.__name__)
def test_what_cannot_be_trained_on_is_refused_with_a_hint(
    case: Broken,
    executor: SubprocessExecutor,
    model: str,
    chats: Rows,
    tmp_path: Path,
    work: Path,
) -> None:
    kind, named = BROKEN[case]
    found, dataset, options = case(model, tmp_path, chats)

    def use() -> None:
        prepare(executor, work, keys_for(found, dataset, **options))

    with pytest.raises(kind) as caught:
        use()
    assert type(caught.value) is kind
    assert named in caught.value.message
    assert caught.value.hint
    assert "Traceback" not in caught.value.message


def test_a_misspelt_fixed_key_is_named_with_the_nearest(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    keys = {**keys_for(model, write_lines(tmp_path, chats)), "learning_rte": 1e-4}
    with pytest.raises(UsageError, match="learning_rte") as caught:
        prepare(executor, work, keys)
    assert "learning_rate" in caught.value.hint


@pytest.mark.parametrize("name", ["/no/such/folder", "/no/such/template.jinja"])
def test_a_missing_chat_template_is_an_error_of_ours(
    name: str, executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    keys = {**keys_for(model, write_lines(tmp_path, chats)), "chat_template_path": name}
    with pytest.raises(UsageError, match="/no/such") as caught:
        prepare(executor, work, keys)
    assert "template" in caught.value.hint


def test_a_fixed_value_that_trl_refuses_is_one_clear_line(
    executor: SubprocessExecutor, model: str, chats: Rows, tmp_path: Path, work: Path
) -> None:
    keys = {**keys_for(model, write_lines(tmp_path, chats)), "learning_rate": "fast"}
    with pytest.raises(UsageError, match="invalid float value: 'fast'") as caught:
        prepare(executor, work, keys)
    assert "usage:" not in caught.value.message
