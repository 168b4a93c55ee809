"""What the tests of everything that is drawn into a file share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from autotune.errors import PrerequisiteError, UsageError

PNG, SVG = b"\x89PNG", b"<?xml"
"""What a file of each kind begins with."""


def suffix_refused() -> AbstractContextManager[Any]:
    """Expect that the name's suffix is refused, and those that can be drawn are named."""
    return pytest.raises(UsageError, match=r"End the name in \.png or \.svg")


def matplotlib_missed() -> AbstractContextManager[Any]:
    """Expect that the missing package is told, and how to install it."""
    return pytest.raises(PrerequisiteError, match=r"pip install 'trl-autotune\[plot\]'")
