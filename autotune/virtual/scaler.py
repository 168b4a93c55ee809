"""The gradient scaler of ``fp16: true`` on the pretend accelerator: its refusals, not its numbers.

Whether a real one skips a step depends on the gradients' values. What it refuses depends on their
dtypes alone, and ends every run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autotune.virtual.errors import NoKernel

_LAST_WITHOUT_BFLOAT16 = (2, 13)
"""No release of PyTorch so far scales bfloat16 gradients on CUDA (its issue 127176); of later
ones nothing is known, and nothing is refused."""


class RefusingScaler(torch.amp.GradScaler):  # type: ignore[misc, unused-ignore]
    """A scaler that is switched off, but refuses the gradients that a real one refuses."""

    def __init__(self) -> None:
        super().__init__("cpu", enabled=False)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what a real scaler cannot unscale.

        Raises:
            ValueError: PyTorch's own, if a gradient is float16.
            NoKernel: If a gradient is bfloat16.
        """
        grads = [
            param.grad
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if any(grad.dtype == torch.float16 for grad in grads):
            # PyTorch looks at the dtypes before it computes; so it is PyTorch that refuses.
            _refuse_half(self)
        check_kernel(grads)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, as a real scaler does unless it was done for clipping, and step."""
        self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)


def _refuse_half(scaler: torch.amp.GradScaler) -> None:
    """Have PyTorch refuse float16 gradients, in its own words."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    param.grad = torch.zeros(1, dtype=torch.float16)
    one = torch.ones(())
    scaler._unscale_grads_(torch.optim.SGD([param]), one, one, False)


def check_kernel(grads: Iterable[torch.Tensor]) -> None:
    """Refuse gradients that CUDA has no kernel to unscale.

    Raises:
        NoKernel: If one is bfloat16.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version > _LAST_WITHOUT_BFLOAT16:
        return
    if any(grad.dtype == torch.bfloat16 for grad in grads):
        raise NoKernel(
            "PyTorch cannot scale bfloat16 gradients on a card, as fp16: true needs"
            " (\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16')."
            " Trained weights of dtype bfloat16 have such gradients, and so have TRL's adapters of"
            " a quantised model"
        )
