"""Whole searches on cards that are not there, with the real trainer, and what cards refuse."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl_kit import CARD, plan_of, predicted, probe, virtual_tuner

from autotune.executors.subprocess import SubprocessExecutor
from autotune.listener import Budget, Listener, Silent
from autotune.probe.result import Outcome
from autotune.report.terminal import render_text
from autotune.virtual import cards, flash
from autotune.virtual.api import session_for

pytestmark = pytest.mark.trl


class Watch(Silent):
    """Keeps what a search says."""

    def __init__(self) -> None:
        self.confirmed: list[int] = []

    def on_confirm(self, numbers: Any) -> None:
        self.confirmed.extend(numbers)


def test_a_search_on_a_virtual_card_is_predicted_throughout(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    watch = Watch()
    listener: Listener = watch
    tuner = virtual_tuner(virtual, made, tmp_path / "run", listener=listener)
    report = tuner.search(Budget(4))
    assert len(report.trials) == 4
    assert report.finished
    assert report.is_predicted
    card = cards.find("rtx-4090")
    for trial in report.trials:
        assert trial.outcome is Outcome.OK, trial.results[-1].detail
        assert trial.source == "predicted"
        assert len(trial.results) == 1
        measurement = trial.measurement
        assert measurement is not None
        assert measurement.source == "predicted"
        assert card.context_bytes < measurement.peak_bytes < report.budget_bytes
        assert measurement.makeup["peak_bytes"] == sum(measurement.makeup["at_peak"].values())
    assert watch.confirmed == []
    assert not any("single probe" in warning for warning in report.warnings)
    text = render_text(report, verbose=True)
    assert "NVIDIA GeForce RTX 4090 (virtual)" in text
    assert "All figures are predicted, none is measured" in " ".join(text.split())


def test_predictions_do_not_depend_on_what_ran_before(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    plan = plan_of(virtual, tmp_path / "plan", made["model"], made["dataset"], device=CARD)
    candidates = []
    for seed in range(3):
        choose = random.Random(seed)
        drawn = plan.space.draw(lambda name, values, ordered, by=choose: by.choice(list(values)))
        candidates.append(drawn)
    order = [*range(3), *range(3)]
    random.Random(5).shuffle(order)
    found: dict[int, list[Any]] = {}
    for place, number in enumerate(order):
        folder = tmp_path / f"probe-{place}"
        result = probe(virtual, plan, folder, candidates[number], device=CARD)
        assert result.outcome is Outcome.OK, result.detail
        measurement = result.measurement
        assert measurement is not None
        found.setdefault(number, []).append(
            (
                measurement.phases,
                measurement.steps,
                measurement.worst_batch,
                measurement.makeup,
                measurement.num_alloc_retries,
            )
        )
    for first, second in found.values():
        assert first == second


# --- what a card has not ------------------------------------------------------------------------


def refused(virtual: SubprocessExecutor, path: Path, card: str, model: str, **keys: Any) -> str:
    """Return the verdict on a card that refuses a configuration."""
    config = {"model_name_or_path": model, **keys}
    (found,) = predicted(virtual, path, config, card, assume_length=64).cards
    assert found.is_refusal
    assert "card" in found.hint
    return found.verdict()


def test_bfloat16_is_refused_where_the_card_has_none(
    virtual: SubprocessExecutor, model: str, tmp_path: Path
) -> None:
    # TRL's own default is bfloat16, too.
    for name, keys in (("asked", {"bf16": True}), ("default", {})):
        verdict = refused(virtual, tmp_path / f"{name}.yaml", "t4", model, **keys)
        assert verdict.startswith("DOES NOT RUN: Tesla T4 does not support bfloat16")


def test_a_quantised_model_is_told_at_once_that_fp16_is_no_way_out(
    virtual: SubprocessExecutor, model: str, tmp_path: Path
) -> None:
    quantised = {"load_in_4bit": True, "use_peft": True, "lora_target_modules": "all-linear"}
    for name, keys in (
        ("bf16", {"bf16": True}),
        ("fp16", {"bf16": False, "fp16": True, "dtype": "float16"}),
    ):
        config = {"model_name_or_path": model, **quantised, **keys}
        (found,) = predicted(virtual, tmp_path / name, config, "t4", assume_length=64).cards
        assert found.is_refusal
        assert "adapters of a quantised model" in found.verdict()
        assert found.hint.startswith("Choose a card with bfloat16")
    # What the hint calls the way without another card is predicted to run.
    keys = {"bf16": False, "fp16": False, "dtype": "float32"}
    config = {"model_name_or_path": model, **quantised, **keys}
    assert predicted(virtual, tmp_path / "fp32", config, "t4", assume_length=64).cards[0].fits


def test_float16_is_predicted_there(
    virtual: SubprocessExecutor, model: str, tmp_path: Path
) -> None:
    config = {"model_name_or_path": model, "bf16": False, "fp16": True}
    found = predicted(virtual, tmp_path / "fp16.yaml", config, "t4", assume_length=64)
    assert found.cards[0].fits


def test_a_search_there_trains_adapters_on_float16_weights(
    virtual: SubprocessExecutor, made: dict[str, str], tmp_path: Path
) -> None:
    pins = {"dtype": "float16"}
    tuner = virtual_tuner(virtual, made, tmp_path / "run", device="virtual:t4", pins=pins)
    report = tuner.search(Budget(3))
    assert len(report.trials) == 3
    for trial in report.trials:
        assert trial.outcome is Outcome.OK, trial.results[-1].detail
        config = trial.config
        assert (config["dtype"], config["fp16"], config["use_peft"]) == ("float16", True, True)


def test_peft_keeps_adapters_of_float16_weights_in_float32(model: str) -> None:
    """Else PyTorch's gradient scaler would refuse their gradients, as it does those of weights."""
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).half()
    adapted = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    trained = {item.dtype for item in adapted.parameters() if item.requires_grad}
    assert trained == {torch.float32}


