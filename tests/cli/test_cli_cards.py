"""One search on several cards, as a user and as a script sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_kit import GIB, SEARCH, Done, replace_executors

from autotune import card_search, doctor, tuner
from autotune.probe.result import Outcome
from autotune.report.model import Report
from autotune.testing.fakes import MemoryWall
from autotune.testing.searches import make_card_answers

SMALL, LARGE = "virtual:rtx-4090", "virtual:h100-sxm-80gb"
BOTH = f"{SMALL},{LARGE}"
CARDS = (*SEARCH, "--device", BOTH)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the processes that predict; the options may be changed by a test."""
    walls = {
        SMALL: MemoryWall(capacity_bytes=24 * GIB, token_time_s=2e-4),
        LARGE: MemoryWall(capacity_bytes=80 * GIB, token_time_s=3e-5),
    }
    modules = (card_search, tuner, doctor)
    return replace_executors(monkeypatch, *modules, walls=walls, answers=make_card_answers())


@pytest.fixture
def found(machine: dict[str, Any], cli: Callable[..., Done]) -> Path:
    """Return the folder of a finished comparison."""
    assert cli(*CARDS, "--trials", 3, "--run-dir", "found").code == 0
    return Path("found")


def test_a_comparison_is_shown_and_each_card_has_a_line_above_its_progress(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*CARDS, "--trials", 3, "--run-dir", "here")
    assert done.code == 0, done.err
    assert "Smallest card on which it fits: rtx-4090" in done.out
    assert "Fastest: h100-sxm-80gb" in done.out
    assert "All figures are predicted" in done.out
    heads = [line for line in done.err.splitlines() if line.startswith("== card ")]
    assert heads == [
        "== card 1 of 2: rtx-4090 (NVIDIA GeForce RTX 4090, 23.52 GiB)",
        "== card 2 of 2: h100-sxm-80gb (NVIDIA H100 80GB HBM3, 79.19 GiB)",
    ]
    assert done.err.count("starting the worker") == 1
    assert done.err.count("note: All figures are predicted") == 1
    assert f"run folder: {Path('here').resolve()}" in done.err
    assert len(machine["made"]) == 1
    assert "\x1b" not in done.out + done.err


def test_json_is_the_comparison_and_nothing_else(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    arguments = ("--trials", 2, "--run-dir", "here", "--json", "--price", "4090=0.5")
    facts = cli(*CARDS, *arguments).json
    assert (facts["cheapest"], facts["fastest"]) == ("rtx-4090", "h100-sxm-80gb")
    assert [card["num_trials"] for card in facts["cards"]] == [2, 2]
    assert facts == cli("report", "here", "--json").json


def test_one_card_that_is_named_twice_is_an_ordinary_search(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    device = "virtual:rtx-4090,virtual:4090"
    done = cli(*SEARCH, "--device", device, "--trials", 2, "--run-dir", "here")
    assert done.code == 0, done.err
    assert Report.load("here/report.json").device["name"] == SMALL


@pytest.mark.parametrize(
    ("device", "named"),
    [
        ("cpu,virtual:rtx-4090", "--device cpu is a real device"),
        ("cuda:0,cuda:1", "--device cuda:0 is a real device"),
        ("virtual:rtx-4090,virtual:rtx-9999", "unknown card 'rtx-9999'"),
    ],
)
def test_devices_that_cannot_be_compared_are_refused(
    device: str, named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, "--device", device, "--run-dir", "here")
    assert done.code == 2
    assert named in done.err
    assert "hint: " in done.err
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cpu", "--price", "rtx-4090=1"], "prices are for a comparison"),
        (["--device", BOTH, "--price", "rtx-4090"], "takes CARD=PER_HOUR"),
        (["--device", BOTH, "--price", "t4=1"], "a price for t4, which is not compared"),
        (["--device", BOTH, "--prices", "gone.toml"], "gone.toml cannot be read"),
    ],
)
def test_prices_that_cannot_be_are_refused(
    arguments: list[str], named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, *arguments, "--run-dir", "here")
    assert done.code == 2
    assert named in done.err


def test_prices_from_a_file_and_beside_it(found: Path, cli: Callable[..., Done]) -> None:
    Path("prices.toml").write_text("rtx-4090 = 0.4\nh100-sxm-80gb = 2.5\nh200 = 4\n")
    facts = cli("report", found, "--json", "--prices", "prices.toml", "--price", "4090=9").json
    prices = {card["name"]: card["price_per_hour"] for card in facts["cards"]}
    assert prices == {"rtx-4090": 9.0, "h100-sxm-80gb": 2.5}
    assert cli("report", found, "--json").json["cheapest"] is None  # nothing was written
    assert cli("report", found / "rtx-4090", "--price", "4090=9").code == 2


