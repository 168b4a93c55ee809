"""``--json``: one JSON object on standard output, whatever happens."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import SEARCH, Done

from autotune import membudget
from autotune.probe.result import Outcome
from autotune.testing.fakes import MemoryWall


def read(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("report", "nowhere"), 2, "nowhere"),
        (("report", "broken"), 1, "damaged"),
        (("gpus", "rtx-409"), 2, "rtx-409"),
        (("estimate", "gone.yaml", "--device", "t4"), 2, "gone.yaml"),
        (("estimate", "gone.yaml"), 2, "--device"),
        (("verify", "gone"), 2, "gone"),
        (("spaces", "nothing"), 2, "nothing"),
        (("lengths", "", "x"), 2, "empty name"),
        (("search", "a/b", "c/d", "--pin", "x"), 2, "KNOB=VALUE"),
        (("search", "a/b", "c/d", "--trials", "0"), 2, "--trials"),
        (("search", "a/b"), 2, "dataset"),
        (("search", "a/b", "c/d", "--unknown"), 2, "--unknown"),
        (("reprot",), 2, "reprot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_an_error_is_one_object(
    arguments: tuple[str, ...], code: int, named: str, cli: Callable[..., Done]
) -> None:
    Path("broken").mkdir()
    Path("broken/report.json").write_text("{")
    done = cli(*arguments, "--json")
    assert done.code == code
    found = read(done.out)
    assert set(found) == {"error", "exit_code"}
    assert found["exit_code"] == code
    assert set(found["error"]) == {"type", "message", "hint"}
    assert named in found["error"]["message"] + found["error"]["hint"]
    # People read it where they always do.
    assert named in done.err
    assert cli(*arguments).out == ""


def test_an_error_says_what_kind_it_is(cli: Callable[..., Done]) -> None:
    assert read(cli("gpus", "rtx-409", "--json").out) == {
        "error": {
            "type": "UnknownNameError",
            "message": "unknown card 'rtx-409'.",
            "hint": cli("gpus", "rtx-409").err.partition("hint: ")[2].strip(),
        },
        "exit_code": 2,
    }


def test_a_report_is_the_object_where_nothing_fits(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["wall"] = MemoryWall(capacity_bytes=1)
    done = cli(*SEARCH, "--trials", 3, "--run-dir", "here", "--json")
    assert done.code == 3
    assert read(done.out)["schema"] == 1


def test_a_search_that_breaks_prints_one_object(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    machine["fault"] = lambda spec: Outcome.CRASHED
    done = cli(*SEARCH, "--trials", 3, "--run-dir", "here", "--json")
    assert done.code == 1
    assert read(done.out)["error"]["type"] == "BaselineError"


def test_an_interrupt_before_the_first_probe(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(membudget, "decide", interrupt)
    done = cli(*SEARCH, "--run-dir", "here", "--json")
    assert done.code == 130
    found = read(done.out)
    assert found["exit_code"] == 130
    assert found["error"]["type"] == "Interrupted"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["wall_time_s", "tokens"])
def test_a_report_with_what_is_no_number_is_damaged(
    field: str, value: str, found: Path, cli: Callable[..., Done]
) -> None:
    record = json.loads((found / "report.json").read_text())
    if field == "wall_time_s":
        record["wall_time_s"] = 12345.678
    else:
        record["data"]["mean_length"] = 12345.678
    text = json.dumps(record).replace("12345.678", value)
    assert value in text
    (found / "report.json").write_text(text)
    for more in ((), ("--json",)):
        done = cli("report", found, *more)
        assert done.code == 1
        assert "damaged" in done.err
        assert "--resume" in done.err
        assert not done.out or read(done.out)["exit_code"] == 1


def test_a_report_that_nests_too_deep_is_damaged(found: Path, cli: Callable[..., Done]) -> None:
    (found / "report.json").write_text("[" * 100_000)
    assert cli("report", found).code == 1
