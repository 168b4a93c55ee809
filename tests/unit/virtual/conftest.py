from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest


@pytest.fixture
def session() -> Iterator[Any]:
    """Return the session of a pretend accelerator that lasts as long as the test.

    Only PyTorch is needed: what the training libraries need is left to ``tests/trl``.
    """
    torch = pytest.importorskip("torch")
    from autotune.virtual import autocast, device, observe, state, values
    from autotune.virtual.session import Session

    device.install()
    made = Session(total_bytes=80 << 30)
    state.activate(made)
    clear = torch.clear_autocast_cache

    def both() -> None:
        clear()
        autocast.clear_cache()

    with contextlib.ExitStack() as stack:
        stack.callback(values.clear)
        stack.callback(state.activate, None)
        stack.callback(made.trace.close)
        stack.enter_context(mock.patch.object(torch, "clear_autocast_cache", both))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(observe.observed(made.trace))
        yield made


@pytest.fixture
def trace(session: Any) -> Any:
    """Return the trace of the pretend accelerator."""
    return session.trace


@pytest.fixture
def grown(trace: Any) -> Callable[[], int]:
    """Return a function that tells by how many bytes the memory in use has grown."""
    before = trace.allocated_bytes
    return lambda: trace.allocated_bytes - before
