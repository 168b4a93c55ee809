"""From what a user names - a model, a data set - to the keys that the ``trl`` CLI reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autotune.errors import PrerequisiteError, UsageError

_BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}


def model_keys(model: str, *, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Return the TRL keys that name ``model``, a hub id or a local folder.

    Raises:
        PrerequisiteError: If it looks like a path and is no folder with a ``config.json``.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PrerequisiteError(
                f"the folder {model!r} holds no config.json.",
                hint="Give a folder written by save_pretrained, or a hub id.",
            )
        keys: dict[str, Any] = {"model_name_or_path": str(path.resolve())}
    elif path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise PrerequisiteError(
            f"there is no model folder {model!r}.",
            hint="Give a folder with config.json and tokenizer files, or a hub id such as "
            "Qwen/Qwen3-0.6B.",
        )
    else:
        keys = {"model_name_or_path": model}
    if revision is not None:
        keys["model_revision"] = revision
    if trust_remote_code:
        keys["trust_remote_code"] = True
    return keys


def dataset_keys(dataset: str, *, split: str | None, config_name: str | None) -> dict[str, Any]:
    """Return the TRL keys that name ``dataset``: a hub id, a local file or a local folder.

    ``trl`` reads a file only through its ``datasets`` mixture form, and what that loads is always
    called ``train``; a folder of plain files it reads by name.

    Raises:
        PrerequisiteError: If it looks like a path and nothing is there.
        UsageError: If the file's kind is not one that can be read.
    """
    path = Path(dataset).expanduser()
    if path.is_file():
        builder = _BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise UsageError(
                f"data files of kind {path.suffix or 'without suffix'!r} cannot be read.",
                hint=f"Known: {', '.join(_BUILDERS)}.",
            )
        return _mixture(builder, str(path.resolve()), split)
    if path.is_dir():
        return _folder_keys(path.resolve(), split, config_name)
    if path.exists() or dataset.startswith((".", "/", "~")) or path.suffix.lower() in _BUILDERS:
        raise PrerequisiteError(
            f"there is no data file or folder {dataset!r}.",
            hint="Check the path; a hub id looks like trl-lib/Capybara.",
        )
    keys: dict[str, Any] = {"dataset_name": dataset, "dataset_train_split": split or "train"}
    if config_name is not None:
        keys["dataset_config"] = config_name
    return keys


def _mixture(builder: str, data_files: str | list[str], split: str | None) -> dict[str, Any]:
    entry = {"path": builder, "data_files": data_files, "split": split or "train"}
    return {"datasets": [entry], "dataset_train_split": "train"}


def _folder_keys(path: Path, split: str | None, config_name: str | None) -> dict[str, Any]:
    if (path / "dataset_dict.json").is_file():
        # Written by DatasetDict.save_to_disk: a folder per split.
        splits = _read(path / "dataset_dict.json", "splits")
        name = split or "train"
        if name not in splits:
            raise UsageError(
                f"the data set {str(path)!r} has no split {name!r}.",
                hint=f"It has: {', '.join(splits)}. Choose one with --split.",
            )
        return _saved(path / name, None)
    if (path / "state.json").is_file():
        return _saved(path, split)
    if not any(file.suffix.lower() in _BUILDERS for file in path.rglob("*") if file.is_file()):
        raise UsageError(
            f"the folder {str(path)!r} holds no data file.",
            hint=f"Known kinds: {', '.join(_BUILDERS)}.",
        )
    keys: dict[str, Any] = {"dataset_name": str(path), "dataset_train_split": split or "train"}
    if config_name is not None:
        keys["dataset_config"] = config_name
    return keys


def _saved(path: Path, split: str | None) -> dict[str, Any]:
    """Return the keys for a folder written by ``Dataset.save_to_disk``."""
    files = _read(path / "state.json", "_data_files")
    names = [str(path / file["filename"]) for file in files]
    return _mixture("arrow", names[0] if len(names) == 1 else names, split)


def _read(file: Path, key: str) -> list[Any]:
    try:
        return list(json.loads(file.read_text())[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} cannot be read: the saved data set is damaged or incomplete.",
            hint="Save it again with save_to_disk.",
        ) from error


def short_name(name: str) -> str:
    """Return the last part of a hub id or path, such as ``Qwen3-0.6B``, for folder names."""
    return Path(name.rstrip("/")).name or "model"
