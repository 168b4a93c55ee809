from __future__ import annotations

from typing import Any

import pytest

from autotune.differences import differences

GIB = 1 << 30


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        ({"global_batch": 8}, {"global_batch": 32}, "--global-batch: 8 before, 32 now"),
        (
            {"memory_budget_bytes": 22 * GIB},
            {"memory_budget_bytes": None},
            "--memory-budget: 22.00 GiB before, not given now",
        ),
        (
            {"pins": {"lora_r": "8", "dtype": "float32"}},
            {"pins": {"lora_r": "16", "dtype": "float32"}},
            "--pin lora_r: 8 before, 16 now",
        ),
        ({"pins": {}}, {"pins": {"lora_r": "8"}}, "--pin lora_r: not given before, 8 now"),
        (
            {"dataset": {"dataset_name": "a/b", "dataset_train_split": "train"}},
            {"dataset": {"dataset_name": "a/b", "dataset_train_split": "test"}},
            "--split: train before, test now",
        ),
        (
            {"data_fingerprint": "a" * 64},
            {"data_fingerprint": "b" * 64},
            "the content of the data is another",
        ),
        (
            {"space": "a" * 64},
            {"space": "b" * 64},
            "the search space (--space) has other knobs, values or fixed keys",
        ),
        (
            {"phases": []},
            {"phases": ["eval", "save"]},
            "--phases: not given before, eval, save now",
        ),
        ({}, {"new": True}, "new: not given before, true now"),
        ({"pins": "x"}, {"pins": {"a": "1"}}, "--pin: x before, a=1 now"),
    ],
)
def test_each_difference_is_a_sentence(before: dict, now: dict, text: str) -> None:
    assert differences(before, now) == [text]


def test_what_is_the_same_is_not_named() -> None:
    same: dict[str, Any] = {"model": "a", "pins": {"b": "1"}, "steps": [1, 5]}
    assert differences(same, dict(same)) == []


def test_long_values_are_shortened_in_the_middle() -> None:
    (text,) = differences({"model": "/a" + "/deep" * 50 + "/one"}, {"model": "/b"})
    assert text.startswith("the model: /a/deep")
    assert "/one before, /b now" in text
    assert len(text) < 100
