"""What ``report --html`` may not replace."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_kit import Done

pytest.importorskip("plotly")
pytest.importorskip("jinja2")


def test_a_page_replaces_a_page_alone(found: Path, cli: Callable[..., Done]) -> None:
    page = Path("page.html")
    assert cli("report", found, "--html", page).code == 0
    assert cli("report", found, "--html", page).code == 0
    before = (found / "report.json").read_bytes()
    done = cli("report", found, "--html", found / "report.json")
    assert done.code == 2
    assert "no page of a report" in done.err
    assert (found / "report.json").read_bytes() == before


def test_what_is_no_regular_file_is_left_alone(found: Path, cli: Callable[..., Done]) -> None:
    os.mkfifo("pipe")
    done = cli("report", found, "--html", "pipe")
    assert done.code == 2
    assert "is no file" in done.err
    assert Path("pipe").is_fifo()
