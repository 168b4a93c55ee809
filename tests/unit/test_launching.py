from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune import launching
from autotune.errors import PrerequisiteError, UsageError
from autotune.plan import Request
from autotune.probe import accelerate_config
from autotune.space.context import DeviceInfo
from autotune.space.space import SearchSpace
from autotune.testing.contexts import make_context, make_cpu, make_gpu


def config_file(folder: Path, **changes: Any) -> str:
    config = accelerate_config.written("ddp", device_kind="cuda", processes=2)
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**config, **changes}))
    return str(path)


@pytest.mark.parametrize(
    ("processes", "device", "said"),
    [
        (0, "cpu", "one at least"),
        (2, "virtual:rtx-4090", "2 processes can't be predicted"),
        (2, "mps", "one mps device"),
    ],
)
def test_what_no_machine_can_do_is_refused(processes: int, device: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        launching.check_request(processes, None, device=device)
    assert raised.value.exit_code == 2


def test_a_file_and_a_number_must_agree(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    launching.check_request(2, path, device="cuda")
    launching.check_request(None, path, device="cuda")
    with pytest.raises(UsageError, match="num_processes: 2") as raised:
        launching.check_request(4, path, device="cuda")
    assert raised.value.message.startswith("--processes 4, but")
    with pytest.raises(UsageError, match="can't be predicted"):
        launching.check_request(None, path, device="virtual:rtx-4090")


def test_there_must_be_a_device_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = make_gpu(num_devices=2)
    assert launching.share(gpu, 2) is gpu
    with pytest.raises(
        PrerequisiteError, match="3 processes need a cuda device each, and there are 2"
    ) as raised:
        launching.share(gpu, 3)
    assert "--processes 2" in raised.value.hint
    monkeypatch.setattr(launching.host, "usable_cpus", lambda: 2)
    with pytest.raises(PrerequisiteError, match="more than the 2 cores"):
        launching.share(make_cpu(), 3)


def test_processes_on_the_cpu_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching.host, "usable_cpus", lambda: 4)
    cpu = make_cpu()
    part = launching.share(cpu, 2)
    assert part.total_bytes == cpu.total_bytes // 2
    assert part.free_bytes == cpu.free_bytes // 2
    assert "1 of 2 processes" in part.label
    assert launching.share(cpu, 1) == cpu


def sharding_of(path: str | None, device: DeviceInfo) -> str | None:
    found = launching.check_request(None, path, device=device.kind)
    return launching.check_sharding(found, path, device, {})


def test_a_file_that_the_device_would_not_follow_is_refused(tmp_path: Path) -> None:
    path = config_file(tmp_path, distributed_type="FSDP", fsdp_config={"fsdp_version": 2})
    with pytest.raises(UsageError, match="without a word"):
        sharding_of(path, make_cpu())
    assert sharding_of(path, make_gpu()) == "fsdp2"
    path = config_file(tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": 3})
    with pytest.raises(PrerequisiteError, match="deepspeed") as raised:
        sharding_of(path, make_gpu())
    assert "trl-autotune[deepspeed]" in raised.value.hint
    assert sharding_of(None, make_gpu()) is None


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = config_file(tmp_path, distributed_type="MULTI_GPU")
    request = Request(
        model="m", dataset="d", space=SearchSpace.load("sft"), accelerate_config=path
    )
    Path(path).unlink()
    assert request.num_processes == 2
    assert request.launched["distributed_type"] == "MULTI_GPU"


def test_the_user_is_told_what_figures_mean() -> None:
    assert launching.notices(make_context(), {}) == []
    (one,) = launching.notices(make_context(num_processes=2), {})
    assert "2 processes" in one
    assert "needs most" in one
    found = launching.notices(make_context(num_processes=2), {"mixed_precision": "bf16"})
    assert "mixed_precision: bf16" in found[1]


def test_one_process_leaves_the_identity_as_it_was() -> None:
    assert launching.identity(1, {}) == {}
    assert launching.identity(2, {}) == {"processes": 2}
    assert launching.identity(2, {"a": 1}) == {"processes": 2, "accelerate_config": {"a": 1}}
