from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotune.errors import UsageError
from autotune.executors.slots import slots_of


@pytest.mark.parametrize(
    ("devices", "processes", "visible", "found"),
    [
        ((0, 1), 1, None, [("cuda:0", "0"), ("cuda:0", "1")]),
        (("cuda:1",), 1, "4,5", [("cuda:0", "5")]),
        (("auto",), 1, None, [("auto", "0")]),
        (("auto",), 1, "3,4", [("auto", "3")]),
        (("auto",), 2, None, [("auto", "0,1")]),
        (("auto",), 2, "3,4,5", [("auto", "3,4")]),
        (("auto",), 2, "", [("auto", "")]),
        (("cuda",), 2, None, [("cuda:0", "0,1")]),
        (("cuda:2",), 2, None, [("cuda:0", "2,3")]),
        ((0, 1, 2, 3), 2, None, [("cuda:0", "0,1"), ("cuda:0", "2,3")]),
        ((2, 0), 2, "a,b,c", [("cuda:0", "c,a")]),
        (("cpu",), 2, None, [("cpu", None)]),
    ],
)
def test_a_slot_shows_a_card_per_process(
    devices: Sequence[int | str],
    processes: int,
    visible: str | None,
    found: list[tuple[str, str | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    slots = slots_of(devices, processes)
    assert [(slot.device, slot.env.get("CUDA_VISIBLE_DEVICES")) for slot in slots] == found


def test_what_makes_no_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="3 devices do not form groups of 2"):
        slots_of((0, 1, 2), 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UsageError, match=r"no cuda:1: .* shows 1 device\(s\); 2 processes"):
        slots_of(("cuda",), 2)
