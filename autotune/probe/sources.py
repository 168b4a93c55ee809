"""From what a user names - a model, a data set - to the keys that the ``trl`` CLI reads."""

from __future__ import annotations

import glob
import json
from collections import Counter
from collections.abc import Iterator, Mapping
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
# Kinds that `datasets` would read from a folder, or would read one of and leave out the others.
_KINDS = {**_BUILDERS, ".ndjson": "json", ".tsv": "csv", ".txt": "text"}
# What a data file may be called, though not all of these can be read.
_FILE_SUFFIXES = frozenset(
    {*_KINDS, ".bz2", ".db", ".feather", ".gz", ".pkl", ".sqlite", ".tar", ".xls", ".xlsx", ".xz"}
    | {".yaml", ".yml", ".zip", ".zst"}
)
# Files that it takes for notes on a data set.
_NOTES = frozenset({"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json"})
_TEXT_NOTES = frozenset({"changelog", "licence", "license", "notice", "readme", "requirements"})


_MODEL_KEYS = frozenset({"architectures", "model_type"})
_DATA_KEYS = frozenset({"dataset_name", "dataset_config", "datasets", "dataset_train_split"})


def model_keys(model: str, *, revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Return the TRL keys that name ``model``, a hub id or a local folder.

    Raises:
        PrerequisiteError: If it looks like a path and is no folder with a ``config.json``.
        UsageError: If it is empty, or a revision is asked of a local folder, which has none.
    """
    path = _path("model", model)
    if path.is_dir():
        if revision is not None:
            raise _without_effect(
                "--revision", "a local model folder", "Drop it, or give a hub id in its place."
            )
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


def may_hold_weights(model: str) -> bool:
    """Return whether trl finds weights under a model's name: a hub id, or a folder with some.

    A configuration and a tokenizer are enough for probes, so that a folder may hold no more.
    """
    folder = Path(model)
    if not folder.is_dir():
        return True
    patterns = ("*.safetensors", "pytorch_model*.bin", "*.gguf", "adapter_model*.bin")
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def no_weights(model: str) -> str:
    """Return the sentence that says so of a folder without weights."""
    return f"The model folder {model} holds no weights (such as model.safetensors)."


def dataset_keys(dataset: str, *, split: str | None, config_name: str | None) -> dict[str, Any]:
    """Return the TRL keys that name ``dataset``: a hub id, a local file or a local folder.

    ``trl`` reads a file only through its ``datasets`` mixture form, and what that loads is always
    called ``train``; a folder of plain files it reads by name.

    Raises:
        PrerequisiteError: If it looks like a path and nothing is there.
        UsageError: If it is empty, the file's kind is not one that can be read, a folder mixes
            kinds, or a configuration is asked of files, which have none.
    """
    path = _path("data set", dataset)
    if path.is_file():
        _refuse_config(config_name, "a data file")
        builder = _BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise UsageError(
                f"data files of kind {path.suffix or 'without suffix'!r} cannot be read.",
                hint=f"Known: {', '.join(_BUILDERS)}.",
            )
        return _mixture(builder, str(path.resolve()), split)
    if path.is_dir():
        return _folder_keys(path.resolve(), split, config_name)
    if path.exists() or _looks_like_path(dataset):
        raise PrerequisiteError(
            f"there is no data file or folder {dataset!r}.",
            hint="Check the path; a hub id looks like trl-lib/Capybara.",
        )
    keys: dict[str, Any] = {"dataset_name": dataset, "dataset_train_split": split or "train"}
    if config_name is not None:
        keys["dataset_config"] = config_name
    return keys


def _looks_like_path(dataset: str) -> bool:
    """Whether a name can be no hub id, which has one slash at most and is of no file's kind."""
    return (
        dataset.startswith((".", "/", "~"))
        or dataset.endswith("/")
        or dataset.count("/") > 1
        or Path(dataset).suffix.lower() in _FILE_SUFFIXES
    )


def moved(config: Mapping[str, Any], model: str | None, dataset: str | None) -> dict[str, Any]:
    """Return a configuration whose model and data lie elsewhere, as on another machine.

    Args:
        config: TRL keys.
        model: Hub id or folder to name in place of its own; None to keep it.
        dataset: Hub id, file or folder to name in place of its own, with the same split.

    Raises:
        PrerequisiteError, UsageError: As by :func:`model_keys` and :func:`dataset_keys`.
    """
    found = dict(config)
    if model is not None:
        found.pop("model_revision", None)
        found |= model_keys(model, revision=None, trust_remote_code=False)
    if dataset is not None:
        entries = found.get("datasets") or [{}]
        split = entries[0].get("split") or found.get("dataset_train_split")
        found = {key: value for key, value in found.items() if key not in _DATA_KEYS}
        found |= dataset_keys(dataset, split=split, config_name=None)
    return found


def check_present(config: Mapping[str, Any]) -> None:
    """Check that local model and data of a configuration are on this machine.

    Raises:
        PrerequisiteError: Naming what is missing; a file from another machine names its paths.
    """
    entries = config.get("datasets") or []
    files = [entry.get("data_files") for entry in entries if isinstance(entry, Mapping)]
    data = [config.get("dataset_name")]
    for item in files:
        data += item if isinstance(item, list) else [item]
    for what, names in (("model", [config.get("model_name_or_path")]), ("dataset", data)):
        for name in names:
            # Names of data files are patterns, and what is relative or an id may be anything.
            if not isinstance(name, str) or not name.startswith("/"):
                continue
            if not Path(name).exists() and not glob.glob(name, recursive=True):
                raise PrerequisiteError(
                    f"there is no {name} on this machine, which the file names as its {what}.",
                    hint=f"Put it there, or say where it lies: --{what} PATH.",
                )


def _mixture(builder: str, data_files: str | list[str], split: str | None) -> dict[str, Any]:
    # `datasets` takes the names for patterns, and would read other files or none.
    if isinstance(data_files, str):
        data_files = glob.escape(data_files)
    else:
        data_files = [glob.escape(name) for name in data_files]
    entry = {"path": builder, "data_files": data_files, "split": split or "train"}
    return {"datasets": [entry], "dataset_train_split": "train"}


def _folder_keys(path: Path, split: str | None, config_name: str | None) -> dict[str, Any]:
    if (path / "dataset_dict.json").is_file():
        _refuse_config(config_name, "a data set written by save_to_disk")
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
        _refuse_config(config_name, "a data set written by save_to_disk")
        return _saved(path, split)
    _check_files(path)
    keys: dict[str, Any] = {"dataset_name": str(path), "dataset_train_split": split or "train"}
    if config_name is not None:
        keys["dataset_config"] = config_name
    return keys


def _check_files(folder: Path) -> None:
    """Refuse a folder of which ``datasets`` would read nothing, or only a part without a word."""
    files = list(_data_files(folder))
    if _is_model(folder) and all(file.suffix.lower() == ".json" for file in files):
        raise UsageError(
            f"the folder {str(folder)!r} looks like a model, not like data: its config.json names"
            " an architecture.",
            hint="The model comes first and the data second: a hub id, a data file, or a folder of"
            " such files.",
        )
    if not any(file.suffix.lower() in _BUILDERS for file in files):
        raise UsageError(
            f"the folder {str(folder)!r} holds no data file.",
            hint=f"Known kinds: {', '.join(_BUILDERS)}.",
        )
    for name in (str(folder), *(str(file.relative_to(folder)) for file in files)):
        if glob.has_magic(name):
            raise UsageError(
                f"the data folder's path {name!r} holds one of the characters * ? [, which"
                " datasets takes for a pattern.",
                hint="Rename it, or give the data file itself: a file may be called so.",
            )
    kinds = Counter(_KINDS[file.suffix.lower()] for file in files)
    if len(kinds) > 1 and not _declares_files(folder):
        found = " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise UsageError(
            f"the folder {str(folder)!r} holds data files of several kinds ({found}), of which"
            " datasets would read one and leave out the rest.",
            hint="Give one of the files, or a folder with files of one kind.",
        )