def test_pytorch_s_gradient_scaler_refuses_float16_gradients() -> None:
    """If it no longer does, the knob dtype may offer float16 for full training as well."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.float().sum()).backward()
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))


def test_flash_attention_is_refused_where_the_card_has_none(
    virtual: SubprocessExecutor, model: str, tmp_path: Path
) -> None:
    keys = {"attn_implementation": "flash_attention_2", "bf16": False, "fp16": True}
    verdict = refused(virtual, tmp_path / "flash.yaml", "t4", model, **keys)
    assert "needs compute capability 8.0, and Tesla T4 has 7.5" in verdict


@pytest.mark.parametrize(
    ("card", "version", "message"),
    [
        ("t4", 2, "needs compute capability 8.0, and Tesla T4 has 7.5"),
        ("v100", 2, "needs compute capability 8.0, and Tesla V100-SXM2-16GB has 7.0"),
        ("4090", 2, None),
        ("4090", 3, "3 is built for compute capability 9.0; NVIDIA GeForce RTX 4090 has 8.9"),
        ("b200", 3, "3 is built for compute capability 9.0; NVIDIA B200 has 10.0"),
        ("h100", 3, None),
        ("h100", 2, None),
    ],
)
def test_the_check_names_card_and_capability(card: str, version: int, message: str | None) -> None:
    usual = PreTrainedModel._flash_attn_import_error
    with contextlib.ExitStack() as stack:
        flash.install(stack, session_for(cards.find(card)))
        if message is None:
            PreTrainedModel._flash_attn_import_error(None, flash_attn_version=version)
        else:
            with pytest.raises(ImportError, match=message):
                PreTrainedModel._flash_attn_import_error(None, flash_attn_version=version)
    assert PreTrainedModel._flash_attn_import_error is usual
