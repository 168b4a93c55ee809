"""What leaves the device for the host: memory that is counted, and not taken."""

from __future__ import annotations

import io
import resource
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

TIB = 1 << 40


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_copies_larger_than_this_machine_are_counted(session: Any) -> None:
    tensor = torch.empty(TIB // 2, dtype=torch.bfloat16, device="virtual")
    before = resident_bytes()
    kept = [tensor.to("cpu"), torch.empty_like(tensor, device="cpu", pin_memory=True)]
    kept[1].copy_(tensor)
    assert session.trace.host_bytes == 2 * TIB
    assert resident_bytes() - before < 64 << 20
    back = kept[0].to("virtual")
    assert back.shape == tensor.shape
    del kept
    assert session.trace.host_bytes == 0


def test_a_copy_keeps_shape_strides_and_dtype(session: Any) -> None:
    tensor = torch.empty(1000, 3000, device="virtual").t()
    copy = tensor.cpu()
    assert copy.device.type == "cpu"
    assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, (1, 3000), torch.float32)


def test_what_is_read_there_is_finite_and_nobody_elses(session: Any) -> None:
    for size in (10, 3000, 1 << 20):
        copy = torch.randn(size, device="virtual").cpu()
        assert torch.isfinite(copy).all()
        assert copy.unique().numel() == 1


def test_whole_numbers_arrive(session: Any) -> None:
    ids = torch.arange(100_000)
    assert torch.equal(ids.to("virtual").cpu(), ids)


def test_a_saved_state_holds_nothing_of_this_process(session: Any) -> None:
    model = torch.nn.Linear(512, 512, device="virtual")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert len(set(file.getvalue()[4096 : 512 * 512])) <= 4
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert found["weight"].device.type == "virtual"
    assert found["weight"].shape == (512, 512)


def test_a_checkpoint_of_the_host_is_loaded_onto_the_device(session: Any) -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(64, 64), "ids": torch.arange(5)}, file)
    file.seek(0)
    found = torch.load(file, map_location="virtual", weights_only=True)
    assert found["weight"].device.type == found["ids"].device.type == "virtual"
    assert session.trace.allocated_bytes >= 64 * 64 * 4
