"""Searches on several cards through the Python API, on cards that do not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cards_kit import DEVICES, TOO_LARGE, WALLS, make_executor, make_search, names

import autotune
from autotune.card_search import command_for, named_cards
from autotune.errors import (
    BaselineError,
    JournalError,
    StudyMismatchError,
    UnknownNameError,
    UsageError,
)
from autotune.listener import Budget
from autotune.plan import Plan
from autotune.probe.result import Outcome
from autotune.probe.spec import ProbeSpec
from autotune.report.cards import CardComparison
from autotune.report.model import Report
from autotune.runfolder import RunFolder
from autotune.testing.contexts import make_context, make_model
from autotune.testing.searches import make_card_answers

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def failing_on(device: str, outcome: Outcome | None = None) -> Callable[[ProbeSpec], Any]:
    """Return a fault of the probes on one card: an outcome, or an interrupt."""

    def fault(spec: ProbeSpec) -> Outcome | None:
        if spec.device != device:
            return None
        if outcome is None:
            raise KeyboardInterrupt
        return outcome

    return fault


# --- what a search leaves ------------------------------------------------------------------------


def test_each_card_has_an_ordinary_run_folder_of_its_own(run: Path) -> None:
    executor = make_executor()
    found = make_search(run, executor).search(Budget(3))
    assert set(names(found)) == {"rtx-4090", "a100-80gb", "h100-sxm-80gb"}
    assert {path.name for path in run.iterdir()} == {*names(found), "cards.json", ".lock"}
    for card in found.cards:
        report = Report.load(run / card.name / "report.json")
        assert report == card.report
        assert report.finished
        assert len(report.trials) >= 3
        assert report.device["name"] == card.device
        assert (run / card.name / "configs" / "best.yaml").is_file()
    assert {spec.device for spec in executor.submitted} == set(DEVICES)


def test_the_data_is_prepared_once_and_the_executor_stays_up(run: Path) -> None:
    executor = make_executor()
    make_search(run, executor).search(Budget(2))
    tasks = [name for name, _ in executor.tasks]
    assert tasks.count("prepare") == 1
    assert tasks.count("describe") == 3
    assert not executor.is_shut_down


def test_the_record_names_the_runs(run: Path) -> None:
    make_search(run, prices={"4090": 0.4}).search(Budget(2))
    record = json.loads((run / "cards.json").read_text())
    assert record["schema"] == 1
    assert [card["name"] for card in record["cards"]] == [item[8:] for item in DEVICES]
    assert [card["price_per_hour"] for card in record["cards"]] == [0.4, None, None]


def test_one_card_s_search_goes_on_by_itself(run: Path) -> None:
    make_search(run).search(Budget(2))
    from autotune.tuner import Tuner

    report = Tuner(
        "some/model",
        "some/rows",
        space="quick",
        device=DEVICES[0],
        executor=make_executor(),
        run_dir=run / "rtx-4090",
        min_coverage=0.0,
        resume=True,
    ).search(Budget(4))
    assert len(report.trials) == 4


def test_the_function_is_exported_and_takes_the_tuner_s_arguments(run: Path) -> None:
    found = autotune.compare_cards(
        "some/model",
        "some/rows",
        ["rtx-4090", "virtual:h100-sxm-80gb"],
        budget=Budget(3),
        run_dir=run,
        space="quick",
        pins={"adaptation": "lora"},
        executor=make_executor(),
        min_coverage=0.0,
    )
    assert isinstance(found, autotune.CardComparison)
    assert found.fastest is not None
    assert found.fastest.name == "h100-sxm-80gb"
    for card in found.cards:
        assert isinstance(card, autotune.CardResult)
        assert card.full_fits is None  # nobody looked


# --- cards ---------------------------------------------------------------------------------------


def test_names_of_one_card_count_once() -> None:
    found = named_cards(["4090", "virtual:rtx-4090", "RTX 4090", "virtual:24GiB"])
    assert [(card.name, card.device) for card in found] == [
        ("rtx-4090", "virtual:rtx-4090"),
        ("24GiB", "virtual:24GiB"),
    ]


def test_cards_of_two_files_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    files = []
    for folder, size in (("a", 9_000_000_000), ("b", 8_000_000_000)):
        (tmp_path / folder).mkdir()
        files.append(tmp_path / folder / "work.toml")
        files[-1].write_text(f'base = "4090"\nmemory_bytes = {size}\n')
    found = named_cards([str(file) for file in files])
    assert [card.name for card in found] == ["work-2", "work-3"]  # work/ is taken


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "auto", "mps", "xpu"])
def test_a_real_device_is_refused_beside_others(device: str) -> None:
    with pytest.raises(UsageError, match="real device") as caught:
        named_cards(["virtual:rtx-4090", device])
    assert f"Search on {device} alone" in caught.value.hint


def test_an_unknown_card_is_refused_before_anything_is_done(run: Path) -> None:
    with pytest.raises(UnknownNameError, match="rtx-9999"):
        make_search(run, devices=("rtx-4090", "rtx-9999"))
    with pytest.raises(UsageError, match="no card"):
        make_search(run, devices=())
    assert not run.exists()


# --- cards on which it does not fit, or the search breaks ----------------------------------------


def test_a_card_on_which_nothing_fits_is_a_row_and_the_others_go_on(run: Path) -> None:
    walls = {**WALLS, "virtual:rtx-4090": TOO_LARGE}
    found = make_search(run, make_executor(walls=walls)).search(Budget(4))
    card = found.card("rtx-4090")
    assert card is not None
    assert card.fits is False
    assert card.full_fits is False
    assert card.fastest is None
    assert {item.name for item in found.fitting} == {"a100-80gb", "h100-sxm-80gb"}
    (note,) = (note for note in found.notes if note.startswith("rtx-4090: "))
    assert "came closest" in note


def test_a_card_whose_memory_the_weights_exceed_does_not_fit(run: Path) -> None:
    large = make_context(model=make_model(num_parameters=7_000_000_000))
    executor = make_executor(answers=make_card_answers(large))
    devices = ("virtual:3GiB", "virtual:rtx-4090")
    found = make_search(run, executor, devices=devices).search(Budget(2))
    card = found.card("3GiB")
    assert card is not None
    assert card.fits is False
    assert not card.is_broken
    assert any("3GiB: does not fit: a budget of" in note for note in found.notes)
    assert not (run / "3GiB").exists()


def test_a_broken_search_is_a_row_and_the_others_go_on(run: Path) -> None:
    heard = []
    executor = make_executor(fault=failing_on(DEVICES[1], Outcome.UNSUPPORTED))
    search = make_search(
        run, executor, on_failure=lambda card, error: heard.append((card.name, error))
    )
    found = search.search(Budget(2))
    card = found.card("a100-80gb")
    assert card is not None
    assert card.is_broken
    assert card.fits is None
    assert card.failure is not None
    assert card.failure.kind == "BaselineError"
    assert [name for name, _ in heard] == ["a100-80gb"]
    assert len(found.fitting) == 2
    assert any("its search broke: the baseline is unsupported" in note for note in found.notes)


def test_where_all_break_it_is_the_first_one_s_error(run: Path) -> None:
    executor = make_executor(fault=lambda spec: Outcome.UNSUPPORTED)
    with pytest.raises(BaselineError):
        make_search(run, executor).search(Budget(2))
    assert (run / "cards.json").exists()  # what was tried is in there


def test_a_request_that_no_card_can_serve_leaves_no_folder(run: Path) -> None:
    with pytest.raises(UsageError, match="bfloat16"):
        make_search(run, devices=("t4", "v100"), pins={"dtype": "bfloat16"}).search(Budget(2))
    assert not run.exists()


def test_a_request_that_one_card_cannot_serve_is_that_card_s_error(run: Path) -> None:
    found = make_search(run, devices=("t4", "rtx-4090"), pins={"dtype": "bfloat16"}).search(
        Budget(2)
    )
    card = found.card("t4")
    assert card is not None
    assert card.is_broken
    assert [item.name for item in found.fitting] == ["rtx-4090"]


def test_data_that_cannot_be_read_ends_it_at_once(run: Path) -> None:
    def refuse(request: Any) -> Any:
        raise UsageError("the data has no rows.")

    executor = make_executor(answers={**make_card_answers(), "prepare": refuse})
    with pytest.raises(UsageError, match="no rows"):
        make_search(run, executor).search(Budget(2))
    assert [name for name, _ in executor.tasks] == ["prepare"]
    assert not run.exists()


# --- interrupting and resuming -------------------------------------------------------------------


def interrupted(run: Path) -> CardComparison:
    return make_search(run, make_executor(fault=failing_on(DEVICES[1]))).search(Budget(3))


def test_an_interrupt_keeps_what_is_there(run: Path) -> None:
    found = interrupted(run)
    assert found.interrupted
    first, second, third = (found.card(device[8:]) for device in DEVICES)
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.fits
    assert (second.fits, third.fits) == (None, None)
    assert third.report is None
    assert any("h100-sxm-80gb: not searched yet" in note for note in found.notes)


def test_resuming_goes_on_with_all_of_them(run: Path) -> None:
    interrupted(run)
    executor = make_executor()
    found = make_search(run, executor, resume=True).search(Budget(5))
    assert not found.interrupted
    for card in found.cards:
        assert card.report is not None
        assert len(card.report.trials) >= 5
        numbers = [trial.number for trial in card.report.trials]
        assert numbers == list(range(len(numbers)))
    first = [spec.probe_id for spec in executor.submitted if spec.device == DEVICES[0]]
    assert first[:2] == ["0003", "0004"]  # three were done


def test_a_resumed_search_takes_further_cards_and_keeps_the_prices(run: Path) -> None:
    make_search(run, devices=DEVICES[:1], prices={"rtx-4090": 0.4}).search(Budget(2))
    found = make_search(run, devices=DEVICES[1:2], resume=True).search(Budget(2))
    assert set(names(found)) == {"rtx-4090", "a100-80gb"}
    assert found.cheapest is not None
    assert found.cheapest.name == "rtx-4090"


def test_another_request_does_not_resume(run: Path) -> None:
    make_search(run, devices=DEVICES[:2]).search(Budget(2))
    with pytest.raises(StudyMismatchError, match="global_batch"):
        make_search(run, devices=DEVICES, resume=True, global_batch=64).search(Budget(2))
    with pytest.raises(UsageError, match="holds a search already"):
        make_search(run).search(Budget(2))


def test_an_ordinary_run_is_not_taken_for_one_of_several(run: Path) -> None:
    RunFolder(run).start(resume=False)
    (run / "report.json").touch()
    with pytest.raises(UsageError, match=r"cards\.json"):
        make_search(run, resume=True).search(Budget(2))


# --- planning ------------------------------------------------------------------------------------


def test_plans_are_made_for_each_card_and_nothing_is_written(run: Path) -> None:
    executor = make_executor()
    plans = make_search(
        run, executor, devices=("t4", "rtx-4090"), pins={"dtype": "bfloat16"}
    ).plans()
    assert isinstance(plans["t4"], UsageError)
    assert isinstance(plans["rtx-4090"], Plan)
    assert [name for name, _ in executor.tasks].count("prepare") == 1
    assert executor.submitted == []
    assert not run.exists()


def test_plans_of_a_search_to_resume_are_checked(run: Path) -> None:
    make_search(run).search(Budget(2))
    assert len(make_search(run, resume=True).plans()) == 3
    (run / "rtx-4090" / "probes.jsonl").write_text("nonsense\n" * 2)
    assert isinstance(make_search(run, resume=True).plans()["rtx-4090"], JournalError)


# --- command lines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ("autotune search a b --device x,y --trials 3", "autotune search a b --trials 3"),
        ("autotune search a b --device=x,y --price x=1", "autotune search a b"),
        ("autotune search a b --resume --run-dir old --prices p.toml", "autotune search a b"),
        ("", None),
        ("an open 'quote", None),
    ],
)
def test_a_card_s_own_command_line(command: str, wanted: str | None, tmp_path: Path) -> None:
    found = command_for(command, "virtual:t4", RunFolder(tmp_path))
    if wanted is None:
        assert found == ""
    else:
        assert found == f"{wanted} --device virtual:t4 --run-dir {tmp_path.resolve()}"


def test_the_command_that_resumes_all(run: Path) -> None:
    search = make_search(run, command="autotune search a b --device x,y")
    assert search.resume_command == (
        f"autotune search a b --device x,y --resume --run-dir {run.resolve()}"
    )


# --- what is best elsewhere ----------------------------------------------------------------------


def test_what_is_best_on_another_card_is_tried_on_each(run: Path) -> None:
    heard: list[tuple[str, int]] = []
    found = make_search(
        run, on_winners=lambda card, count: heard.append((card.name, count))
    ).search(Budget(3))
    assert heard
    for card in found.cards:
        assert card.report is not None
        tried = [dict(trial.candidate) for trial in card.report.trials]
        numbers = [trial.number for trial in card.report.trials]
        assert len(numbers) == len(set(numbers)) >= 3
        for other in found.cards:
            assert other.report is not None
            for trial in other.report.trials[:3]:
                picks = (other.fastest, other.balanced)
                if any(pick is not None and pick.trial.number == trial.number for pick in picks):
                    assert dict(trial.candidate) in tried


def test_a_candidate_is_not_tried_twice(run: Path) -> None:
    executor = make_executor()
    search = make_search(run, executor)
    search.search(Budget(3))
    probed = len(executor.submitted)
    again = make_search(run, executor, resume=True).search(Budget(3))
    assert len(executor.submitted) == probed
    for card in again.cards:
        assert card.report is not None
        digests = [trial.digest for trial in card.report.trials]
        assert len(digests) == len(set(digests))
