from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files anew, then compare"
    )


@pytest.fixture
def golden(request):
    """Return a check that a text equals the file of that name in this folder."""

    def check(name: str, text: str) -> None:
        path = FOLDER / name
        if request.config.getoption("update_golden", default=False):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{name} is missing; run: pytest tests/golden --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return check
