"""TRL's keys and their types, read from the installed source: importing it would load torch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FILES = (
    ("trl", "trainer/{trainer}_config.py"),
    ("trl", "experimental/{trainer}/{trainer}_config.py"),
    ("trl", "trainer/base_config.py"),
    ("trl", "trainer/model_config.py"),
    ("trl", "scripts/utils.py"),
    ("trl", "scripts/{trainer}.py"),
    ("transformers", "training_args.py"),
)
_SCRIPTS = {"online_dpo": "grpo"}
"""Trainers without a script of their own, with the one whose arguments they take as well."""

_PROOF = {"learning_rate", "model_name_or_path", "dataset_name", "output_dir"}
"""One from each place; without them the source is laid out in another way than expected."""


def known_keys(trainer: str) -> frozenset[str]:
    """Return the keys that ``trl <trainer> --config FILE`` takes.

    Returns:
        More than it takes rather than less; empty if they cannot be told from here.
    """
    return frozenset(_annotations(trainer))


def refuse_value(trainer: str, key: str, value: Any) -> str | None:
    """Return why ``key`` cannot be ``value``; None if it can, or if it cannot be told from here.

    Only keys of one plain type are looked at, and only for what TRL's own parser refuses: texts
    are read as that type, and no list or mapping is.
    """
    kinds = [part for part in _annotations(trainer).get(key, ()) if part != "None"]
    if len(kinds) != 1 or kinds[0] not in _READERS or value is None:
        return None
    what, read = _READERS[kinds[0]]
    if isinstance(value, str):
        try:
            read(value)
        except ValueError:
            return f"{key} is {value!r}, not {what}"
    if isinstance(value, list | dict):
        return f"{key} is a {'list' if isinstance(value, list) else 'mapping'}, not {what}"
    return None


def _annotations(trainer: str) -> dict[str, tuple[str, ...]]:
    """Return each key with the types that its annotation joins; empty if that cannot be told."""
    found: dict[str, tuple[str, ...]] = {"env": ("dict",)}
    has_own = False
    for package, pattern in _FILES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return {}
        named = _SCRIPTS.get(trainer, trainer) if "scripts/" in pattern else trainer
        path = Path(spec.origin).parent / pattern.format(trainer=named)
        if path.exists():
            found |= _fields(path)
            has_own = has_own or pattern.endswith("{trainer}_config.py")
    return found if has_own and found.keys() >= _PROOF else {}


def _read_bool(text: str) -> bool:
    if text.lower() not in _BOOLS:
        raise ValueError(text)
    return True


_BOOLS = frozenset({"yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"})
"""What the parser of transformers reads as one."""

_READERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "float": ("a number", float),
    "int": ("a whole number", int),
    "bool": ("true or false", _read_bool),
}


def _fields(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the annotated names in all classes of a file, which is what dataclasses have."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    return {
        statement.target.id: tuple(ast.unparse(statement.annotation).split(" | "))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
