"""Reading a configuration as ``trl <command> --config FILE`` reads it.

Scripts that were exported for trainers without a command are read as well; nothing of them is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import PrerequisiteError, UsageError
from autotune.files import check_regular
from autotune.probe import trl_script, trl_yaml
from autotune.space import trainers, trl_keys
from autotune.space.bounds import find_excess, find_repeated

_COMMENT = re.compile(r"trl (\w+) --config")
_TRAINER = re.compile(r"^#   trainer +(\S+)$", re.MULTILINE)
_CARD = re.compile(r"^#   device +(.+) \(virtual\)", re.MULTILINE)

_IN_A_FILE = {
    "under `fixed:` in the space": "in {path}",
    "`fixed:` in the space": "{path}",
    "a file that `fixed:` names": "a file that it names",
    "with --split": "with dataset_train_split",
    "--dataset-config and --split": "dataset_config and dataset_train_split",
    "add --trust-remote-code": "add trust_remote_code: true to the file, and --trust-remote-code"
    " to the command line",
}
"""Hints of the worker name a search's options; a file has keys in their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlFile:
    """A configuration for ``trl``.

    Attributes:
        path: Where it was read.
        config: The mapping that TRL reads.
        trainer: The trainer that was asked for, or that the file's comment names; else the one
            that its keys are of.
        card: The card that the comment says it is predicted for; None if it says none.
        lines: The line, from 1, in which each key stands, where the text tells.
    """

    path: Path
    config: dict[str, Any]
    trainer: str
    card: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    def place(self, key: str) -> str:
        """Return where a key stands, as ``my.yaml, line 3``; the file alone if that is unknown."""
        line = self.lines.get(key)
        return f"{self.path}, line {line}" if line else str(self.path)


def read(path: Path, trainer: str | None = None) -> TrlFile:
    """Return the configuration in ``path``.

    Args:
        path: A YAML file, or a script that was exported.
        trainer: That it is for; None to find out.

    Raises:
        PrerequisiteError: If there is no such file.
        UsageError: If it is no YAML mapping of TRL keys, or gives one twice, or its keys are of
            several trainers and nothing says which.
    """
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder.",
            hint="Give the YAML file of one configuration, such as one in a run's configs/.",
        )
    check_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == trl_script.SUFFIX:
            return _read_script(path, text, trainer)
        excess = find_excess(text)
        if excess is not None:
            raise UsageError(f"{path}, line {excess[0]}: {excess[1]}.")
        repeated = find_repeated(text)
        if repeated is not None:
            raise UsageError(
                f"{path}, line {repeated[0]}: {repeated[1]}.",
                hint="Keep the one that is meant; trl would take the last without a word.",
            )
        content = yaml.safe_load(text)
    except FileNotFoundError as error:
        raise PrerequisiteError(
            f"there is no file {path}.", hint="Give the YAML file of one configuration."
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{path} cannot be read as YAML: {error}",
            hint="Give the file that `trl sft --config` takes.",
        ) from error
    if not isinstance(content, dict):
        raise UsageError(
            f"{path} holds no mapping of TRL keys.",
            hint="A configuration has one `key: value` a line, such as"
            " `model_name_or_path: Qwen/Qwen3-0.6B`.",
        )
    wrong = next((key for key in content if not isinstance(key, str)), None)
    if wrong is not None:
        raise UsageError(f"{path}: {wrong!r} is no TRL key; keys are texts.")
    return TrlFile(
        path=path,
        config=content,
        trainer=trainer or _named(text) or _told_by_keys(content, path),
        card=_card(text),
        lines=_lines(text),
    )


def _read_script(path: Path, text: str, trainer: str | None) -> TrlFile:
    try:
        if not text.startswith(trl_yaml.MARK):
            raise UsageError("nothing says that autotune wrote it.")
        config = trl_script.config_of(text)
    except UsageError as error:
        raise UsageError(
            f"{path} is no script that autotune exported: {error.message}",
            hint="Give a file of a run's configs/, or a YAML file for trl.",
        ) from error
    return TrlFile(
        path=path,
        config=config,
        trainer=trainer or _named(text) or _told_by_keys(config, path),
        card=_card(text),
        lines=trl_script.lines_of(text),
    )


def _named(text: str) -> str | None:
    """Return the trainer that a file's comment names; None if it names none."""
    found = _COMMENT.search(text) or _TRAINER.search(text)
    return found.group(1) if found else None


def _card(text: str) -> str | None:
    found = _CARD.search(text)
    return found.group(1) if found else None


def _told_by_keys(config: Mapping[str, Any], path: Path) -> str:
    """Return the trainer that knows most of the keys; ``sft`` if it is among several.

    Raises:
        UsageError: If several others know as many.
    """
    unknown = {
        name: len(set(config) - known)
        for name in trainers.BUILTIN
        if (known := trl_keys.known_keys(name))
    }
    least = min(unknown.values(), default=0)
    found = [name for name, count in unknown.items() if count == least]
    if not found or "sft" in found:
        return "sft"
    if len(found) > 1:
        raise UsageError(
            f"{path} does not say which trainer it is for: its keys are those of"
            f" {', '.join(found[:-1])} and {found[-1]}.",
            hint=f"Say which: --trainer {' or --trainer '.join(found)}.",
        )
    return found[0]


def _lines(text: str) -> dict[str, int]:
    """Return the line, from 1, of each key of a mapping's text."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return {
        key.value: key.start_mark.line + 1 for key, _ in pairs if isinstance(key, yaml.ScalarNode)
    }


def hint_for_file(hint: str, path: Path) -> str:
    """Return a hint that was meant for a search in the words of a configuration's file."""
    for words, others in _IN_A_FILE.items():
        hint = hint.replace(words, others.format(path=path))
    return hint
