"""The report's page in a real browser; skipped where playwright or Chromium is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "report"))
from report_factory import make_failure, make_report, make_trial, mixed_trials

from autotune.report import html
from autotune.units import GIB

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("plotly")
pytest.importorskip("jinja2")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NARROW, WIDE = (390, 844), (1280, 800)
NASTY = "org/<script>window.hurt = 1</script>"
LONG = {f"a_setting_with_a_long_name_{number}": f"value-{number}" for number in range(6)}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: see CONTRIBUTING.md"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return pages of searches of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    trials = [*mixed_trials(), make_trial(9, 1200, 13.0, changed=LONG)]
    reports = {
        "mixed": make_report(
            trials, model=NASTY, data={"length_counts": [[1, 300, 9], [301, 600, 2]]}
        ),
        "failures": make_report([make_failure(number) for number in range(4)]),
        "empty": make_report([], finished=False),
    }
    points = [html.PredictedPoint(label="<b>k=1", peak_bytes=9 * GIB, rate=1500)]
    return {
        name: html.write(report, folder / f"{name}.html", points if name == "mixed" else ())
        for name, report in reports.items()
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Return a function that opens a file and fails if it complains or asks for anything else."""
    contexts, wrong = [], []

    def opened(
        path: Path, size: tuple[int, int] = WIDE, scheme: str = "light", **more: Any
    ) -> Any:
        width, height = size
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **more
        )
        contexts.append(context)
        page = context.new_page()
        address = path.as_uri()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda request: (
                wrong.append(request.url)
                if request.url.partition("#")[0] not in (address, "data:,")
                else None
            ),
        )
        page.goto(address)
        if page.locator("#plot").count() and more.get("java_script_enabled", True):
            page.wait_for_selector("#plot .point")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [NARROW, WIDE])
@pytest.mark.parametrize("name", ["mixed", "failures", "empty"])
def test_a_page_fits_its_window_and_asks_for_nothing(
    visit: Any, pages: dict[str, Path], name: str, size: tuple[int, int], scheme: str
) -> None:
    page = visit(pages[name], size, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate("window.hurt") is None
    assert page.locator("h1").is_visible()


def test_every_point_is_drawn_once(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(pages["mixed"])
    # Seven trials with figures, two that ran out of memory, one prediction.
    assert page.locator("#plot .point").count() == 7 + 2 + 1
    assert page.locator("#plot .modebar a[href]").count() == 0


def wait_for(page: Any, condition: str) -> None:
    """Wait until a condition holds; the page's policy forbids playwright's own way, an eval."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"in vain waited for: {condition}")


def test_the_picture_follows_light_and_dark(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(pages["mixed"])
    ground = "document.querySelector('#plot .main-svg').style.background"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    wait_for(page, f"{ground} !== {light!r}")
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert page.evaluate(ground) == body


def test_a_point_tells_its_settings(visit: Any, pages: dict[str, Path]) -> None:
    for size in (WIDE, NARROW):
        page = visit(pages["mixed"], size)
        page.locator("#plot").scroll_into_view_if_needed()
        number = "document.querySelector('#plot').data.findIndex((t) => t.name === 'Pareto set')"
        page.evaluate(f"Plotly.Fx.hover('plot', [{{curveNumber: {number}, pointNumber: 0}}])")
        words = page.locator("#plot .hovertext").text_content()
        assert "trial 1: highest-fidelity, Pareto set" in words
        assert "per_device_train_batch_size=8" in words
        box = page.locator("#plot .hovertext").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]


def test_a_selected_point_leads_to_its_row(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(pages["mixed"])
    page.locator("#plot").scroll_into_view_if_needed()
    page.evaluate(
        "document.querySelector('#plot').emit('plotly_click', {points: [{customdata: 4}]})"
    )
    assert page.locator("#trial-4.found").count() == 1
    assert page.locator("#trial-4").evaluate("(e) => e.getBoundingClientRect().top") < WIDE[1]


def test_a_configuration_can_be_copied(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(pages["mixed"], permissions=["clipboard-read", "clipboard-write"])
    page.click("#picks a[href='#config-2']")
    box = page.locator("#config-2 .code").nth(1)
    box.locator("button").click()
    wait_for(
        page, "document.querySelectorAll('#config-2 .code button')[1].textContent === 'copied'"
    )
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == box.locator("pre").text_content()
    assert "optim: paged_adamw_8bit" in copied


def test_without_a_clipboard_the_text_is_selected(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(pages["mixed"])
    page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined});"
        "document.execCommand = () => false"
    )
    box = page.locator("#config-3 .code").nth(1)
    box.locator("button").click()
    wait_for(page, "getSelection().toString().includes('max_length: 512')")
    assert "Ctrl+C" in box.locator("button").text_content()


def numbers(page: Any) -> list[int]:
    return [int(text) for text in page.locator("#table tbody:visible th").all_text_contents()]


def test_the_table_sorts_both_ways_by_mouse_and_keyboard(
    visit: Any, pages: dict[str, Path]
) -> None:
    page = visit(pages["mixed"])
    assert numbers(page) == list(range(10))
    header = page.locator("#table th", has_text="tokens/s").first
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert numbers(page)[:3] == [7, 3, 1]
    unknown = numbers(page)[-3:]
    header.locator("button").focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    assert numbers(page)[:3] == [2, 4, 0]
    assert numbers(page)[-3:] == unknown == [5, 6, 8]


def test_the_table_is_filtered_by_outcome(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(pages["mixed"])
    page.select_option("#filter", "device_oom")
    assert numbers(page) == [5, 6]
    assert page.locator("#shown").text_content() == "2 of 10 shown"
    page.select_option("#filter", "=set")
    assert numbers(page) == [0, 1, 2, 3]


def test_it_is_read_without_scripts(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(pages["mixed"], java_script_enabled=False)
    assert page.locator("#table tbody").count() == 10
    assert page.locator("noscript").is_visible()
    page.locator("#config-2 summary").click()
    assert page.locator("#config-2 pre").nth(1).is_visible()
    assert page.locator("button:visible").count() == 0
    assert not page.locator("#tools").is_visible()


def test_paper_is_white_and_holds_all(visit: Any, pages: dict[str, Path]) -> None:
    page = visit(pages["mixed"], WIDE, "dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    light = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper')")
    assert light.strip() == "#fcfcfa"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    dark = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper')")
    assert dark != light
