"""Why a trial of a run is what it is, on the command line; predictions where nothing fits."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_kit import CARD, GIB, SEARCH, Done, on_a_virtual_card, replace_executors

from autotune import screen, standin_probes, tuner, whatif
from autotune.report.model import PICKS, Report
from autotune.testing.fakes import MemoryWall
from autotune.testing.searches import make_answers

DEMO = ("--trials", 3, "--global-batch", 4, "--measured-steps", 4, "--min-coverage", 0.97)
VIRTUAL = (*SEARCH, "--device", CARD)


@dataclass
class Card:
    """A card that is not there: what its searches and explanations run on."""

    searching: dict[str, Any]
    explaining: dict[str, Any]
    search: Callable[..., Done]

    def has(self, weights_gib: int) -> None:
        """Have a model of that size, before and after."""
        wall = MemoryWall(capacity_bytes=23 * GIB, weights_bytes=weights_gib * GIB)
        self.searching["wall"] = self.explaining["wall"] = wall


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Done]) -> Card:
    """Replace the processes that predict, and record command lines as a shell's would be."""
    searching = on_a_virtual_card(monkeypatch)
    shared = {name: value for name, value in searching.items() if name != "made"}
    explaining = replace_executors(monkeypatch, whatif, **shared)

    def search(*options: object, folder: str) -> Done:
        words = (*VIRTUAL, "--run-dir", folder, *options)
        monkeypatch.setattr(sys, "argv", ["autotune", *map(str, words)])
        return cli(*words)

    return Card(searching=searching, explaining=explaining, search=search)


@pytest.mark.parametrize("pick", PICKS)
def test_each_pick_and_its_number_are_the_same(
    pick: str, found: Path, cli: Callable[..., Done]
) -> None:
    number = Report.load(found / "report.json").picks()[pick]
    named, numbered = cli("explain", found, "--pick", pick), cli("explain", found, number)
    assert named.code == numbered.code == 0
    assert named.out == numbered.out
    assert f"Trial {number} [" in named.out
    assert pick in named.out
    record = cli("explain", found, number, "--json").json
    assert record["trial"] == number
    assert pick in record["picked_as"]


def test_every_trial_can_be_explained(found: Path, cli: Callable[..., Done]) -> None:
    assert cli("explain", found).out == cli("explain", found, "--pick", "balanced").out
    for trial in Report.load(found / "report.json").trials:
        done = cli("explain", found, trial.number)
        assert done.code == 0
        assert done.err == ""


@pytest.mark.parametrize("which", ["99", "fastets", "-1"])
def test_an_unknown_trial(which: str, found: Path, cli: Callable[..., Done]) -> None:
    done = cli("explain", found, "--pick", which)
    assert done.code == 2
    assert "highest-fidelity" in done.err
    assert cli("explain", found, "0", "--pick", "fastest").code == 2


def test_a_run_that_is_not_there_or_has_no_trial(found: Path, cli: Callable[..., Done]) -> None:
    assert cli("explain", "nowhere").code == 2
    record = json.loads((found / "report.json").read_text())
    record |= {"trials": [], "pareto_numbers": []}
    (found / "report.json").write_text(json.dumps(record))
    done = cli("explain", found)
    assert done.code == 3
    assert "no trial has ended" in done.err


def test_where_nothing_fits_changes_that_would_are_predicted(
    card: Card, cli: Callable[..., Done]
) -> None:
    # Only the baseline is tried, and it is over the budget.
    assert card.search("--trials", 1, "--memory-budget", "6GiB", folder="none").code == 3
    done = cli("explain", "none")
    assert done.code == 3
    (executor,) = card.explaining["made"]
    assert 0 < len(executor.submitted) <= whatif.MOST_PREDICTIONS
    assert executor.is_shut_down
    words = " ".join(done.out.split())
    assert "Predicted to fit, with the fewest changes of trial 0 first" in words
    record = cli("explain", "none", "--json").json
    sizes = [len(item["changes"]) for item in record["fitting"]]
    assert sizes
    assert sizes == sorted(sizes)
    for item in record["fitting"]:
        assert item["peak_bytes"] <= 6 * GIB
        assert item["source"] == "predicted"
    # What is predicted to fit, does.
    pins = [word for pair in record["fitting"][0]["changes"].items() for word in pin(*pair)]
    assert card.search("--trials", 1, "--memory-budget", "6GiB", *pins, folder="some").code == 0


def pin(name: str, value: object) -> tuple[str, str]:
    return "--pin", f"{name}={value}"


def test_where_no_change_fits_a_card_is_named(card: Card, cli: Callable[..., Done]) -> None:
    card.has(weights_gib=90)
    assert card.search("--trials", 2, folder="none").code == 3
    record = cli("explain", "none", "--json").json
    assert record["fitting"] == []
    peaks = [item["peak_bytes"] for item in record["closest"]]
    assert 0 < len(peaks) <= whatif.MOST_CLOSEST
    assert peaks == sorted(peaks)
    assert 0 < record["num_predicted"] <= whatif.MOST_PREDICTIONS
    assert record["card"]
    done = cli("explain", "none", "--pick", "fastest")
    words = " ".join(done.out.split())
    assert f"that holds it is {record['card']}." in words
    assert "What came closest of them:" in words
    assert "over the budget" in words
    assert "There is no [fastest], since nothing fits" in words


