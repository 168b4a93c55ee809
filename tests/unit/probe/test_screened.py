"""The records of predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.errors import JournalError
from autotune.probe import screened
from autotune.probe.result import Outcome
from autotune.probe.screened import Screened

DONE = Screened(
    digest="d1",
    candidate={"max_length": 1024, "dtype": "float32"},
    outcome=Outcome.OK,
    values={"tokens_per_s": 12.5},
    peak_bytes=1 << 30,
    time_s=1.5,
)


def test_predictions_round_trip_and_the_last_of_a_candidate_counts(tmp_path: Path) -> None:
    path = tmp_path / screened.FILE_NAME
    assert screened.read(path) == screened.Records()
    screened.append_stand_in(path, {"name": "a card"})
    screened.append(path, Screened(digest="d1", candidate={}, outcome=Outcome.CRASHED))
    screened.append(path, DONE)
    found = screened.read(path)
    assert found.stand_in == {"name": "a card"}
    assert found.predictions == {"d1": DONE}


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / screened.FILE_NAME
    screened.append(path, DONE)
    with path.open("a") as file:
        file.write('{"schema": 1, "kind": "predic')
    assert set(screened.read(path).predictions) == {"d1"}
    screened.append(path, Screened(digest="d2", candidate={}, outcome=Outcome.OK))
    assert set(screened.read(path).predictions) == {"d1", "d2"}


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "prediction", "schema": 1},
        {"kind": "prediction", "schema": 1, "prediction": {**DONE.to_dict(), "outcome": "odd"}},
        {
            "kind": "prediction",
            "schema": 1,
            "prediction": {**DONE.to_dict(), "values": {"a": "b"}},
        },
        {"kind": "prediction", "schema": 1, "prediction": {"digest": "d1"}},
        {"kind": "stand_in", "schema": 1, "card": 3},
        "no record",
    ],
)
def test_damage_names_the_line_and_what_to_do(tmp_path: Path, damage: object) -> None:
    path = tmp_path / screened.FILE_NAME
    screened.append(path, DONE)
    with path.open("a") as file:
        file.write(json.dumps(damage) + "\n")
    with pytest.raises(JournalError, match="line 2 is damaged") as caught:
        screened.read(path)
    assert "Delete that line" in caught.value.hint
    assert "nothing measured is in it" in caught.value.hint
