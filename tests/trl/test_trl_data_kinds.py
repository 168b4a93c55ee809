"""Every kind of data with every trainer: taken, or refused, and told which trainer takes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UsageError
from autotune.space.space import SearchSpace
from autotune.space.trainers import BUILTIN
from autotune.trainers import columns
from autotune.trainers.base import load
from autotune.worker import demo

pytestmark = pytest.mark.trl

GENERATE = {"grpo", "rloo", "online_dpo", "distillation"}
TAKEN_BY = {
    "chat": {"sft"},
    "preference": {"dpo", "reward", "kto"} | GENERATE,
    "pairs": {"dpo", "reward", "kto"},
    "unpaired": {"sft", "kto"} | GENERATE,
    "prompts": GENERATE,
    "text": {"sft"},
    "labelled": set(),
}
NEEDS = {
    "sft": "'messages'",
    "dpo": "'chosen' and 'rejected'",
    "reward": "'chosen' and 'rejected'",
    "kto": "'prompt' and 'completion' and 'label'",
    **dict.fromkeys(GENERATE, "'prompt'"),
}


def rows(kind: str) -> list[dict[str, Any]]:
    if kind in demo.DATA:
        return demo.DATA[kind]()[:8]
    if kind == "pairs":
        whole = demo.preferences(8)
        return [{k: row["prompt"] + row[k] for k in ("chosen", "rejected")} for row in whole]
    return [{"text" if kind == "text" else "sentence": "a b c", "class": 1}] * 8


def test_every_trainer_is_here() -> None:
    assert set(NEEDS) == set(BUILTIN) == set(columns.TAKES)
    assert set(demo.DATA) <= set(TAKEN_BY)


PAIRS = [(kind, trainer) for kind in TAKEN_BY for trainer in BUILTIN]


@pytest.mark.parametrize(("kind", "trainer"), PAIRS)
def test_it_is_taken_or_refused_with_who_takes_it(
    kind: str, trainer: str, made: dict[str, str], tmp_path: Path
) -> None:
    data = rows(kind)
    if trainer in TAKEN_BY[kind]:
        columns.require(trainer, list(data[0]))
        return
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    request = {
        "trainer": trainer,
        "config": {
            "model_name_or_path": made["model"],
            "datasets": [{"path": "json", "data_files": str(path), "split": "train"}],
            **SearchSpace.load(trainer).fixed,
            **({"teacher_model_name_or_path": made["model"]} if trainer == "distillation" else {}),
        },
        "folder": str(tmp_path),
        "max_lengths": [],
    }
    with pytest.raises(UsageError) as caught:
        load(trainer).prepare(request)
    error = caught.value
    assert error.exit_code == 2
    assert NEEDS[trainer] in error.message
    assert all(f"'{name}'" in error.message for name in data[0])
    assert set(re.findall(r"--trainer (\w+)", error.hint)) == TAKEN_BY[kind]
