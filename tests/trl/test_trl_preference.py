"""DPO, KTO and reward models: how their data is read, and what their runs take.

As for SFT, the same run is made with real tensors on the CPU and on the pretend accelerator.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest
from copies_kit import both_ways
from datasets import load_from_disk
from trl.trainer import dpo_trainer, kto_trainer

from autotune.errors import UsageError
from autotune.space.context import DataProfile
from autotune.space.knobs.batching import with_loss
from autotune.space.space import SearchSpace
from autotune.trainers import raw
from autotune.trainers.base import load

pytestmark = [pytest.mark.trl, pytest.mark.usefixtures("quick")]

TOLERANCE = 0.005
SLACK_BYTES = 2048
NUM_ROWS = 60
TRAINERS = ("dpo", "kto", "reward")
LORA = {"use_peft": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preference")


def words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(2, kit.VOCABULARY)}" for _ in range(count))


def rows_for(trainer: str) -> list[dict[str, Any]]:
    """Return rows whose lengths are known: prompts of 5 to 20 words, completions of 3 to 40."""
    draw = random.Random(11)
    found = []
    for number in range(NUM_ROWS):
        prompt = words(draw, draw.randint(5, 20))
        chosen, rejected = (words(draw, draw.randint(3, 40)) for _ in range(2))
        if trainer == "kto":
            found.append({"prompt": prompt, "completion": " " + chosen, "label": number % 2 == 0})
        else:
            row = {"chosen": " " + chosen, "rejected": " " + rejected}
            found.append({"prompt": prompt, **row})
    return found


def request_for(
    trainer: str, model: str, work: Path, rows: list[dict[str, Any]] | None = None, **keys: Any
) -> dict[str, Any]:
    """Write the data and return what asks to prepare it."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in (rows_for(trainer) if rows is None else rows))
    )
    data = {"path": "json", "data_files": str(path), "split": "train"}
    return {
        "trainer": trainer,
        "config": {"model_name_or_path": model, "datasets": [data], **keys},
        "folder": str(work),
        "max_lengths": [16, 32],
    }


@pytest.fixture(scope="module")
def prepared(folder: Path, tiny: str) -> dict[str, dict[str, Any]]:
    """Return each trainer's answer to preparing its rows."""
    return {name: load(name).prepare(request_for(name, tiny, folder / name)) for name in TRAINERS}


def spec_for(
    trainer: str, path: Path, tiny: str, answer: Mapping[str, Any], config: Mapping[str, Any]
) -> Any:
    fixed = SearchSpace.load(trainer).fixed
    return kit.make_spec(path, tiny, answer["data_folder"], {**fixed, **config}, trainer=trainer)


# -- what is known of the data ------------------------------------------------------------------


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_profile_counts_what_trl_trains_on(
    trainer: str, prepared: dict[str, dict[str, Any]]
) -> None:
    data = DataProfile.from_dict(prepared[trainer]["data"])
    rows = rows_for(trainer)
    assert data.num_rows == NUM_ROWS
    assert data.sequences_per_row == (1 if trainer == "kto" else 2)

    def size(text: str) -> int:
        return len(text.split()) + 1  # and the end of the text

    if trainer == "kto":
        longest = [size(row["prompt"]) - 1 + size(row["completion"]) for row in rows]
        assert data.num_loss_tokens == sum(size(row["completion"]) for row in rows)
        assert data.num_tokens == sum(longest)
    else:
        pairs = [
            [size(row["prompt"]) - 1 + size(row[part]) for part in ("chosen", "rejected")]
            for row in rows
        ]
        longest = [max(pair) for pair in pairs]
        assert data.num_tokens == sum(sum(pair) for pair in pairs)
    assert data.longest == max(longest)
    assert sum(data.length_counts.values()) == NUM_ROWS


@pytest.mark.parametrize("trainer", TRAINERS)
def test_which_ways_of_checkpointing_work_is_found_out(
    trainer: str, prepared: dict[str, dict[str, Any]]
) -> None:
    refused = prepared[trainer]["refusals"]["checkpointing"]
    assert "full" not in refused
    for reason in refused.values():
        assert reason.startswith("TRL 1.")


def test_kto_needs_two_rows_in_a_micro_batch(prepared: dict[str, dict[str, Any]]) -> None:
    assert "1" in prepared["kto"]["refusals"][with_loss("kto")]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_data_of_another_kind_names_the_columns_and_who_takes_it(
    trainer: str, tiny: str, tmp_path: Path
) -> None:
    rows = [{"messages": [{"role": "user", "content": "w3"}]}] * 3
    with pytest.raises(UsageError) as caught:
        load(trainer).prepare(request_for(trainer, tiny, tmp_path, rows))
    assert "'chosen' and 'rejected'" in caught.value.message
    assert "'messages'" in caught.value.message
    assert caught.value.hint == "This data would do for: --trainer sft."


@pytest.mark.parametrize("trainer", TRAINERS)
def test_rows_of_several_parts_are_not_made_up(trainer: str, tiny: str, tmp_path: Path) -> None:
    request = request_for(trainer, tiny, tmp_path) | {"assume": {"length": 64, "count": 8}}
    with pytest.raises(UsageError, match=f"cannot be made up for {trainer}"):
        load(trainer).prepare(request)


