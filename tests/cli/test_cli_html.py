"""``autotune report --html``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import SEARCH, Done

from autotune.testing.fakes import MemoryWall

GIB = 1 << 30


@pytest.fixture
def page() -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")


@pytest.mark.usefixtures("page")
def test_a_page_is_written_beside_the_text(found: Path, cli: Callable[..., Done]) -> None:
    plain = cli("report", found)
    done = cli("report", found, "--html", "report.html")
    assert (done.code, done.out) == (0, plain.out)
    assert done.err == "wrote report.html\n"
    text = Path("report.html").read_text()
    assert "some/model" in text
    assert "Lengths of the data" in text
    assert 'class="histogram"' in text  # a search keeps the lengths that it read
    again = cli("report", found / "report.json", "--html", "report.html", "--json")
    assert again.code == 0
    assert again.json["model"] == "some/model"


@pytest.mark.usefixtures("page")
def test_a_search_in_which_nothing_fits_has_a_page(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["wall"] = MemoryWall(capacity_bytes=GIB // 4)
    assert cli(*SEARCH, "--trials", 3, "--run-dir", "none").code == 3
    assert cli("report", "none", "--html", "none.html").code == 0
    assert "Nothing fits" in Path("none.html").read_text()


@pytest.mark.usefixtures("page")
def test_where_a_page_cannot_be_written_nothing_is_shown(
    found: Path, cli: Callable[..., Done]
) -> None:
    for name, words in (("nowhere/report.html", "no folder nowhere"), (".", "is a folder")):
        done = cli("report", found, "--html", name)
        assert (done.code, done.out) == (2, "")
        assert "--html" in done.err
        assert words in done.err


def test_without_the_packages_it_says_what_to_install(
    found: Path, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    done = cli("report", found, "--html", "report.html")
    assert done.code == 2
    assert "pip install 'trl-autotune[html]'" in done.err
    assert not Path("report.html").exists()