def test_without_predictions_the_run_s_own_evidence_is_told(
    card: Card, cli: Callable[..., Done]
) -> None:
    card.has(weights_gib=90)
    assert card.search("--trials", 2, folder="none").code == 3
    done = cli("explain", "none", "--no-predict")
    assert done.code == 3
    assert card.explaining["made"] == []
    assert "came closest" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("--space quick", "--space sft", "the search space (--space) has other knobs"),
        ("--trials 2", "--trails 2", "the run's command line cannot be read any more"),
        ("autotune search", "python mine.py", "was not started by `autotune search`"),
    ],
)
def test_a_run_that_cannot_be_planned_anew_is_explained_without_predictions(
    before: str, after: str, words: str, card: Card, cli: Callable[..., Done]
) -> None:
    card.has(weights_gib=90)
    assert card.search("--trials", 2, folder="none").code == 3
    run = Path("none/run.json")
    record = json.loads(run.read_text())
    record["command"] = record["command"].replace(shlex.split(record["command"])[0], "autotune", 1)
    assert before in record["command"]
    run.write_text(json.dumps({**record, "command": record["command"].replace(before, after)}))
    done = cli("explain", "none")
    assert done.code == 3
    told = " ".join(done.out.split())
    assert "Nothing was predicted, so that this is the run's own evidence: " in told
    assert words in told
    assert "came closest" in told


def test_settings_that_a_run_did_not_try_can_be_predicted(
    card: Card, cli: Callable[..., Done]
) -> None:
    assert card.search("--trials", 4, folder="some").code == 0
    before = cli("explain", "some", "--json").json
    probes = sorted(Path("some/probes").rglob("*"))
    after = cli("explain", "some", "--predict", "--json").json
    assert after["num_predicted"] > 0
    assert set(after["unknown"]) < set(before["unknown"])
    assert any(item["trial"] is None for item in after["settings"])
    assert sorted(Path("some/probes").rglob("*")) == probes


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Done]) -> Card:
    """Searches on a real device, and explanations on what stands for it."""
    wall = MemoryWall(capacity_bytes=14 * GIB)
    options = {"wall": wall, "answers": make_answers()}
    searching = replace_executors(monkeypatch, tuner, screen, **options)
    explaining = replace_executors(monkeypatch, whatif, **options)

    def search(*options: object, folder: str) -> Done:
        words = (*SEARCH, "--run-dir", folder, "--no-screen", *options)
        monkeypatch.setattr(sys, "argv", ["autotune", *map(str, words)])
        return cli(*words)

    return Card(searching=searching, explaining=explaining, search=search)


def test_what_stands_for_a_real_device_predicts_for_it(
    real: Card, cli: Callable[..., Done]
) -> None:
    assert real.search("--trials", 4, folder="some").code == 0
    record = cli("explain", "some", "--predict", "--json").json
    assert record["num_predicted"] > 0
    assert not any("Nothing was predicted" in note for note in record["notes"])
    guessed = [item for item in record["settings"] if item["trial"] is None]
    assert guessed
    assert {item["source"] for item in guessed} == {"predicted"}
    (note,) = (note for note in record["notes"] if "stands for" in note)
    assert "corrected by 3 trials of the run (memory times" in note
    assert "±25%" in note
    specs = [spec for made in real.explaining["made"] for spec in made.submitted]
    assert specs
    assert all(spec.device.startswith("virtual:") and spec.beyond_device for spec in specs)
    assert all(made.is_shut_down for made in real.explaining["made"])


def test_settings_of_the_demo_s_run_can_be_predicted(
    real: Card, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert real.search("--space", "demo", *DEMO, folder="some").code == 0
    run = Path("some/run.json")
    record = json.loads(run.read_text())
    run.write_text(json.dumps({**record, "command": "autotune demo --trials 3 --seed 0"}))
    found = cli("explain", "some", "--predict", "--json").json
    assert not any("Nothing was predicted" in note for note in found["notes"])
    assert found["num_predicted"] > 0


def test_where_nothing_fits_a_real_device_changes_are_predicted_too(
    real: Card, cli: Callable[..., Done]
) -> None:
    assert real.search("--trials", 1, "--memory-budget", "6GiB", folder="none").code == 3
    done = cli("explain", "none", "--json")
    assert done.code == 3
    assert done.json["fitting"]
    for item in done.json["fitting"]:
        assert item["peak_bytes"] <= 6 * GIB
        assert item["source"] == "predicted"


def test_nothing_stands_for_some_devices(
    real: Card, cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert real.search("--trials", 2, folder="some").code == 0
    monkeypatch.setattr(standin_probes, "not_screened", lambda plan: "it is too strange")
    done = cli("explain", "some", "--predict")
    assert done.code == 0
    words = " ".join(done.out.split())
    assert "nothing can be predicted for the run's device" in words
    assert "it is too strange" in words


@pytest.mark.parametrize(
    "asked", [("--trust-remote-code",), ("--reward", "os:system"), ("--trainer", "mine:Adapter")]
)
def test_code_that_a_run_folder_names_is_not_run_unasked(
    asked: tuple[str, ...], card: Card, cli: Callable[..., Done]
) -> None:
    """The folder may be somebody else's; nothing is made anew from it, and so nothing loaded."""
    assert card.search("--trials", 2, folder="some").code == 0
    record = json.loads(Path("some/run.json").read_text())
    record["command"] = shlex.join([*shlex.split(record["command"]), *asked])
    Path("some/run.json").write_text(json.dumps(record))
    done = cli("explain", "some", "--predict")
    words = " ".join(done.out.split())
    assert "the run's command line has code run" in words
    assert "--trust-remote-code if you trust it" in words
    assert card.explaining["made"] == []