# -- what a run takes ---------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "no_checkpointing": {"gradient_checkpointing": False},
    "lora": LORA,
    "nf4": {**LORA, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {**LORA, "load_in_8bit": True},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "short": {"max_length": 24},
    "bfloat16": {"dtype": "bfloat16"},
    "adafactor": {"optim": "adafactor"},
    "multiple": {"pad_to_multiple_of": 64},
}
OF_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo precompute": ("dpo", {"precompute_ref_log_probs": True}),
    "dpo ipo": ("dpo", {"loss_type": "ipo"}),
    "kto apo": ("kto", {"loss_type": "apo_zero_unpaired"}),
    "kto precompute": ("kto", {"precompute_ref_log_probs": True}),
    "reward centre": ("reward", {"center_rewards_coefficient": 0.01}),
}
CONFIGS_OF = {
    # TRL makes adapters bfloat16, and the head that scores is one of them: only under autocast
    # does it take the float32 that comes from the layers.
    "reward": {kind: {**CONFIGS[kind], "bf16": True} for kind in ("nf4", "int8")},
}
CASES = [
    *(
        pytest.param(name, CONFIGS_OF.get(name, {}).get(kind, keys), id=f"{name} {kind}")
        for name in TRAINERS
        for kind, keys in CONFIGS.items()
    ),
    *(pytest.param(name, keys, id=kind) for kind, (name, keys) in OF_ONE.items()),
]


@pytest.mark.parametrize(("trainer", "config"), CASES)
def test_the_pretend_device_counts_what_real_tensors_take(
    trainer: str,
    config: dict[str, Any],
    tmp_path: Path,
    tiny: str,
    prepared: dict[str, dict[str, Any]],
) -> None:
    answer = prepared[trainer]
    real, _ = kit.run_real(spec_for(trainer, tmp_path / "real", tiny, answer, config))
    virtual, _ = kit.run_virtual(spec_for(trainer, tmp_path / "virtual", tiny, answer, config))
    kit.compare(real, virtual, tolerance=TOLERANCE, slack_bytes=SLACK_BYTES)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_offloaded_activations_leave_the_device_for_the_host(
    trainer: str, tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    config = {"gradient_checkpointing": False}
    runs = {}
    for name, more in (("kept", {}), ("left", {"activation_offloading": True})):
        spec = spec_for(trainer, tmp_path / name, tiny, prepared[trainer], {**config, **more})
        runs[name] = kit.run_virtual(spec)[0]
    kept, left = (max(run.peak_bytes.values()) for run in (runs["kept"], runs["left"]))
    assert left < 0.97 * kept
    assert runs["left"].host_peak_bytes > 0.5 * (kept - left)


def test_a_reference_model_is_a_second_copy_of_the_weights(
    tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    loaded = {}
    for name, config in (
        ("reference", {}),
        ("precomputed", {"precompute_ref_log_probs": True}),
    ):
        spec = spec_for("dpo", tmp_path / name, tiny, prepared["dpo"], config)
        loaded[name] = kit.run_virtual(spec)[0].loaded_bytes
    assert loaded["reference"] == pytest.approx(2 * loaded["precomputed"], rel=0.01)


@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_random_weights_are_not_hashed_to_name_a_file(
    trainer: str,
    tmp_path: Path,
    tiny: str,
    prepared: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of large ones, it would take longer than the probe."""
    hashed = []
    module = {"dpo": dpo_trainer, "kto": kto_trainer}[trainer]
    monkeypatch.setattr(module, "hash_module", lambda model: hashed.append(model) or "0")
    config = {"precompute_ref_log_probs": True}
    kit.run_virtual(spec_for(trainer, tmp_path, tiny, prepared[trainer], config))
    assert not hashed
    assert module.hash_module(None) == "0"


@pytest.mark.parametrize("trainer", TRAINERS)
def test_rows_that_trl_leaves_out_are_not_counted(
    trainer: str, tmp_path: Path, tiny: str, prepared: dict[str, dict[str, Any]]
) -> None:
    rows = load_from_disk(prepared[trainer]["data_folder"])
    limit = 24
    kept = {
        # Pairs that are longer are left out; the others drop rows without room for a completion.
        "reward": sum(max(lengths) <= limit for lengths in rows[raw.LENGTHS]),
        "dpo": sum(prompt < limit for prompt in rows[raw.NUM_PROMPT]),
        "kto": sum(prompt < limit for prompt in rows[raw.NUM_PROMPT]),
    }[trainer]
    spec = spec_for(trainer, tmp_path, tiny, prepared[trainer], {"max_length": limit})
    with kit.built(spec) as session:
        facts = session._facts
    assert facts["rows_per_epoch"] == kept
    assert 0 < facts["tokens_per_epoch"] <= kept * limit * (1 if trainer == "kto" else 2)


# -- what is not run ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(folder: Path) -> str:
    return kit.write_model(folder / "deep", num_hidden_layers=24)


@pytest.mark.parametrize("config", [{}, LORA, {"gradient_checkpointing": False}], ids=str)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_repeats_is_counted_and_not_run(
    trainer: str,
    config: dict[str, Any],
    tmp_path: Path,
    deep: str,
    prepared: dict[str, dict[str, Any]],
) -> None:
    config = {**SearchSpace.load(trainer).fixed, **config}
    found = both_ways(
        tmp_path,
        deep,
        prepared[trainer]["data_folder"],
        {**config, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        trainer=trainer,
        measured_steps=1,
        rows_per_step=2,
    )
    # A model that is called twice in a micro-batch, by KTO's KL term or as its own reference, is
    # run in full.
    is_called_once = trainer == "reward" or (trainer == "dpo" and "use_peft" not in config)
    assert (found.num_thinned > 0) == is_called_once
