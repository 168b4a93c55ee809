"""Cards and files that nothing can be predicted from, and what a prediction leaves out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import CARD, CONFIG, Done, on_a_virtual_card

from autotune.errors import UsageError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return on_a_virtual_card(monkeypatch)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("far.toml", "compute_capability"),
        ("huge.toml", "1,024 TiB"),
        ("0GiB", "greater than zero"),
        ("virtual:0 MB", "greater than zero"),
        ("nanGiB", "is not a size"),
        ("virtual:-8GiB", "is not a size"),
        ("infTiB", "is not a size"),
        ("1.2.3GiB", "is not a size"),
        ("", "names no card"),
        ("virtual:", "names no card"),
        ("99999999999999TiB", "1,024 TiB"),
    ],
)
def test_a_card_that_cannot_be(name: str, named: str, cli: Callable[..., Done]) -> None:
    Path("far.toml").write_text('base = "4090"\ncompute_capability = "999999999.0"\n')
    Path("huge.toml").write_text(f'base = "4090"\nmemory_bytes = {1 << 60}\n')
    done = cli("gpus", name)
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert "unknown card '" not in done.err


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("gradient_accumulation_steps: 0\n", "gradient_accumulation_steps is 0"),
        ("gradient_accumulation_steps: -4\n", "gradient_accumulation_steps is -4"),
        ("per_device_train_batch_size: 0\n", "per_device_train_batch_size is 0"),
        ("per_device_train_batch_size: '-2'\n", "per_device_train_batch_size is -2"),
        ("per_device_eval_batch_size: 0\neval_strategy: steps\n", "eval_batch_size is 0"),
        ("max_length: 0\n", "max_length is 0"),
        (CONFIG, "line 3: 'model_name_or_path' is given twice, first in line 1"),
        ("env:\n  A: 1\n  A: 2\n", "line 5: 'A' is given twice, first in line 4"),
        ("datasets:\n- {path: a, path: b}\n", "line 4: 'path' is given twice"),
    ],
)
def test_a_file_that_trl_would_misread_or_refuse(
    more: str, named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("bad.yaml").write_text(CONFIG + more)
    done = cli("estimate", "bad.yaml", "--device", CARD)
    assert (done.code, done.out) == (2, "")
    assert "bad.yaml" in done.err
    assert named in done.err
    assert "hint:" in done.err
    assert machine["made"] == []  # nothing was started for it
    if "twice" in named:
        assert named in cli("verify", "bad.yaml").err


def test_what_is_said_once_for_each_is_no_repetition(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("good.yaml").write_text(
        CONFIG + "datasets:\n- &one {path: a}\n- {<<: *one, name: b}\n- *one\n"
    )
    assert cli("estimate", "good.yaml", "--device", CARD).code == 0


def test_a_checkpoint_to_resume_from_is_noted(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("resumed.yaml").write_text(CONFIG + "resume_from_checkpoint: out/checkpoint-5\n")
    done = cli("estimate", "resumed.yaml", "--device", CARD)
    assert done.code == 0, done.err
    assert "note: resume_from_checkpoint: left out" in done.out
    (executor,) = machine["made"]
    assert "resume_from_checkpoint" not in executor.submitted[0].config


@pytest.mark.parametrize("length", ["99999999999999999999", str(2**24 + 1)])
def test_no_row_is_assumed_that_memory_cannot_hold(
    length: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("good.yaml").write_text(CONFIG)
    done = cli("estimate", "good.yaml", "--device", CARD, "--assume-length", length)
    assert done.code == 2
    assert "--assume-length" in done.err


@pytest.mark.parametrize("command", ["estimate", "gpus", "verify", "spaces", "report", "search"])
def test_what_is_no_file_is_not_waited_for(command: str, cli: Callable[..., Done]) -> None:
    Path("run/configs").mkdir(parents=True)
    for name in ("x.yaml", "x.toml", "run/report.json", "run/configs/trial-0001.yaml"):
        os.mkfifo(name)
    options = {
        "estimate": ["x.yaml", "--device", "t4"],
        "gpus": ["x.toml"],
        "verify": ["run"],
        "spaces": ["x.yaml"],
        "report": ["run"],
        "search": ["some/model", "some/rows", "--device", "virtual:x.toml"],
    }
    done = cli(command, *options[command])
    assert done.code == 2
    assert "is no regular file" in done.err


def test_a_pipe_that_a_shell_hands_over_is_read(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    reading, writing = os.pipe()
    os.write(writing, CONFIG.encode())
    os.close(writing)
    done = cli("estimate", f"/dev/fd/{reading}", "--device", CARD)
    os.close(reading)
    assert done.code == 0, done.err


def test_every_unknown_key_is_named_with_its_line(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("one.yaml").write_text(CONFIG + "learning_rat: 1\n")
    assert (
        "one.yaml, line 3: unknown TRL key 'learning_rat'"
        in cli("estimate", "one.yaml", "--device", CARD).err
    )
    Path("two.yaml").write_text("learning_rat: 1\n\n" + CONFIG + "max_lenght: 7\n")
    done = cli("estimate", "two.yaml", "--device", CARD)
    assert done.code == 2
    assert "two.yaml, line 1: unknown TRL key 'learning_rat'. Did you mean" in done.err
    assert "two.yaml, line 5: unknown TRL key 'max_lenght'. Did you mean 'max_length'" in done.err
    assert machine["made"] == []


@pytest.mark.parametrize("command", ["estimate", "verify"])
def test_a_folder_is_called_so(
    command: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("some").mkdir()
    more = ["--device", CARD] if command == "estimate" else []
    done = cli(command, "some", *more)
    assert done.code == 2
    words = "some is a folder" if command == "estimate" else "no configuration to verify in some"
    assert words in done.err


def test_a_hint_on_a_refused_value_names_the_file(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    def refuse(request: Any) -> dict[str, Any]:
        raise UsageError("TRL refuses it.", hint="Look at `fixed:` in the space.")

    machine["answers"] = {"prepare": refuse}
    Path("good.yaml").write_text(CONFIG)
    assert "Look at good.yaml." in cli("estimate", "good.yaml", "--device", CARD).err
