from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual.attention import choose

DEVICE = "virtual"
AMPERE, TURING = (8, 0), (7, 5)
pytestmark = pytest.mark.usefixtures("session")


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE, requires_grad=grad)


@pytest.mark.parametrize(
    ("dtype", "key_heads", "head", "masked", "capability", "kernel"),
    [
        (torch.bfloat16, 4, 64, False, AMPERE, "flash"),
        (torch.bfloat16, 2, 64, False, AMPERE, "flash"),
        (torch.float16, 4, 256, False, AMPERE, "flash"),
        (torch.float16, 4, 288, False, AMPERE, "efficient"),
        (torch.float32, 4, 64, False, AMPERE, "efficient"),
        (torch.float32, 2, 64, False, AMPERE, "math"),
        (torch.bfloat16, 4, 64, True, AMPERE, "efficient"),
        (torch.float16, 4, 64, False, TURING, "efficient"),
        (torch.float16, 2, 64, False, TURING, "math"),
        (torch.bfloat16, 4, 64, False, TURING, "math"),
        (torch.float64, 4, 64, False, AMPERE, "math"),
    ],
)
def test_the_kernel_that_cuda_would_choose(
    dtype, key_heads, head, masked, capability, kernel
) -> None:
    query = tensor(1, 4, 8, head, dtype=dtype)
    key = tensor(1, key_heads, 8, head, dtype=dtype)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=DEVICE) if masked else None
    assert choose(query, key, mask, capability=capability) == kernel


def test_the_user_can_forbid_a_kernel() -> None:
    query = tensor(1, 4, 8, 64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert choose(query, query, None, capability=AMPERE) == "math"


def attend(length: int, **kwargs) -> torch.Tensor:
    heads = kwargs.pop("key_heads", 4)
    query, key = tensor(2, 4, length, 64), tensor(2, heads, length, 64)
    return torch.nn.functional.scaled_dot_product_attention(query, key, key, **kwargs)


@pytest.mark.parametrize("kwargs", [{}, {"key_heads": 2, "enable_gqa": True}])
def test_flash_keeps_nothing_that_grows_with_the_square(kwargs, grown) -> None:
    found = attend(512, is_causal=True, **kwargs)
    assert found.shape == (2, 4, 512, 64)
    short = grown()
    del found
    found = attend(1024, is_causal=True, **kwargs)
    assert grown() < 2.1 * short
    found.sum().backward()


def test_math_keeps_the_scores(grown, session) -> None:
    session.capability = TURING
    attend(512, is_causal=True)
    kept = grown()
    found = attend(512, is_causal=True)
    assert grown() - kept > 2 * 4 * 512 * 512 * 2
    found.sum().backward()


@pytest.mark.parametrize("length", [128, 100])
def test_a_mask_becomes_an_aligned_bias(length: int, trace) -> None:
    mask = torch.ones(2, 1, length, length, dtype=torch.bool, device=DEVICE)
    found = attend(length, attn_mask=mask)
    assert found.shape == (2, 4, length, 64)
    sizes = [s.nbytes for s in trace.storages]
    rows = length if length % 8 == 0 else length + 8 - length % 8
    assert sizes.count(2 * length * rows * 2) >= 1
    found.sum().backward()


def test_heads_that_flash_pads() -> None:
    query = tensor(1, 2, 16, 20)
    found = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert found.shape == (1, 2, 16, 20)
    found.sum().backward()
    assert query.grad.shape == (1, 2, 16, 20)


def test_the_hosts_way_is_the_cpus(session, trace) -> None:
    session.host_kernels = True
    attend(32, is_causal=True).sum().backward()
    assert "_scaled_dot_product_flash_attention_for_cpu" in {s.op for s in trace.storages}