def test_a_dry_run_plans_each_card_and_writes_nothing(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*CARDS, "--dry-run", "--trials", 4, "--run-dir", "here")
    assert done.code == 0, done.err
    assert done.out.count("== card ") == 2
    assert "each with the trials and the time that were given" in done.out
    facts = cli(*CARDS, "--dry-run", "--trials", 4, "--json").json
    assert [card["plan"]["trials"] for card in facts["cards"]] == [4, 4]
    assert facts["worst_case_time_s"] == 2 * 4 * 300.0
    assert list(Path().iterdir()) == []


def test_a_dry_run_tells_of_a_card_that_cannot_be_searched(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    search = (*SEARCH, "--device", "virtual:t4,virtual:rtx-4090", "--dry-run")
    done = cli(*search, "--pin", "dtype=bfloat16")
    assert done.code == 0
    assert "cannot be searched: " in done.out
    only_old = (*SEARCH, "--device", "virtual:t4,virtual:v100", "--dry-run")
    assert cli(*only_old, "--pin", "dtype=bfloat16").code == 2


def test_nothing_that_fits_anywhere_is_3(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    wall = MemoryWall(capacity_bytes=24 * GIB, weights_bytes=200 * GIB)
    machine["walls"] = {**machine["walls"], SMALL: wall}
    done = cli(*CARDS, "--trials", 3, "--run-dir", "one")
    assert done.code == 0
    assert "rtx-4090: none of" in " ".join(done.out.split())
    machine["walls"] = dict.fromkeys((SMALL, LARGE), wall)
    done = cli(*CARDS, "--trials", 3, "--run-dir", "none")
    assert done.code == 3
    assert "It fits on none of these cards." in done.out
    assert "error: it fits on none of 2 cards." in done.err


def test_a_search_that_breaks_on_all_is_an_error(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["fault"] = lambda spec: Outcome.UNSUPPORTED if spec.device == SMALL else None
    done = cli(*CARDS, "--trials", 2, "--run-dir", "one")
    assert done.code == 0
    assert "rtx-4090: the baseline is unsupported" in done.err
    machine["fault"] = lambda spec: Outcome.UNSUPPORTED
    done = cli(*CARDS, "--trials", 2, "--run-dir", "all", "--json")
    assert done.code == 1
    assert done.json["error"]["type"] == "BaselineError"


def test_an_interrupted_comparison_goes_on(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    def interrupt(spec: Any) -> None:
        if spec.device == LARGE:
            raise KeyboardInterrupt

    machine["fault"] = interrupt
    done = cli(*CARDS, "--trials", 2, "--run-dir", "here")
    assert done.code == 130
    assert "Interrupted; this is what is known so far." in done.out
    assert "interrupted; continue with: " in done.err
    machine["fault"] = None
    done = cli(*CARDS, "--trials", 3, "--run-dir", "here", "--resume", "--json")
    assert done.code == 0, done.err
    # And on each what is best on the other.
    assert all(3 <= card["num_trials"] <= 5 for card in done.json["cards"])


def test_the_folder_is_reported_and_exported_from(found: Path, cli: Callable[..., Done]) -> None:
    assert "Smallest card on which it fits: rtx-4090" in cli("report", found).out
    assert "NVIDIA GeForce RTX 4090 (virtual)" in cli("report", found / "rtx-4090").out
    for name in ("h100-sxm-80gb", "virtual:h100-sxm-80gb"):
        done = cli("export", found, "--card", name, "--pick", "fastest")
        assert done.code == 0, done.err
    report = Report.load(found / "h100-sxm-80gb" / "report.json")
    assert yaml.safe_load(done.out) == report.pick("fastest").config
    assert cli("export", found, "--card", "rtx-4090", "-o", "out.yaml").code == 0
    assert Path("out.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("export", "found"), "holds searches on several cards: rtx-4090, h100-sxm-80gb"),
        (("export", "found", "--card", "t4"), "unknown card 't4'"),
        (("export", "found/rtx-4090", "--card", "rtx-4090"), "holds a single search"),
        (("verify", "found"), "holds searches on several cards"),
    ],
)
def test_commands_for_one_search_say_which_folder_to_give(
    arguments: tuple[str, ...], named: str, found: Path, cli: Callable[..., Done]
) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert named in done.err


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 99},
        {"cards": 3},
        {"cards": [{"name": "../elsewhere"}]},
        {"cards": [{"name": "..", "device": "d", "label": "l", "memory_bytes": 1}]},
        {"cards": [{"name": "a", "device": "d", "label": "l", "memory_bytes": "many"}]},
    ],
    ids=str,
)
def test_a_damaged_record_is_an_error(
    change: dict[str, Any], found: Path, cli: Callable[..., Done]
) -> None:
    file = found / "cards.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    done = cli("report", found)
    assert done.code == 1
    assert "cards.json" in done.err


def test_a_damaged_report_is_that_card_s_error(found: Path, cli: Callable[..., Done]) -> None:
    (found / "rtx-4090" / "report.json").write_text("{")
    done = cli("report", found)
    assert done.code == 0
    assert "rtx-4090: its search broke: the report" in " ".join(done.out.split())
    assert "Smallest card on which it fits: h100-sxm-80gb" in done.out
