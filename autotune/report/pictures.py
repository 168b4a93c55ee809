"""Pictures in a file: whether one can be drawn under a name, the empty figure, and writing it."""

from __future__ import annotations

import io
from importlib import import_module
from pathlib import Path
from typing import Any

from autotune.errors import PrerequisiteError, UsageError
from autotune.probe import trl_yaml

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> Any:
    """Return matplotlib's module of figures, if a plot can be written under that name.

    Raises:
        UsageError: If the suffix is neither .png nor .svg.
        PrerequisiteError: If matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"a plot cannot be written as {path.name!r}.",
            hint=f"End the name in {' or '.join(SUFFIXES)}.",
        )
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise PrerequisiteError(
            "drawing needs matplotlib, which is not installed.",
            hint="Install it with: pip install 'trl-autotune[plot]'",
        ) from error


def new_figure(path: Path) -> Any:
    """Return an empty figure for a plot that is to be written under that name.

    Raises:
        UsageError: If the suffix is neither .png nor .svg.
        PrerequisiteError: If matplotlib is missing.
    """
    # A Figure of its own, not pyplot: no display is needed and no global state is touched.
    return check_plot(path).Figure(figsize=(9, 4.5), layout="constrained")


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure in the format that the suffix names, and return the path.

    Raises:
        JournalError: If it cannot be written, such as on a full disk.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower()[1:], dpi=144)
    trl_yaml.write_bytes(path, buffer.getvalue())
    return path
