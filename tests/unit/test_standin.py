"""Which card stands for a real device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune import standin
from autotune.probe.result import Measurement, MemoryPeak, StepRecord
from autotune.testing.contexts import make_cpu, make_gpu
from autotune.virtual import cards
from autotune.virtual.api import session_for

GIB = 1 << 30
RATES = {"fp32": 0.1, "bf16": 0.2, "bandwidth_bytes_per_s": 2e10}


@pytest.mark.parametrize("identity", sorted(cards.catalogue()))
def test_every_card_of_the_catalogue_stands_for_itself(identity: str) -> None:
    card = cards.catalogue()[identity]
    found = standin.of_accelerator(
        make_gpu(
            label=card.name,
            total_bytes=card.memory_bytes,
            capability=card.capability,
            supports_bf16=card.supports_bf16,
        )
    )
    assert found is not None
    assert found.id == identity
    assert found.memory_bytes == card.memory_bytes


@pytest.mark.parametrize(
    ("label", "gib", "capability", "identity"),
    [
        ("NVIDIA H200", 139.7, (9, 0), "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-80GB", 79.1, (8, 0), "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, (8, 0), "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 79.2, (8, 0), "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", 39.4, (8, 0), "a100-40gb-pcie"),
        ("NVIDIA H100 80GB HBM3", 79.2, (9, 0), "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", 79.2, (9, 0), "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 93.1, (9, 0), "h100-nvl-94gb"),
        ("NVIDIA GeForce RTX 4090", 23.5, (8, 9), "rtx-4090"),
        ("NVIDIA GeForce RTX 3080", 11.6, (8, 6), "rtx-3080-10gb"),  # the one with 12 GB
        ("NVIDIA GeForce RTX 3080 Ti", 11.6, (8, 6), "rtx-3080-ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.6, (8, 9), "rtx-4070-ti-super"),
        ("Tesla V100-SXM2-32GB", 31.7, (7, 0), "v100-32gb"),
        ("NVIDIA A10G", 22.1, (8, 6), "a10g"),
        ("NVIDIA A10", 22.1, (8, 6), "a10"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95, (12, 0), "rtx-pro-6000-blackwell"),
        ("AMD Instinct MI250X / MI250", 64.0, (9, 0), "mi250x"),
    ],
)
def test_labels_of_drivers_are_known(
    label: str, gib: float, capability: tuple[int, int], identity: str
) -> None:
    total = int(gib * GIB)
    found = standin.of_accelerator(make_gpu(label=label, total_bytes=total, capability=capability))
    assert found is not None
    assert found.id == identity
    assert found.memory_bytes == total


@pytest.mark.parametrize(
    ("label", "capability"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9)),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0)),
        ("NVIDIA GeForce RTX 4070 Ti", (8, 9)),
        ("NVIDIA X1", (13, 0)),
        ("NVIDIA GeForce RTX 4090", (7, 5)),
    ],
)
def test_another_chip_gets_the_rates_of_a_size(label: str, capability: tuple[int, int]) -> None:
    device = make_gpu(label=label, total_bytes=16 * GIB, capability=capability)
    found = standin.of_accelerator(device)
    assert found is not None
    assert found.memory_bytes == 16 * GIB
    assert found.capability == capability
    assert found.tflops == cards.find("16GiB").tflops


def test_a_card_without_bfloat16_does_not_stand_for_one_with_it() -> None:
    device = make_gpu(label="Some GPU", capability=(7, 5), supports_bf16=False)
    found = standin.of_accelerator(device)
    assert found is not None
    assert not found.supports_bf16
    assert "fp16" in found.tflops


def test_nothing_stands_for_a_card_that_the_context_fills() -> None:
    assert standin.of_accelerator(make_gpu(label="Some GPU", total_bytes=1 << 20)) is None


def test_the_card_is_a_file_that_a_virtual_device_takes(tmp_path: Path) -> None:
    for number, card in enumerate(
        (
            standin.of_cpu(make_cpu(label='A "quoted" \\ CPU é'), RATES, 500_000_000),
            standin.of_accelerator(make_gpu(label="NVIDIA H200")),
            standin.of_accelerator(make_gpu(label="AMD Instinct MI300X", capability=(9, 4))),
        )
    ):
        assert card is not None
        path = tmp_path / f"card-{number}.toml"
        path.write_text(standin.as_toml(card), encoding="utf-8")
        read = cards.find(str(path))
        for name in set(cards.Card.__dataclass_fields__) - {"id", "sources"}:
            assert getattr(read, name) == getattr(card, name), name


def test_the_context_of_a_cpu_is_what_the_baseline_held_beside_its_weights() -> None:
    assert standin.cpu_context_bytes(900 << 20, 400 << 20) == 500 << 20
    assert standin.cpu_context_bytes(None, 400 << 20) == standin.CPU_CONTEXT_BYTES
    # Weights that were never resident as a whole.
    assert standin.cpu_context_bytes(900 << 20, 900 << 20) == standin.CPU_CONTEXT_BYTES


def test_a_prediction_counts_as_the_device_would_have_measured_it() -> None:
    card = standin.of_cpu(make_cpu(), RATES, 500)
    step = StepRecord(
        micro_times_s=(1.0,),
        optimizer_time_s=0.1,
        num_tokens=10,
        num_positions=10,
        num_loss_tokens=10,
        num_rows=1,
    )
    predicted = Measurement(
        source="predicted",
        device_kind="virtual",
        accumulation_steps=1,
        steps=(step,),
        phases={
            "load": MemoryPeak(allocated_bytes=100, reserved_bytes=200, used_bytes=700),
            "later_steps": MemoryPeak(allocated_bytes=300, reserved_bytes=600, used_bytes=1100),
        },
    )
    assert standin.as_measured("cuda", predicted, card).peak_bytes == 1100
    on_cpu = standin.as_measured("cpu", predicted, card)
    assert on_cpu.peak_bytes == 600 + 500
    kept = replace(
        predicted, phases={"load": MemoryPeak(allocated_bytes=GIB, reserved_bytes=2 * GIB)}
    )
    # No more than the heap keeps before it shrinks.
    assert standin.as_measured("cpu", kept, card).peak_bytes == GIB + (256 << 20) + 500
    assert on_cpu.tokens_per_s == predicted.tokens_per_s


def test_what_stands_for_a_cpu_computes_as_one() -> None:
    rates = {"fp32": 0.1, "bf16": 0.2, "bandwidth_bytes_per_s": 2e10}
    cpu = session_for(standin.of_cpu(make_cpu(), rates))
    card = session_for(cards.find("rtx-4090"))
    # TRL's loss in Triton kernels, attention by CUDA's choice and kernels' own memory: a card's.
    assert (cpu.has_triton, cpu.host_kernels, cpu.scratch) == (False, True, False)
    assert (card.has_triton, card.host_kernels, card.scratch) == (True, False, True)
