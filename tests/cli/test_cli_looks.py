"""Looks without a search: spaces, lengths and doctor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_kit import Done

from autotune import doctor
from autotune.errors import ExecutorError, UsageError
from autotune.space import trl_keys
from autotune.space.context import DeviceInfo
from autotune.testing.contexts import PACKAGES, make_context, make_cpu, make_gpu
from autotune.testing.searches import make_answers


def test_spaces_are_listed(cli: Callable[..., Done]) -> None:
    done = cli("spaces")
    assert done.code == 0
    assert "quick (sft)" in done.out
    assert "sft (sft)" in done.out
    found = cli("spaces", "--json").json["spaces"]
    assert {item["name"] for item in found} >= {"quick", "sft"}
    assert all(item["digest"] and item["knobs"] and item["description"] for item in found)


def test_a_space_is_shown(cli: Callable[..., Done]) -> None:
    done = cli("spaces", "quick")
    assert done.code == 0
    assert "  per_device_train_batch_size: 1, 2, 4, 8, 16\n" in done.out
    assert "  max_length: from the data: lengths that 95 %, 100 % of the rows do not" in done.out
    assert "fixed" not in done.out
    for internal in ("{", "choice", "ordered", "quantiles'"):
        assert internal not in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    Path("mine.yaml").write_text("schema: 1\ntrainer: sft\nknobs:\n  lora_r: [4, 8]\n")
    shown = cli("spaces", "mine.yaml", "--json").json["spaces"]
    assert [item["name"] for item in shown] == ["mine"]
    (knob,) = shown[0]["knobs"]
    assert (knob["name"], knob["values"]) == ("lora_r", "4, 8")
    assert knob["domain"] == {"choice": [4, 8], "ordered": True}


def test_what_a_space_fixes_is_shown_and_checked(
    cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = frozenset({"learning_rate", "lr_scheduler_type", "warmup_steps"})
    monkeypatch.setattr(trl_keys, "known_keys", lambda trainer: known)
    text = "schema: 1\ntrainer: sft\nknobs:\n  lora_r: [4]\nfixed:\n  {}: 1.0e-4\n"
    Path("mine.yaml").write_text(text.format("learning_rate"))
    done = cli("spaces", "mine.yaml")
    assert done.code == 0
    assert "  fixed in every candidate: learning_rate=0.0001\n" in done.out
    Path("mine.yaml").write_text(text.format("learning_ratee"))
    for options in ([], ["--json"]):
        done = cli("spaces", "mine.yaml", *options)
        assert done.code == 2
        assert "unknown TRL key 'learning_ratee'" in done.err
        assert "'learning_rate'" in done.err
    # Without TRL nothing can be said about its keys.
    monkeypatch.setattr(trl_keys, "known_keys", lambda trainer: frozenset())
    assert cli("spaces", "mine.yaml").code == 0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("learning_rate: fast", "mine.yaml, line 6: learning_rate is 'fast', not a number."),
        ("learning_rate: [1]", "mine.yaml, line 6: learning_rate is a list, not a number."),
        ("warmup_steps: 1.5.2", "mine.yaml, line 6: warmup_steps is '1.5.2', not a number."),
        ("seed: many", "mine.yaml, line 6: seed is 'many', not a whole number."),
        ("dataloader_drop_last: maybe", "dataloader_drop_last is 'maybe', not true or false."),
        ("learning_rte: 1", "mine.yaml, line 6: unknown TRL key 'learning_rte'."),
        ("learning_rate: '1e-4'", ""),
        ("learning_rate: null", ""),
    ],
)
def test_a_fixed_value_of_a_wrong_type_is_told_with_its_line(
    line: str, told: str, cli: Callable[..., Done]
) -> None:
    pytest.importorskip("trl")
    if line.partition(":")[0] not in {*trl_keys.known_keys("sft"), "learning_rte"}:
        pytest.skip("this TRL has no such key")
    text = f"schema: 1\ntrainer: sft\nknobs:\n  lora_r: [4]\nfixed:\n  {line}\n"
    Path("mine.yaml").write_text(text)
    done = cli("spaces", "mine.yaml")
    assert done.code == (2 if told else 0)
    assert told in done.err


def test_a_search_names_the_line_of_a_fixed_value_that_trl_refuses(
    machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    def refuse(request: Any) -> dict[str, Any]:
        raise UsageError("TRL refuses the configuration: learning_rate: invalid float 'x'.")

    machine["answers"] = {**machine["answers"], "prepare": refuse}
    text = "schema: 1\nknobs:\n  lora_r: [4]\nfixed:\n  weight_decay: 0.1\n  learning_rate: x\n"
    Path("mine.yaml").write_text(text)
    done = cli("search", "some/model", "some/rows", "--space", "mine.yaml")
    assert done.code == 2
    assert "error: mine.yaml, line 6: TRL refuses the configuration" in done.err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("schema: 1\ntrainer: sft\nknobs:\n  lora_rr: [4]\n", "lora_r"),
        ("schema: 9\ntrainer: sft\nknobs: {}\n", "schema"),
        ("knobs: [", "mine.yaml"),
        ("schema: 1\ntrainer: sft\nknobs:\n  lora_r: []\n", "lora_r"),
        ("schema: 1\ntrainer: sft\nfixed: {max_steps: 3}\nknobs:\n  lora_r: [4]\n", "max_steps"),
    ],
)
def test_a_wrong_space_is_exit_code_2(content: str, named: str, cli: Callable[..., Done]) -> None:
    Path("mine.yaml").write_text(content)
    done = cli("spaces", "mine.yaml")
    assert done.code == 2
    assert named in done.err
    assert "Traceback" not in done.err
    assert cli("spaces", "nowhere").code == 2


def test_lengths_are_shown(machine: dict[str, Any], cli: Callable[..., Done]) -> None:
    done = cli("lengths", "some/model", "some/rows")
    assert done.code == 0
    assert "3,000" in done.out or "3000" in done.out
    found = cli("lengths", "some/model", "some/rows", "--json")
    assert found.code == 0
    assert isinstance(found.json, dict)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("coverage", [0, 0.9, 0.97])
@pytest.mark.parametrize("space", ["sft", "quick", "demo"])
def test_lengths_have_all_that_a_search_draws_from(
    space: str, coverage: float, machine: dict[str, Any], cli: Callable[..., Done]
) -> None:
    data = ("some/model", "some/rows", "--space", space, "--min-coverage", coverage)
    knobs = cli("search", *data, "--dry-run", "--json").json["knobs"]
    (drawn,) = [knob["values"] for knob in knobs if knob["name"] == "max_length"]
    assert drawn
    offered = cli("lengths", *data, "--json").json["offered"]
    assert set(drawn) <= set(offered)
    table = cli("lengths", *data).out
    for length in drawn:
        assert f" {length:,}*" in table


def test_doctor(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")
    done = cli("doctor", "--json")
    assert done.code == 0
    findings = {item["name"]: item for item in done.json["findings"]}
    assert {"python", "torch", "trl", "disk", "worker", "device"} <= set(findings)
    assert all(item["passed"] for item in findings.values())
    done = cli("doctor")
    assert "Test CPU" in done.out
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name == "trl" else "1.0")
    done = cli("doctor", "--json")
    assert done.code == 2
    findings = {item["name"]: item for item in done.json["findings"]}
    assert not findings["trl"]["passed"]
    assert "pip install" in findings["trl"]["hint"]
    assert "worker" not in findings


def test_doctor_marks_what_is_missing_by_what_it_means(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {"matplotlib", "trl"}
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name in missing else "1.0")
    monkeypatch.setitem(doctor.knob.registry.broken, "my_knob", "no module named x")
    done = cli("doctor")
    assert done.code == 2
    marks = {line.split(":")[0][5:]: line[:4] for line in done.out.splitlines()}
    assert marks["torch"] == "ok  "
    assert marks["matplotlib"] == "--  "
    assert marks["trl"] == "FAIL"
    assert marks["plug-in knob my_knob"] == "warn"
    assert not [line for line in done.out.splitlines() if line[:2] == "ok" and "not inst" in line]
    states = {item["name"]: item["state"] for item in cli("doctor", "--json").json["findings"]}
    assert (states["matplotlib"], states["trl"]) == ("absent", "problem")


@pytest.mark.parametrize(
    ("device", "packages", "words"),
    [
        (
            make_cpu(),
            PACKAGES,
            "not searched here: TRL's vLLM needs a CUDA device, and this is cpu",
        ),
        (make_gpu(), PACKAGES, "not searched here: the package vllm>=0.22,<0.32 is not installed"),
        (make_gpu(), {**PACKAGES, "vllm": "0.31.0"}, "searched, and measured, in GRPO and RLOO"),
        (make_gpu(name="virtual:h100"), PACKAGES, "searched, and modelled"),
    ],
    ids=["cpu", "missing", "installed", "virtual"],
)
def test_doctor_says_why_vllm_is_not_searched(
    device: DeviceInfo,
    packages: dict[str, str],
    words: str,
    machine: dict[str, Any],
    cli: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")
    machine["answers"] = make_answers(make_context(device=device, packages=packages))
    done = cli("doctor", "--json")
    assert done.code == 0
    found = {item["name"]: item for item in done.json["findings"]}["knobs of vLLM"]
    assert words in found["detail"]
    assert (found["state"] == "absent") == ("not searched" in words)
    assert "use_vllm" in found["detail"] or found["state"] == "ok"


def test_doctor_names_a_missing_device(
    machine: dict[str, Any], cli: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Any) -> dict[str, Any]:
        raise ExecutorError("there is no cuda device here.", hint="Use --device cpu.")

    monkeypatch.setattr(doctor, "_installed", lambda name: "1.0")
    machine["answers"] = {"describe": refuse}
    done = cli("doctor", "--device", "cuda", "--json")
    assert done.code == 2
    assert done.json["findings"][-1]["hint"] == "Use --device cpu."
    assert machine["made"][-1].is_shut_down
