"""What is said of a probe that was refused, by who refused it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.errors import UnknownNameError
from autotune.probe import refusals
from autotune.probe.result import Outcome, ProbeResult
from autotune.virtual.errors import NoKernel, NotOnCard, NotVirtual


def ended(error_type: str | None, outcome: Outcome = Outcome.UNSUPPORTED) -> ProbeResult:
    detail = f"{error_type}: liger-kernel is not available"
    return ProbeResult(probe_id="0", outcome=outcome, error_type=error_type, detail=detail)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ("TRL refuses the configuration: lr: invalid float value: 'x'.", "my.yaml, line 2: "),
        ("TRL refuses the configuration: --lr_end is odd.", "my.yaml, line 3: "),
        ("unknown TRL key 'lr'.", "my.yaml, line 2: "),
        ("unknown value of lr 'x'.", "my.yaml, line 2: "),
        ("unknown value of lrs 'x'.", ""),
        ("the data set 'lr' is empty.", ""),
    ],
)
def test_what_a_key_is_to_blame_for_names_its_line(message: str, place: str) -> None:
    places = {"lr": "my.yaml, line 2", "lr_end": "my.yaml, line 3"}
    error = UnknownNameError("x", "y", ["z"])
    error.message = message
    found = refusals.at_its_line(error, places)
    assert type(found) is UnknownNameError
    assert (found.message, found.hint) == (f"{place}{message}", error.hint)


@pytest.mark.parametrize(
    ("error_type", "is_refusal", "hint"),
    [
        (NotVirtual.__qualname__, False, "No other card would help"),
        (NotOnCard.__qualname__, True, "choose another card, or change my.yaml"),
        (NoKernel.__qualname__, True, "Change it in my.yaml."),
        ("ValueError", True, "Change it in my.yaml."),
        (None, True, "Change it in my.yaml."),
        ("ImportError", False, "A package is missing on this machine"),
        ("PackageNotFoundError", False, "A package is missing on this machine"),
    ],
)
def test_who_refuses_is_told_apart(error_type: str | None, is_refusal: bool, hint: str) -> None:
    result = ended(error_type)
    assert refusals.is_refusal(result) is is_refusal
    assert hint in refusals.hint(result, "my.yaml")


def test_the_name_of_an_exception_is_kept_only_where_it_says_something() -> None:
    assert refusals.reason(ended("ImportError")) == "liger-kernel is not available"
    crash = ended("KeyError", Outcome.CRASHED)
    assert refusals.reason(crash).startswith("KeyError: ")
    assert refusals.hint(crash, "my.yaml") == ""
    assert not refusals.is_refusal(crash)


def test_memory_and_time_have_hints_of_their_own() -> None:
    assert "end other work" in refusals.hint(ended(None, Outcome.HOST_OOM), "my.yaml")
    assert "--probe-timeout" in refusals.hint(ended(None, Outcome.TIMEOUT), "my.yaml")


def test_what_pytorch_says_of_half_gradients_is_put_in_keys() -> None:
    detail = "ValueError: Attempting to unscale FP16 gradients."
    result = ProbeResult(
        probe_id="0", outcome=Outcome.UNSUPPORTED, error_type="ValueError", detail=detail
    )
    assert "dtype: float32 in my.yaml" in refusals.hint(result, "my.yaml")


NO_BF16 = "Tesla T4 does not support bfloat16"
SCALER = "PyTorch cannot scale bfloat16 gradients on a card, as fp16: true needs"


@pytest.mark.parametrize("detail", [NO_BF16, SCALER])
def test_a_quantised_file_is_not_sent_from_bf16_to_fp16_and_back(detail: str) -> None:
    result = replace(ended("NotOnCard"), detail=detail)
    quantised = refusals.quantisation({"load_in_4bit": True, "bf16": True}, checkpoint=False)
    text = refusals.hint(result, "my.yaml", quantised)
    assert text.startswith("Choose a card with bfloat16, or train adapters on unquantised weights")
    assert "(without load_in_4bit, with fp16: true, bf16: false, dtype: float16)" in text
    # A checkpoint that is quantised has no key to take out.
    text = refusals.hint(result, "my.yaml", refusals.quantisation({}, checkpoint=True))
    assert text.startswith("Choose a card with bfloat16. In my.yaml, bf16: false, fp16: false")


def test_what_is_not_quantised_is_sent_to_fp16_with_float32_weights() -> None:
    result = replace(ended("NotOnCard"), detail=NO_BF16)
    assert refusals.quantisation({"load_in_4bit": False}, checkpoint=False) == ()
    assert refusals.hint(result, "my.yaml").startswith("Set bf16: false and fp16: true in my.yaml")
    assert refusals.reason(result) == "Tesla T4 does not support bfloat16"
    assert "adapters of a quantised model" in refusals.reason(result, ("load_in_8bit",))
    result = replace(result, detail=SCALER)
    assert "dtype: float32 in my.yaml" in refusals.hint(result, "my.yaml")
