"""The device backend of a card that is not there, without a training library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from autotune.devices.virtual import VirtualDevice
from autotune.errors import UnknownNameError, UsageError
from autotune.probe.result import Outcome
from autotune.units import GIB, MIB
from autotune.virtual import state, values
from autotune.virtual.allocator import OutOfMemory
from autotune.worker.classify import classify

Make = Callable[..., VirtualDevice]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return what makes a card, active until the test ends."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def call(card: str = "rtx-4090", settings: str = "") -> VirtualDevice:
        if settings:
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
        return VirtualDevice(f"virtual:{card}")

    yield call
    session = state.current()
    if session is not None:
        session.trace.close()
    state.activate(None)
    values.clear()


def take(mib: int) -> Any:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="virtual")


def test_an_nvidia_card_is_described_as_the_cuda_device_that_it_stands_for(make: Make) -> None:
    device = make("rtx-4090")
    found = device.describe()
    assert (found.name, found.kind) == ("virtual:rtx-4090", "cuda")
    assert found.is_virtual
    assert found.label == "NVIDIA GeForce RTX 4090 (virtual)"
    assert found.total_bytes == found.free_bytes == device.card.memory_bytes
    assert found.capability == (8, 9)
    assert found.supports_bf16
    assert (device.kind, device.source) == ("virtual", "predicted")
    assert device.trainer_keys() == {}
    assert device.used_by_others_bytes() == 0
    device.synchronize()


def test_an_amd_card_is_described_as_rocm_does(make: Make) -> None:
    found = make("mi300x").describe()
    assert (found.kind, found.capability) == ("cuda", (9, 4))
    assert found.label == "AMD Instinct MI300X (virtual)"
    assert found.supports_bf16
    assert torch.virtual.get_device_name() == "AMD Instinct MI300X"


def test_a_card_without_bfloat16_says_so(make: Make) -> None:
    found = make("t4").describe()
    assert (found.capability, found.supports_bf16) == ((7, 5), False)
    assert not torch.virtual.is_bf16_supported()
    assert torch.virtual.get_device_capability() == (7, 5)
    assert torch.virtual.get_device_properties().multi_processor_count == 40


def test_an_unknown_card_is_refused(make: Make) -> None:
    with pytest.raises(UnknownNameError, match="rtx-409"):
        make("rtx-409")
    assert state.current() is None


def test_peaks_are_those_of_the_phase(make: Make) -> None:
    device = make()
    device.reset_peaks("load")
    kept = take(100)
    first = device.read_peaks()
    assert first.allocated_bytes == first.reserved_bytes == 100 * MIB
    assert first.used_bytes == 100 * MIB + device.card.context_bytes
    assert first.resident_bytes == 0
    device.reset_peaks("first_step")
    more = take(300)
    del more
    assert device.read_peaks().allocated_bytes == 400 * MIB
    device.reset_peaks("later_steps")
    last = device.read_peaks()
    assert (last.allocated_bytes, last.reserved_bytes) == (100 * MIB, 400 * MIB)
    assert device.num_alloc_retries() == 0
    del kept


def test_the_card_itself_is_a_limit(make: Make) -> None:
    device = make("rtx-4090")
    tensors = [take(8 * 1024) for _ in range(2)]
    device.read_peaks()
    # 24 GiB fit on the board, but not beside the context.
    tensors.append(take(device.card.memory_bytes // MIB - 16 * 1024))
    with pytest.raises(OutOfMemory):
        device.read_peaks()


def test_the_budget_limits_the_allocator(make: Make) -> None:
    device = make()
    device.limit_memory(2 * GIB)
    context = device.card.context_bytes
    tensors = [take(1024)]
    device.read_peaks()
    tensors.append(take(1024))
    with pytest.raises(OutOfMemory) as caught:
        device.read_peaks()
    assert caught.value.limit_bytes == 2 * GIB - context
    # What was in use can still be reported.
    device.lift_limit()


def test_a_budget_cannot_raise_the_cards_limit(make: Make) -> None:
    device = make("t4")
    device.limit_memory(80 * GIB)
    take(20 * 1024)
    with pytest.raises(OutOfMemory) as caught:
        device.read_peaks()
    assert caught.value.limit_bytes == device.card.memory_bytes - device.card.context_bytes


def test_a_budget_below_the_context_leaves_nothing(make: Make) -> None:
    device = make()
    device.limit_memory(100 * MIB)
    take(1)
    with pytest.raises(OutOfMemory) as caught:
        device.read_peaks()
    assert caught.value.limit_bytes == 0


def test_a_lifted_limit_shows_how_much_is_needed(make: Make) -> None:
    device = make("t4")
    device.limit_memory(2 * GIB)
    device.lift_limit()
    take(20 * 1024)
    assert device.read_peaks().allocated_bytes == 20 * GIB


def test_its_out_of_memory_is_the_candidates_verdict(make: Make) -> None:
    device = make()
    device.limit_memory(2 * GIB)
    take(4096)
    with pytest.raises(OutOfMemory) as caught:
        device.read_peaks()
    signatures = device.oom_signatures()
    for phase in ("load", "later_steps", None):
        found = classify(caught.value, signatures, device_kind="virtual", phase=phase)
        assert found is Outcome.DEVICE_OOM
    wrapped = RuntimeError("in a step")
    wrapped.__cause__ = caught.value
    assert classify(wrapped, signatures, device_kind="virtual") is Outcome.DEVICE_OOM
    assert classify(caught.value, (), device_kind="virtual") is Outcome.CRASHED


def test_the_clock_is_the_cards(make: Make) -> None:
    device = make()
    assert device.clock() == 0.0
    a = torch.empty(1024, 1024, dtype=torch.bfloat16, device="virtual")
    started = device.clock()
    torch.mm(a, a)
    one = device.clock() - started
    assert one > 0
    for _ in range(3):
        torch.mm(a, a)
    assert device.clock() - started == pytest.approx(4 * one)


def test_a_faster_card_takes_less_time(make: Make) -> None:
    taken = []
    for card in ("t4", "h100"):
        device = make(card)
        a = torch.empty(4096, 4096, dtype=torch.float16, device="virtual")
        started = device.clock()
        torch.mm(a, a)
        taken.append(device.clock() - started)
    assert taken[0] > 5 * taken[1]


def test_the_facts_of_the_run_are_what_the_peak_is_made_of(make: Make) -> None:
    device = make()
    device.reset_peaks("first_step")
    kept = [take(10) for _ in range(30)]
    device.reset_peaks("later_steps")
    facts = device.run_facts(num_points=8)
    assert set(facts) == {"makeup"}
    makeup = facts["makeup"]
    assert makeup["peak_bytes"] == 300 * MIB == sum(makeup["at_peak"].values())
    assert len(makeup["timeline"]["points"]) == 8
    assert [name for _, name in makeup["timeline"]["marks"]] == ["first step", "later steps"]
    del kept


def test_the_allocators_settings_are_the_environments(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserved(device: VirtualDevice) -> int:
        tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="virtual")
        found = device.read_peaks().reserved_bytes
        del tensor
        assert found is not None
        return found

    assert reserved(make()) == 20 * MIB
    assert reserved(make(settings="expandable_segments:True")) == 20 * MIB
    assert reserved(make(settings="large_segment_size_mb:40")) == 40 * MIB
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "large_segment_size_mb:60")
    assert reserved(make()) == 60 * MIB
    assert reserved(make(settings="large_segment_size_mb:40")) == 40 * MIB


def test_a_share_of_the_card_is_a_limit(make: Make) -> None:
    device = make("t4", settings="per_process_memory_fraction:0.5")
    take(7 * 1024)
    device.read_peaks()
    take(1024)
    tensor = take(8 * 1024)
    with pytest.raises(OutOfMemory):
        device.read_peaks()
    del tensor


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("max_split_size:128", "unknown allocator setting 'max_split_size'"),
        ("expandable_segments:yes", "expandable_segments cannot be 'yes'"),
        ("backend:cudaMallocAsync", "cudaMallocAsync is not supported"),
    ],
)
def test_a_setting_that_is_not_known_is_refused(settings: str, message: str, make: Make) -> None:
    with pytest.raises(UsageError, match=message):
        make(settings=settings)
