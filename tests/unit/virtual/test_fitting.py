from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from autotune import virtual
from autotune.units import GIB
from autotune.virtual import cards
from autotune.virtual.trace import Trace


def traced(gib: float) -> Trace:
    trace = Trace()
    trace.reserve(int(gib * GIB), "test")
    return trace


def test_a_small_run_fits_and_its_figures_are_told_apart() -> None:
    found = virtual.fit(traced(10), "rtx-4090")
    card = cards.find("rtx-4090")
    assert found.fits
    assert found.out_of_memory == ""
    assert found.allocated_bytes == 10 * GIB
    assert found.used_bytes == found.reserved_bytes + card.context_bytes
    assert "fits: 10.44 GiB of 23.52 GiB used (allocated 10.00 GiB" in str(found)


def test_a_large_run_does_not_fit_and_says_what_it_would_need() -> None:
    found = virtual.fit(traced(30), "rtx-4090")
    assert not found.fits
    assert found.allocated_bytes == 30 * GIB
    # The card's memory, and what the context leaves of it.
    assert "total capacity of 23.52 GiB, of which PyTorch may reserve 23.08 GiB," in (
        found.out_of_memory
    )
    assert str(found).startswith("does not fit")


def test_a_run_within_the_margin_is_too_close() -> None:
    found = virtual.fit(traced(22.5), cards.find("rtx-4090"))
    assert not found.fits
    assert found.out_of_memory == ""
    assert str(found).startswith("too close")


def test_a_trace_shows_its_figures_alone() -> None:
    with virtual.accelerator("rtx-4090") as trace:
        kept = torch.empty(1 << 20, device="virtual")
        del kept
    text = repr(trace)
    assert text == str(trace)
    assert len(text) < 200
    assert "peak 0.004 GiB allocated" in text


def test_a_trace_sums_itself_up() -> None:
    with virtual.accelerator("rtx-4090") as trace:
        kept = torch.empty(1 << 20, device="virtual")
        del kept
    summary = trace.summary(max_points=3)
    assert summary["peak_bytes"] == trace.peak_bytes == 4 << 20
    assert len(summary["timeline"]["points"]) <= 3
