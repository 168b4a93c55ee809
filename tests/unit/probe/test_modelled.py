"""Notes on what of a prediction is modelled."""

from __future__ import annotations

import pytest

from autotune.probe import modelled

EXPANDS = "expandable_segments:True"
ASLEEP = {"use_vllm": True, "vllm_enable_sleep_mode": True}


def test_without_an_engine_there_is_nothing_to_say() -> None:
    assert modelled.engine_of(None) is None
    assert modelled.engine_of({"peak_bytes": 1}) is None
    assert modelled.note_on_engines([]) == ""


@pytest.mark.parametrize(
    ("keys", "env", "is_noted"),
    [
        (ASLEEP, {"PYTORCH_ALLOC_CONF": EXPANDS}, True),
        (ASLEEP, {"PYTORCH_ALLOC_CONF": EXPANDS, "PYTORCH_CUDA_ALLOC_CONF": EXPANDS}, False),
        (ASLEEP, {"PYTORCH_CUDA_ALLOC_CONF": EXPANDS}, False),
        (ASLEEP, {}, False),
        ({"use_vllm": True}, {"PYTORCH_ALLOC_CONF": EXPANDS}, False),
        ({"vllm_enable_sleep_mode": True}, {"PYTORCH_ALLOC_CONF": EXPANDS}, False),
    ],
)
def test_the_name_that_older_versions_look_under(
    keys: dict[str, bool], env: dict[str, str], is_noted: bool
) -> None:
    assert bool(modelled.note_on_allocator({**keys, "env": env})) == is_noted