def _is_model(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and not config.keys().isdisjoint(_MODEL_KEYS)


def _data_files(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder`` that ``datasets`` could take for data."""
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts)
        if hidden or file.suffix.lower() not in _KINDS or file.name in _NOTES:
            continue
        is_note = file.suffix.lower() == ".txt" and file.stem.lower() in _TEXT_NOTES
        if not is_note and file.is_file():
            yield file


def _declares_files(folder: Path) -> bool:
    """Whether the folder's card says which files make up the data set."""
    try:
        return "data_files:" in (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _path(what: str, name: str) -> Path:
    """Return a path as the user wrote it, ``~`` expanded.

    Raises:
        UsageError: If the name is empty, or cannot be a path.
    """
    if not name.strip():
        # An empty path would be the current folder.
        raise UsageError(f"the {what} is an empty name.", hint="Give a hub id or a path.")
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null byte
        raise UsageError(
            f"the {what} {name[:100]!r} cannot be looked up: {error}.", hint="Check the path."
        ) from error
    return path


def _refuse_config(config_name: str | None, what: str) -> None:
    if config_name is not None:
        raise _without_effect("--dataset-config", what, "Drop it; --split chooses rows.")


def _without_effect(option: str, what: str, hint: str) -> UsageError:
    return UsageError(f"{option} has no effect on {what}.", hint=hint)


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
