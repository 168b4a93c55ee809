"""The pretend accelerator against real tensors: the same TRL run allocates the same bytes on both.

Where a CPU and a card differ by design, one side is told so by name and not by a tolerance:
attention's kernel is the CPU's on both sides (``Session(host_kernels=True)``); a card's scratch
and workspaces are left out (``scratch=False``, ``workspace_bytes=0``); and real tensors take a
card's way where PyTorch, bitsandbytes and TRL ask for the device's name
(``realtrace._like_a_card``).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest

from autotune.space.context import Context
from autotune.space.space import SearchSpace
from autotune.virtual.trace import Trace

pytestmark = pytest.mark.usefixtures("quick")

TOLERANCE = 0.005
"""What is promised: the largest relative deviation of any figure."""

SLACK_BYTES = 2048
"""What is seen: bitsandbytes' two code tables of 1 KiB, which a CPU holds once for all uses."""

NUM_RANDOM = 30
LORA = {"use_peft": True}
NF4 = {**LORA, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {**LORA, "load_in_8bit": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agreement")


@pytest.fixture(scope="module")
def rows(folder: Path) -> str:
    return kit.write_rows(folder / "rows")


@pytest.fixture(scope="module")
def context() -> Context:
    """Return what a search would know of the tiny model, its rows and a CPU."""
    return kit.know(kit.LENGTHS, global_batch=64)


def agree(
    tmp_path: Path, tiny: str, rows: str, config: Mapping[str, Any], **changes: Any
) -> tuple[Trace, Trace]:
    """Run ``config`` on both sides and compare every figure; return both traces."""
    real, real_trace = kit.run_real(
        kit.make_spec(tmp_path / "real", tiny, rows, config, **changes)
    )
    virtual, virtual_trace = kit.run_virtual(
        kit.make_spec(tmp_path / "virtual", tiny, rows, config, **changes)
    )
    kit.compare(real, virtual, tolerance=TOLERANCE, slack_bytes=SLACK_BYTES)
    return real_trace, virtual_trace


# -- every value of every knob, one at a time --------------------------------------------------


def knob_values() -> list[tuple[str, Any]]:
    """Return every value of the space's knobs, those that a CPU refuses included."""
    space = SearchSpace.load("sft")
    pairs = [
        (knob.name, value)
        for knob in space.knobs
        if knob.domain is not None
        for value in knob.domain.values
        if (knob.name, value) == ("sharding", "ddp") or knob.name != "sharding"
    ]
    return [*pairs, *(("max_length", length) for length in (40, 96, 128))]


ON_A_CARD_ONLY = {
    ("attn_implementation", "flash_attention_2"),
    ("attn_implementation", "flash_attention_3"),
    ("attn_implementation", "kernels-community/flash-attn2"),
    ("activation_offloading", "on"),
    ("allocator", "expandable_segments"),
    ("dtype", "float16"),
}


@pytest.mark.trl
@pytest.mark.parametrize(("name", "value"), knob_values(), ids=lambda item: str(item))
def test_every_value_of_every_knob(
    name: str, value: Any, context: Context, tmp_path: Path, tiny: str, rows: str
) -> None:
    if (name, value) in ON_A_CARD_ONLY:
        pytest.skip("a CPU has no such thing")
    space = SearchSpace.load("sft")
    pins: dict[str, Any] = {name: value}
    if name.startswith("lora_"):
        pins["adaptation"] = "lora"
    if name != "max_length" and value != "padding_free":
        pins["max_length"] = 96  # bins of TRL's default, 1,024 tokens, take a CPU long
    resolved = space.resolve(context, pins)
    candidate = resolved.baseline
    assert candidate.get(name, value) == value
    agree(tmp_path, tiny, rows, resolved.config(candidate))


@pytest.mark.trl
@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_random_combinations(
    seed: int, context: Context, tmp_path: Path, tiny: str, rows: str
) -> None:
    resolved = SearchSpace.load("sft").resolve(context)
    draw = random.Random(1000 + seed)

    def suggest(name: str, values: Any, ordered: bool, /) -> Any:
        most = {"per_device_train_batch_size": 16, "max_length": 128}.get(name.split("@")[0])
        return draw.choice([value for value in values if most is None or value <= most])

    config = resolved.config(resolved.draw(suggest))
    agree(tmp_path, tiny, rows, config)


# -- what the space does not vary ----------------------------------------------------------------


@pytest.mark.trl
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bf16": True},
        {"bf16": True, "gradient_checkpointing": False, "attn_implementation": "eager"},
        {"max_grad_norm": 0.0},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1},
        {**LORA, "use_dora": True},
        {**LORA, "use_rslora": True, "lora_dropout": 0.0},
        {**NF4, "use_dora": True},
        {**NF4, "dtype": "bfloat16", "bf16": True},
        {**INT8, "bf16": True},
        *({"optim": name} for name in ("sgd", "adagrad", "rmsprop", "lion_8bit")),
        {"packing": True, "packing_strategy": "bfd", "max_length": 96, "bf16": True,
         "attn_implementation": "eager"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_beyond_the_space(
    config: dict[str, Any], tmp_path: Path, tiny: str, rows: str
) -> None:
    agree(tmp_path, tiny, rows, config)


@pytest.mark.trl
def test_another_architecture(tmp_path: Path, rows: str) -> None:
    model = kit.write_model(tmp_path / "qwen3", "qwen3")
    agree(tmp_path, model, rows, {"bf16": True})


@pytest.mark.trl
@pytest.mark.parametrize("phases", [("eval",), ("save",), ("eval", "save")], ids=str)
def test_eval_and_save(phases: tuple[str, ...], tmp_path: Path, tiny: str, rows: str) -> None:
    agree(tmp_path, tiny, rows, {}, phases=phases, overlay={})


@pytest.mark.trl
@pytest.mark.parametrize("config", [{}, LORA, NF4], ids=str)
def test_kinds_of_memory_agree(
    config: dict[str, Any], tmp_path: Path, tiny: str, rows: str
) -> None:
    real, virtual = agree(tmp_path, tiny, rows, config)
    # Temporaries are left out: a mode on real tensors sees operators that are made of others from
    # above, and what they make inside only where they return it.
    assert kit.bytes_by_kind(virtual) == pytest.approx(kit.bytes_by_kind(real), rel=TOLERANCE)
