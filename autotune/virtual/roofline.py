"""How long an operator takes on a card: the slower of its arithmetic and its memory traffic.

A roofline (Williams et al., 2009) with stated efficiencies. It ranks candidates; it does not
replace a measurement. What it leaves out: the host's Python overhead beyond the launch, overlap of
copies with work, and waves of tiles that do not fill the card.

The efficiencies are round figures from general knowledge of the works they name, which were not
read again for them. They were set before predictions were compared with measured rates.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autotune.virtual.cards import LAUNCH_S, Card

MATRIX_EFFICIENCY = 0.75
"""Share of the dense peak that large matrix products reach. Source: cuBLAS on A100, 230 to 250 of
312 TFLOPS in bf16 for the sizes of a transformer's layers (NVIDIA, "Matrix Multiplication
Background User's Guide")."""

ATTENTION_EFFICIENCY = 0.6
"""The same for FlashAttention-2, forward and backward (arXiv:2307.08691, figures 4 to 6: 50 to
73 % of the A100's peak)."""

BANDWIDTH_EFFICIENCY = 0.85
"""Share of the memory's theoretical bandwidth that elementwise kernels reach (BabelStream on A100:
1.7 of 2.04 TB/s)."""

LINK_EFFICIENCY = 0.8
"""Share of the host link's theoretical rate that pinned copies reach (25 of 31.5 GB/s)."""

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
}


class Roofline:
    """Times of one card.

    Args:
        card: From the catalogue.
        tf32: Whether float32 products use TF32; PyTorch's default is no.
    """

    def __init__(self, card: Card, *, tf32: bool = False) -> None:
        self._card = card
        self._bandwidth = card.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY
        self._link = card.link_bytes_per_s * LINK_EFFICIENCY
        self._tf32 = tf32

    def op_seconds(self, plan: Any, flops: float) -> float:
        """Return the time of one planned operator, in seconds."""
        efficiency = ATTENTION_EFFICIENCY if "attention" in plan.name else MATRIX_EFFICIENCY
        return self._seconds(flops, plan.moved_bytes, plan.dtype, efficiency)

    def matmul_seconds(self, flops: float, moved_bytes: float, dtype: torch.dtype) -> float:
        """Return the time of a matrix product, in seconds."""
        return self._seconds(flops, moved_bytes, dtype, MATRIX_EFFICIENCY)

    def move_seconds(self, moved_bytes: float) -> float:
        """Return the time of a copy on the device, in seconds."""
        return LAUNCH_S + moved_bytes / self._bandwidth

    def link_seconds(self, nbytes: float) -> float:
        """Return the time of a copy between host and device, in seconds."""
        return LAUNCH_S + nbytes / self._link

    def _seconds(
        self, flops: float, moved_bytes: float, dtype: torch.dtype | None, efficiency: float
    ) -> float:
        arithmetic = flops / (self._rate(dtype) * efficiency) if flops else 0.0
        return max(arithmetic, moved_bytes / self._bandwidth, LAUNCH_S)

    def _rate(self, dtype: torch.dtype | None) -> float:
        rates = self._card.tflops
        name = _NAMES.get(dtype or torch.float32, "fp32")
        if name == "fp32" and self._tf32 and "tf32" in rates:
            name = "tf32"
        if name == "int8":
            # Twice the rate of 16-bit products on every card with int8 matrix units.
            return rates.get("int8", 2 * rates.get("fp16", rates["fp32"])) * 1e12
        if name not in rates:
            # Without matrix units for it the card converts and multiplies in float32.
            name = "fp32"
        value = rates[name]
        return value * 1e12 if math.isfinite(value) else math.inf
