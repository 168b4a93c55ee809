"""What is changed around a run on a pretend accelerator, and put back after it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")


def test_weights_on_the_host_are_left_as_they_are(session: Any) -> None:
    from autotune.virtual import placement

    weight = torch.full((4, 4), 7.0)
    with placement.without_initialisation():
        for draw in (torch.nn.init.kaiming_uniform_, torch.nn.init.normal_, torch.nn.init.zeros_):
            assert draw(weight) is weight
    assert torch.equal(weight, torch.full((4, 4), 7.0))


def test_on_the_device_they_take_what_initialising_takes(session: Any) -> None:
    from autotune.virtual import placement

    def num_ops(initialise: Any) -> int:
        before = sum(cost.num_ops for cost in session.trace.costs.values())
        initialise(torch.empty(4, 4, device="virtual"))
        return sum(cost.num_ops for cost in session.trace.costs.values()) - before

    with placement.without_initialisation():
        inside = num_ops(torch.nn.init.trunc_normal_)
    assert inside == num_ops(torch.nn.init.trunc_normal_) > 1


def test_afterwards_weights_are_drawn_again(session: Any) -> None:
    from autotune.virtual import placement

    with placement.without_initialisation():
        pass
    weight = torch.nn.init.ones_(torch.zeros(4))
    assert torch.equal(weight, torch.ones(4))


def test_after_an_error_too(session: Any) -> None:
    from autotune.virtual import placement

    with pytest.raises(RuntimeError, match="stop"), placement.without_initialisation():
        raise RuntimeError("stop")
    assert torch.equal(torch.nn.init.ones_(torch.zeros(4)), torch.ones(4))
