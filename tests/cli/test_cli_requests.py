"""What is typed: wrong requests and names, and the ways to ask for help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import SEARCH, Done

COMMANDS = (
    *("search", "gpus", "estimate", "report", "export", "verify", "lengths", "spaces", "doctor"),
    "demo",
)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--space", "qick"], "quick"),
        (["--space", "none.yaml"], "none.yaml"),
        (["--trainer", "ppo"], "ppo"),
        (["--sampler", "tpee"], "tpe"),
        (["--pin", "lora_rr=8"], "lora_r"),
        (["--pin", "lora_r=eight"], "lora_r"),
        (["--pin", "lora_r"], "KNOB=VALUE"),
        (["--pin", "=8"], "KNOB=VALUE"),
        (["--pin", "lora_r=8", "--pin", "lora_r=16"], "twice"),
        (["--memory-budget", "22 parsecs"], "--memory-budget"),
        (["--memory-budget", "-1GiB"], "--memory-budget"),
        (["--memory-budget", "0"], "--memory-budget"),
        (["--memory-budget", "1MiB"], "below the weights"),
        (["--time-budget", "soon"], "--time-budget"),
        (["--time-budget", "0s"], "--time-budget"),
        (["--probe-timeout", "1 fortnight"], "--probe-timeout"),
        (["--trials", "0"], "--trials"),
        (["--trials", "many"], "--trials"),
        (["--global-batch", "0"], "--global-batch"),
        (["--global-batch", "99999999999999999999"], "--global-batch"),
        (["--global-batch", str(2**31 + 1)], "--global-batch"),
        (["--measured-steps", "99999999999999999999"], "--measured-steps"),
        (["--min-coverage", "1.5"], "--min-coverage"),
        (["--weights", "trained"], "weights"),
        (["--phases", "eval,test"], "phases"),
        (["--resume"], "--run-dir"),
        (["--resume", "--run-dir", "nowhere"], "no search to resume"),
        (["--study", "nonsense://x", "--run-dir", "x"], "nonsense"),
        (["--no-such-option"], "--no-such-option"),
        (["--split", ""], "split"),
        (["--revision", " "], "revision"),
        (["--dataset-config", ""], "configuration"),
    ],
    ids=" ".join,
)
def test_a_wrong_request_is_exit_code_2(
    arguments: list[str], named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, *arguments)
    assert done.code == 2, done.err
    assert named in done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    assert not [spec for made in machine["made"] for spec in made.submitted]


@pytest.mark.parametrize(
    ("model", "dataset", "named"),
    [
        ("./nowhere", "some/rows", "nowhere"),
        ("some/model", "rows.jsonl", "rows.jsonl"),
        ("some/model", "notes.txt", ".txt"),
        (".", "some/rows", "config.json"),
        ("some/model", "empty", "no data file"),
    ],
)
def test_missing_files_are_exit_code_2(
    model: str, dataset: str, named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    Path("notes.txt").touch()
    Path("empty").mkdir()
    done = cli("search", model, dataset)
    assert done.code == 2
    assert named in done.err
    assert "hint:" in done.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--pin", "lora_q=8"], "Did you mean 'lora_r'"),
        (["--pin", "lora_r=eight"], "lora_r"),
        (["--pin", "adaptation=lorra"], "lora"),
        (["--device", "nope"], "unknown device 'nope'"),
        (["--device", "rtx-4090"], "--device virtual:rtx-4090 predicts for that card"),
        (["--device", "RTX 4090"], "--device 'virtual:RTX 4090' predicts for that card"),
        (["--device", "24GiB"], "unknown device '24GiB'"),
        (["--device", "cud"], "Did you mean 'cuda'"),
        (["--device", ""], "unknown device"),
        (["--device", "cuda:"], "cuda:0"),
        (["--device", "cuda:one"], "cuda:0"),
        (["--device", "xpu:-1"], "xpu:0"),
        (["--device", "cpu:0"], "takes no index"),
        (["--device", "auto:1"], "takes no index"),
        (["--trainer", "foo:bar", "--space", "quick"], "'sft', not for 'foo:bar'"),
    ],
    ids=" ".join,
)
def test_a_wrong_name_is_refused_before_anything_is_started(
    arguments: list[str], named: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli(*SEARCH, *arguments)
    assert done.code == 2, done.err
    assert named in done.err
    assert machine["made"] == []
    assert not list(Path().iterdir())


def test_an_unknown_trainer_is_no_unknown_space(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli("search", "some/model", "some/rows", "--trainer", "foo:bar")
    assert done.code == 2
    assert "unknown trainer 'foo:bar'" in done.err
    assert "Known: distillation, dpo, grpo, kto, online_dpo, reward, rloo, sft" in done.err


@pytest.mark.parametrize(("model", "dataset"), [("", ""), ("", "some/rows"), ("some/model", " ")])
def test_an_empty_name_is_not_the_current_folder(
    model: str, dataset: str, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli("search", model, dataset)
    assert done.code == 2
    assert "empty name" in done.err
    assert machine["made"] == []


@pytest.mark.parametrize(
    "arguments", [(), ("serch",), ("search",), ("search", "only/model"), ("report",)]
)
def test_a_command_that_is_not_whole_is_exit_code_2(
    arguments: tuple[str, ...], cli: Callable[..., Done]
) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert "Usage" in done.out + done.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("serch", "search"), ("reportt", "report"), ("lenghts", "lengths"), ("doctro", "doctor")],
)
def test_a_mistyped_command_is_met_with_the_nearest(
    typed: str, meant: str, cli: Callable[..., Done]
) -> None:
    done = cli(typed)
    assert done.code == 2
    assert f"Did you mean '{meant}'" in done.err


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_exit_code_0(option: str, cli: Callable[..., Done]) -> None:
    done = cli(option)
    assert done.code == 0
    for name in COMMANDS:
        assert name in done.out
    for name in COMMANDS:
        assert cli(name, option).code == 0


def test_the_version_is_printed(cli: Callable[..., Done]) -> None:
    done = cli("--version")
    assert done.code == 0
    assert done.out.startswith("trl-autotune ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "0"], "greater than or equal to 1"),
        (["--processes", "4096"], "4096 processes are more than the"),
        (["--processes", "2", "--device", "virtual:rtx-4090"], "2 processes can't be predicted"),
        (["--processes", "2", "--device", "mps"], "one mps device"),
        (["--accelerate-config", "gone.yaml"], "gone.yaml cannot be read"),
        (["--accelerate-config", "none.yaml"], "names no distributed_type"),
        (["--accelerate-config", "pair.yaml", "--processes", "3"], "has num_processes: 2"),
        (["--accelerate-config", "fsdp.yaml"], "accelerate shards on accelerators alone"),
    ],
)
def test_processes_that_cannot_be_are_refused_before_anything_is_probed(
    machine: dict[str, Any], cli: Callable[..., Done], arguments: list[str], said: str
) -> None:
    Path("none.yaml").write_text("mixed_precision: bf16\n")
    Path("pair.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    done = cli(*SEARCH, *arguments)
    assert done.code == 2
    assert said in done.err
    assert all(executor.submitted == [] for executor in machine["made"])


def test_a_dry_run_says_how_many_processes_there_are(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    done = cli("search", "some/model", "some/rows", "--dry-run", "--json", "--processes", "2")
    assert done.code == 0, done.err
    assert done.json["processes"] == 2
    assert done.json["baseline_accelerate_config"]["num_processes"] == 2
    assert "accelerate_config" not in done.json["baseline_config"]
    removed = {(item["knob"], item["value"]) for item in done.json["removed"]}
    assert ("sharding", "fsdp2") in removed
    assert any("2 processes" in notice for notice in done.json["notices"])
    alone = cli("search", "some/model", "some/rows", "--dry-run")
    assert "sharding: one process holds the whole model; --processes asks for several" in alone.out
