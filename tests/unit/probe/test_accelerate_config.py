from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import PrerequisiteError, UsageError
from autotune.export import write_configs
from autotune.probe import accelerate_config
from autotune.probe.result import Outcome
from autotune.report.trial import Trial

OWN = {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}}


@pytest.mark.parametrize("sharding", accelerate_config.SHARDINGS)
@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_what_is_written_is_read_as_the_same_sharding(
    tmp_path: Path, sharding: str, kind: str
) -> None:
    config = accelerate_config.written(sharding, device_kind=kind, processes=3)
    path = accelerate_config.write(config, tmp_path / "a.yaml", trainer_file="best.yaml")
    assert accelerate_config.read(path) == config
    assert accelerate_config.sharding_of(config) == sharding
    assert config["num_processes"] == 3
    assert config["mixed_precision"] == "no"
    assert config["use_cpu"] is (kind == "cpu")


@pytest.mark.parametrize("sharding", accelerate_config.SHARDINGS)
def test_accelerate_reads_it(tmp_path: Path, sharding: str) -> None:
    args = pytest.importorskip("accelerate.commands.config.config_args")
    config = accelerate_config.written(sharding, device_kind="cuda", processes=2)
    path = accelerate_config.write(config, tmp_path / "a.yaml", trainer_file="best.yaml")
    found = args.load_config_from_file(str(path))
    assert found.num_processes == 2
    assert found.distributed_type.value == config["distributed_type"]
    assert found.fsdp_config == config.get("fsdp_config", {})
    assert found.deepspeed_config == config.get("deepspeed_config", {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_processes": 1}, "num_processes: 1; several are at least 2"),
        ({"num_processes": "2"}, "num_processes: 2"),
        ({"num_machines": 2}, "for 2 machines"),
        ({"distributed_type": None}, None),
    ],
)
def test_a_file_for_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str | None
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({**OWN, **changes}))
    if said is None:
        assert accelerate_config.sharding_of(accelerate_config.read(path)) == "none"
        return
    with pytest.raises(UsageError, match=said):
        accelerate_config.read(path)


@pytest.mark.parametrize(
    "text",
    [
        "- a list\n",
        "a: [",
        "mixed_precision: bf16\n",
        "\x00",
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: abc\n",
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: [1]\n",
        "distributed_type: MULTI_GPU\nnum_processes: 2\nfoo: 2020-01-01\n",
        "distributed_type: MULTI_GPU\nnum_processes: 2\nfoo: !!binary aGk=\n",
        "&a\ndistributed_type: MULTI_GPU\nnum_processes: 2\nfoo: *a\n",
    ],
)
def test_what_is_no_accelerate_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="accelerate config"):
        accelerate_config.read(path)
    with pytest.raises(PrerequisiteError, match="cannot be read"):
        accelerate_config.read(tmp_path / "gone.yaml")


def test_a_deepspeed_file_is_found_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    inner = {"deepspeed_config_file": "ds.json"}
    path.write_text(yaml.safe_dump({**OWN, "deepspeed_config": inner}))
    found = accelerate_config.read(path)["deepspeed_config"]["deepspeed_config_file"]
    assert found == str(tmp_path / "ds.json")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"distributed_type": "FSDP"}, "fsdp1"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 1}}, "zero1"),
        ({"distributed_type": "MULTI_XPU"}, "ddp"),
        ({"distributed_type": "NO"}, "no"),
    ],
)
def test_sharding_of_the_user_s_own(config: dict[str, Any], found: str) -> None:
    assert accelerate_config.sharding_of(config) == found


class _Report:
    def __init__(self, *trials: Trial) -> None:
        self.pareto = trials

    def pick(self, which: str | int) -> Trial:
        return self.pareto[0]


def test_both_files_are_exported_and_taken_away_together(tmp_path: Path) -> None:
    config = accelerate_config.written("zero2", device_kind="cuda", processes=2)
    trial = Trial(
        number=7,
        candidate={"sharding": "zero2"},
        config={"max_length": 5},
        outcome=Outcome.OK,
        accelerate=config,
        facts={"trainer": "sft"},
    )
    assert Trial.from_dict(trial.to_dict()).accelerate == config
    write_configs(_Report(trial), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    pairs = {"best.yaml", "best.accelerate.yaml", "trial-0007.yaml", "trial-0007.accelerate.yaml"}
    assert names == pairs
    assert yaml.safe_load((tmp_path / "trial-0007.accelerate.yaml").read_text()) == config
    text = (tmp_path / "trial-0007.yaml").read_text()
    launched = "trl sft --config trial-0007.yaml --accelerate_config trial-0007.accelerate.yaml"
    assert launched in text
    assert "the package deepspeed, for sharding=zero2" in text
    own = tmp_path / "mine.accelerate.yaml"
    own.write_text("mine: true\n")
    write_configs(_Report(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [own.name]
