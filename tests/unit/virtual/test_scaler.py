"""What a gradient scaler refuses on the pretend accelerator, as on a card."""

from __future__ import annotations

import pytest
import torch

from autotune.virtual import scaler
from autotune.virtual.errors import NoKernel


def optimizer_of(*dtypes: torch.dtype) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    for param in params:
        param.grad = torch.zeros_like(param)
    return torch.optim.SGD([*params, torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))])


@pytest.mark.parametrize("method", ["unscale_", "step"])
def test_float16_gradients_are_refused_by_pytorch(method: str) -> None:
    chosen = scaler.RefusingScaler()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        getattr(chosen, method)(optimizer_of(torch.float32, torch.float16))


def test_bfloat16_gradients_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = optimizer_of(torch.float32, torch.bfloat16)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with pytest.raises(NoKernel, match="not implemented for 'BFloat16'"):
        scaler.RefusingScaler().unscale_(optimizer)
    # Of releases that are not known, nothing is said.
    monkeypatch.setattr(torch, "__version__", "2.14.0a0")
    scaler.RefusingScaler().unscale_(optimizer)


def test_float32_gradients_and_weights_without_one_are_taken() -> None:
    chosen = scaler.RefusingScaler()
    optimizer = optimizer_of(torch.float32)
    chosen.unscale_(optimizer)
    chosen.step(optimizer)
