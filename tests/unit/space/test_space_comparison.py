"""Two candidates of a space: what changes, what is the same, which demands more memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from space_kit import QUICK, differing, resolve

from autotune.testing.contexts import make_context, make_gpu


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ({"checkpointing": "none"}, set()),
        ({"per_device_train_batch_size": 1}, set()),
        ({"optim": "adamw_torch"}, set()),
        ({"optim": "adamw_8bit"}, {"method"}),
        ({"dtype": "bfloat16"}, {"method"}),
        ({"adaptation": "lora"}, {"method"}),
        ({"batching": "bfd"}, {"tokens"}),
        ({"batching": "padding_free"}, {"tokens"}),  # the baseline cuts rows, this does not
        ({"max_length": 512}, {"tokens"}),
        ({"max_length": 2048, "dtype": "bfloat16"}, {"tokens", "method"}),
        ({"pad_to_multiple_of": 64}, set()),
    ],
)
def test_changes(values: dict[str, Any], changes: set[str]) -> None:
    space = resolve(make_context(device=make_gpu()))
    assert space.changes(differing(space, **values)) == changes


def test_lengths_above_the_longest_row_change_nothing_when_padded() -> None:
    space = resolve(make_context(lengths=(100, 300, 700)))
    assert space.baseline["max_length"] == 1024
    shorter = differing(space, max_length=768)
    assert space.changes(shorter) == set()
    assert space.digest(shorter) == space.digest(space.baseline)
    assert space.demands_at_least(shorter, space.baseline)
    assert space.changes(differing(space, batching="padding_free")) == set()
    assert space.digest(differing(space, batching="padding_free")) != space.digest(space.baseline)
    bins = [differing(space, batching="bfd", max_length=n) for n in (768, 1024)]
    assert space.digest(bins[0]) != space.digest(bins[1])
    assert all(space.changes(candidate) == {"tokens"} for candidate in bins)


def test_digests_are_short_and_stable() -> None:
    space = resolve(space=QUICK)
    digests = [space.digest(candidate) for candidate in space.enumerate()]
    assert all(len(digest) == 16 for digest in digests)
    assert len(set(digests)) == len(digests)
    again = resolve(space=QUICK)
    assert [again.digest(candidate) for candidate in again.enumerate()] == digests


@pytest.mark.parametrize(
    ("values", "coverage"),
    [
        ({"max_length": 512}, (100 + 200 + 300 + 400 + 500 + 5 * 512) / 9500),
        ({"max_length": 3072}, 1.0),
        ({"batching": "bfd", "max_length": 512}, (1500 + 5 * 512) / 9500),
        ({"batching": "bfd_split", "max_length": 512}, 1.0),
        ({"batching": "wrapped", "max_length": 512}, 1.0),
        ({"batching": "padding_free"}, 1.0),
    ],
)
def test_coverage(values: dict[str, Any], coverage: float) -> None:
    space = resolve()
    assert space.coverage(differing(space, **values)) == pytest.approx(coverage)


CHECKPOINTING_ORDER = {
    "none": {"none", "full", "full_reentrant", "selective", "every_2_layers", "every_4_layers"},
    "every_4_layers": {"every_4_layers", "every_2_layers", "full"},
    "every_2_layers": {"every_2_layers", "full"},
    "selective": {"selective", "full"},
    "full": {"full"},
    "full_reentrant": {"full_reentrant"},
}


def test_checkpointing_is_partly_ordered() -> None:
    space = resolve(make_context(device=make_gpu()))
    for larger, smaller in product(CHECKPOINTING_ORDER, repeat=2):
        a, b = differing(space, checkpointing=larger), differing(space, checkpointing=smaller)
        expected = smaller in CHECKPOINTING_ORDER[larger]
        assert space.demands_at_least(a, b) is expected, (larger, smaller)
        a, b = {**a, "activation_offloading": "on"}, {**b, "activation_offloading": "on"}
        assert space.demands_at_least(a, b) is (larger == smaller)


@pytest.mark.parametrize(
    ("larger", "smaller", "expected"),
    [
        (8, 4, True),  # both accumulate
        (4, 8, False),
        (16, 8, False),  # 16 needs no accumulation, so that gradients do not outlive a step
        (16, 1, False),
        (16, 16, True),
        (8, 16, False),
    ],
)
def test_micro_batches_compare_only_while_gradients_accumulate(
    larger: int, smaller: int, expected: bool
) -> None:
    space = resolve(space=QUICK)
    a = differing(space, per_device_train_batch_size=larger)
    b = differing(space, per_device_train_batch_size=smaller)
    assert space.demands_at_least(a, b) is expected


@pytest.mark.parametrize(
    ("larger", "smaller", "expected"),
    [
        ({"max_length": 2048}, {"max_length": 512}, True),
        ({"max_length": 512}, {"max_length": 2048}, False),
        ({"max_length": 2048, "checkpointing": "none"}, {"max_length": 512}, True),
        ({"max_length": 2048}, {"max_length": 512, "checkpointing": "none"}, False),
        (
            {"batching": "bfd", "max_length": 2048},
            {"batching": "bfd", "max_length": 512},
            True,
        ),
        ({"batching": "bfd"}, {"batching": "padded"}, False),
        ({"batching": "padding_free"}, {}, False),
        ({"batching": "padding_free"}, {"batching": "padding_free"}, True),
        ({"adaptation": "lora", "lora_r": 64}, {"adaptation": "lora", "lora_r": 8}, True),
        ({"adaptation": "lora"}, {}, False),
        ({}, {"adaptation": "lora"}, False),
        ({"pad_to_multiple_of": 128}, {"pad_to_multiple_of": 64}, True),
        ({"pad_to_multiple_of": 8}, {"pad_to_multiple_of": "none"}, False),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, False),
        ({"attn_implementation": "eager"}, {}, False),
    ],
)
def test_demands(larger: dict[str, Any], smaller: dict[str, Any], expected: bool) -> None:
    space = resolve()
    a, b = differing(space, **larger), differing(space, **smaller)
    assert space.demands_at_least(a, b) is expected
