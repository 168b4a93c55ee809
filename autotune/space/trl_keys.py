"""The keys that the installed TRL knows, read from its source: importing it would load torch."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

_FILES = (
    ("trl", "trainer/{trainer}_config.py"),
    ("trl", "experimental/{trainer}/{trainer}_config.py"),
    ("trl", "trainer/base_config.py"),
    ("trl", "trainer/model_config.py"),
    ("trl", "scripts/utils.py"),
    ("trl", "scripts/{trainer}.py"),
    ("transformers", "training_args.py"),
)
_PROOF = {"learning_rate", "model_name_or_path", "dataset_name", "output_dir"}
"""One from each place; without them the source is laid out in another way than expected."""


def known_keys(trainer: str) -> frozenset[str]:
    """Return the keys that ``trl <trainer> --config FILE`` takes.

    Returns:
        More than it takes rather than less; empty if they cannot be told from here.
    """
    found = {"env"}
    for package, pattern in _FILES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return frozenset()
        path = Path(spec.origin).parent / pattern.format(trainer=trainer)
        if path.exists():
            found |= _fields(path)
    return frozenset(found) if found >= _PROOF else frozenset()


def _fields(path: Path) -> set[str]:
    """Return the annotated names in all classes of a file, which is what dataclasses have."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return set()
    return {
        statement.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
