"""The option that ends a search before its budget."""

from __future__ import annotations

from autotune.cli import search
from autotune.listener import DEFAULT_MIN_GAIN


def test_the_default_is_that_of_the_python_api() -> None:
    assert search.DEFAULT_MIN_GAIN == DEFAULT_MIN_GAIN
