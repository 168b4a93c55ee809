"""Files of rows, models that are broken, and what their refusal must say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from trl_kit import keys_for, prepare, write_jsonl

from autotune.executors.base import Executor

Rows = list[dict[str, Any]]
Case = tuple[str, Path, dict[str, Any]]
"""Model, data set and options of ``keys_for``."""
Broken = Callable[[str, Path, Rows], Case]
"""Makes a case of a model, a folder and rows."""


# --- files --------------------------------------------------------------------------------------


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


# --- models and data that are broken ------------------------------------------------------------


def copy_model(model: str, folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    folder.mkdir(parents=True)
    for file in Path(model).iterdir():
        if file.name not in without and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def with_config(**changes: Any) -> Broken:
    """Return a case whose model has a changed config.json; None takes a key out."""

    def case(model: str, path: Path, chats: Rows) -> Case:
        found = copy_model(model, path / "model")
        config = {**json.loads((found / "config.json").read_text()), **changes}
        config = {key: value for key, value in config.items() if value is not None}
        (found / "config.json").write_text(json.dumps(config))
        return str(found), write_lines(path, chats), {}

    return case


def with_text(name: str, text: str) -> Broken:
    """Return a case whose model has another text in one of its files."""

    def case(model: str, path: Path, chats: Rows) -> Case:
        found = copy_model(model, path / "model")
        (found / name).write_text(text)
        return str(found), write_lines(path, chats), {}

    return case


def without(*names: str) -> Broken:
    """Return a case whose model lacks files."""

    def case(model: str, path: Path, chats: Rows) -> Case:
        found = copy_model(model, path / "model", without=names)
        return str(found), write_lines(path, chats), {}

    return case


def of_rows(rows: Rows) -> Broken:
    """Return a case of a whole model and these rows."""
    return lambda model, path, chats: (model, write_lines(path, rows), {})


def of_file(name: str, content: bytes = b"") -> Broken:
    """Return a case of a whole model and a data file as it stands."""

    def case(model: str, path: Path, chats: Rows) -> Case:
        (path / name).write_bytes(content)
        return model, path / name, {}

    return case


def of_split(split: str, write: Callable[[Path, Rows], Path]) -> Broken:
    """Return a case of a whole model and a split of whole rows."""
    return lambda model, path, chats: (model, write(path, chats), {"split": split})


def refused(executor: Executor, work: Path, case: Case, kind: type[Exception], named: str) -> None:
    """Check that a case is refused with that error, which names what is wrong and has a hint."""
    model, dataset, options = case
    with pytest.raises(kind) as caught:
        prepare(executor, work, keys_for(model, dataset, **options))
    assert type(caught.value) is kind
    assert named in caught.value.message
    assert caught.value.hint
    assert "Traceback" not in caught.value.message
