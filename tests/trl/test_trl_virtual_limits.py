"""What only the pretend accelerator has, and what it must refuse, with the real TRL."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agreement_kit as kit
import pytest
import torch
import transformers
from accelerate import PartialState

from autotune.virtual import realtrace
from autotune.virtual.errors import NoKernel, NoSuchRow, NotVirtual

pytestmark = pytest.mark.trl


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Spare the collector, which trainers call, the many objects that are there already."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.write_rows(tmp_path_factory.mktemp("rows"))


def peak(tmp_path: Path, model: str, rows: str, config: dict[str, Any]) -> tuple[int, int]:
    """Return the most bytes in use on the device and held on the host, over a virtual run."""
    steps, _ = kit.run_virtual(kit.make_spec(tmp_path, model, rows, config))
    return max(steps.peak_bytes.values()), steps.host_peak_bytes


def test_offloaded_activations_leave_the_device_for_the_host(
    tmp_path: Path, tiny: str, rows: str
) -> None:
    kept, _ = peak(tmp_path / "kept", tiny, rows, {"gradient_checkpointing": False})
    config = {"gradient_checkpointing": False, "activation_offloading": True}
    left, host = peak(tmp_path / "left", tiny, rows, config)
    assert left < 0.9 * kept
    assert host > 0.5 * (kept - left)


def test_paged_states_are_the_hosts(tmp_path: Path, rows: str) -> None:
    # States of fewer than 100,000 numbers are never paged.
    model = kit.write_model(tmp_path / "wide", intermediate_size=2048)
    plain, _ = peak(tmp_path / "plain", model, rows, {"optim": "adamw_8bit"})
    paged, host = peak(tmp_path / "paged", model, rows, {"optim": "paged_adamw_8bit"})
    assert plain - paged > 0.9 * 2 * 3 * kit.LAYERS * 64 * 2048
    assert host >= plain - paged


def test_compiled_code_is_refused(tmp_path: Path, tiny: str, rows: str) -> None:
    with pytest.raises(NotVirtual, match=r"torch\.compile .* generated for a real card"):
        peak(tmp_path, tiny, rows, {"torch_compile": True})


@pytest.mark.parametrize("num_positions", [95, 96])
def test_sequences_longer_than_the_learned_positions_are_refused(
    tmp_path: Path, tiny: str, rows: str, num_positions: int
) -> None:
    shape = {"vocab_size": kit.VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = kit.write_model(tmp_path / "model")
    transformers.GPT2Config(
        **shape, n_positions=num_positions, architectures=["GPT2LMHeadModel"]
    ).save_pretrained(model)
    if num_positions == max(kit.LENGTHS):
        assert peak(tmp_path, model, rows, {})[0] > 0
        return
    with pytest.raises(NoSuchRow, match=r"index 95 is out of range .* of 95 rows: .* positions"):
        peak(tmp_path, model, rows, {})


def test_a_token_outside_of_the_vocabulary_is_refused(tmp_path: Path, rows: str) -> None:
    model = kit.write_model(tmp_path / "model", vocab_size=kit.VOCABULARY // 2)
    with pytest.raises(NoSuchRow, match=r"of an embedding of 500 rows: .* vocabulary"):
        peak(tmp_path, model, rows, {})


def test_an_error_in_the_model_arrives_and_leaves_nothing_behind(
    tmp_path: Path, tiny: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = transformers.models.llama.modeling_llama.LlamaMLP
    forward = layer.forward

    def failing(self: Any, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise ArithmeticError("computed again")
        return forward(self, x)

    monkeypatch.setattr(layer, "forward", failing)
    with pytest.raises(ArithmeticError, match="computed again"):
        peak(tmp_path / "failing", tiny, rows, {"gradient_checkpointing": True})
    monkeypatch.undo()
    peak(tmp_path / "whole", tiny, rows, {})


def test_everything_is_put_back(tmp_path: Path, tiny: str, rows: str) -> None:
    device = PartialState(cpu=True).device
    before = {name: getattr(torch, name) for name in ("compile", "empty", "zeros", "tensor")}
    peak(tmp_path, tiny, rows, {})
    with realtrace.traced_on_host():
        pass
    assert {name: getattr(torch, name) for name in before} == before
    assert torch._C._is_multithreading_enabled()
    assert PartialState().device == device


def test_real_tensors_are_counted_once_and_views_never() -> None:
    with realtrace.traced_on_host() as trace:
        base = torch.ones(256)
        assert trace.allocated_bytes == 1024
        views = base.view(16, 16), base[1:], base.detach()
        base.add_(1)
        assert trace.allocated_bytes == 1024
        torch.cat([base, base], out=torch.empty(0))
        del base
        assert trace.allocated_bytes == 1024
        del views
        assert trace.allocated_bytes == 0


def test_real_backward_and_recomputation_are_seen() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu()

    with realtrace.traced_on_host() as trace:
        x = torch.ones(16, 16, device=torch.device("cpu"), requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    made = {(storage.op, storage.phase) for storage in trace.storages}
    assert {("mm", "load"), ("mm", "backward"), ("relu", "backward")} <= made


def test_a_real_trace_follows_resizing() -> None:
    with realtrace.traced_on_host() as trace:
        out = torch.empty(1, device=torch.device("cpu"))
        torch.cat([torch.ones(500), torch.ones(500)], out=out.resize_(0))
        assert trace.allocated_bytes == 4096


FP16 = {"bf16": False, "fp16": True}


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_float16_weights_cannot_be_trained_with_a_scaler(
    max_grad_norm: float, tmp_path: Path, tiny: str, rows: str
) -> None:
    config = {**FP16, "dtype": "float16", "max_grad_norm": max_grad_norm}
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        peak(tmp_path, tiny, rows, config)


@pytest.mark.parametrize(
    "config", [{"dtype": "bfloat16"}, {"use_peft": True, "load_in_4bit": True}], ids=str
)
def test_bfloat16_gradients_cannot_be_scaled(
    config: dict[str, Any], tmp_path: Path, tiny: str, rows: str
) -> None:
    with pytest.raises(NoKernel, match="BFloat16"):
        peak(tmp_path, tiny, rows, {**FP16, **config})


def test_adapters_of_float16_weights_are_float32_and_can(
    tmp_path: Path, tiny: str, rows: str
) -> None:
    most, _ = peak(tmp_path, tiny, rows, {**FP16, "dtype": "float16", "use_peft": True})
    assert most > 0
