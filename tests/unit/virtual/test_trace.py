from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from autotune.virtual.trace import ALLOC, FREE, MARK, Trace, rounded


def storage(nbytes: int = 8) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes)


@pytest.mark.parametrize(("nbytes", "blocks"), [(0, 0), (1, 1), (512, 1), (513, 2), (5120, 10)])
def test_blocks(nbytes: int, blocks: int) -> None:
    assert rounded(nbytes) == 512 * blocks


def test_events_tell_the_whole_story() -> None:
    trace = Trace()
    first, second = storage(), storage()
    trace.allocate(first, 1000, "mm")
    trace.mark("first_step")
    trace.allocate(second, 10, "add")
    del first
    assert trace.events == [(ALLOC, 0), (MARK, 0), (ALLOC, 1), (FREE, 0)]
    assert trace.marks == ["first_step"]
    assert [s.op for s in trace.storages] == ["mm", "add"]
    assert [s.phase for s in trace.storages] == ["load", "other"]
    assert trace.allocated_bytes == 512
    assert trace.peak_bytes == 1536
    trace.reset_peak()
    assert trace.peak_bytes == 512


def test_another_storage_at_the_same_place_is_another() -> None:
    trace = Trace()
    for _ in range(100):
        made = storage()
        trace.allocate(made, 100, "x")
        del made
    assert trace.allocated_bytes == 0
    assert trace.peak_bytes == 512
    assert len(trace.storages) == 100


def test_what_is_freed_after_the_run_is_no_event() -> None:
    trace = Trace()
    made = storage()
    trace.allocate(made, 100, "x")
    trace.close()
    del made
    assert trace.allocated_bytes == 512
    assert trace.events == [(ALLOC, 0)]


def test_reserved_memory_stays() -> None:
    trace = Trace()
    trace.reserve(1000, "cublas")
    assert trace.allocated_bytes == 1024
    assert trace.kind_of(trace.storages[0]) == "workspaces"


def test_flashed_memory_exists_at_once_and_is_gone() -> None:
    trace = Trace()
    trace.flash((100, 1000), "flash_backward")
    assert trace.allocated_bytes == 0
    assert trace.peak_bytes == 1536
    assert [kind for kind, _ in trace.events] == [ALLOC, ALLOC, FREE, FREE]


def test_the_first_word_on_a_storage_stands() -> None:
    trace = Trace()
    tensor = torch.empty(4)
    trace.allocate(tensor.untyped_storage(), 16, "empty")
    trace.tag([tensor.view(2, 2)], "parameters")
    trace.tag([tensor], "gradients")
    trace.tag([torch.empty(3)], "gradients")
    assert trace.kind_of(trace.storages[0]) == "parameters"


def test_what_outlives_the_forward_pass_is_an_activation() -> None:
    trace = Trace()
    kept, passing = storage(), storage()
    trace.module_depth = 1
    trace.allocate(kept, 8, "mm")
    trace.allocate(passing, 8, "add")
    del passing
    trace.module_depth = 0
    del kept
    assert [trace.kind_of(s) for s in trace.storages] == ["activations", "temporaries"]


def test_a_tensor_can_end_while_it_lives_on_elsewhere() -> None:
    trace = Trace()
    tensor = torch.empty(4)
    trace.allocate(tensor.untyped_storage(), 16, "empty")
    trace.end(tensor)
    assert trace.allocated_bytes == 0
    assert trace.number_of(tensor) is None


def test_memory_of_the_host_is_apart() -> None:
    trace = Trace()
    made = storage()
    trace.hold_on_host(made, 100)
    trace.hold_on_host(made, 100)
    assert (trace.host_bytes, trace.allocated_bytes) == (100, 0)
    del made
    assert (trace.host_bytes, trace.host_peak_bytes) == (0, 100)


def test_what_left_nothing_can_be_taken_back() -> None:
    trace = Trace()
    kept = storage()
    trace.allocate(kept, 1000, "mm")
    before = (list(trace.events), trace.allocated_bytes, trace.peak_bytes)
    again = storage()
    trace.allocate(again, 5000, "add")
    trace.reserve(100, "cublas")
    del again
    assert trace.take_back(1, 1, before[2])
    assert (trace.events, trace.allocated_bytes, trace.peak_bytes) == before
    assert len(trace.storages) == 1
    del kept
    assert trace.allocated_bytes == 0


def test_what_left_something_stays() -> None:
    trace = Trace()
    kept, freed = storage(), storage()
    trace.allocate(freed, 1000, "mm")
    trace.allocate(kept, 1000, "mm")
    assert not trace.take_back(1, 1, 1024)
    assert len(trace.events) == 2
    del freed
    assert not trace.take_back(2, 2, 2048), "an older one was freed"
    assert len(trace.events) == 3


def test_storages_written_anew_end_with_their_tensors() -> None:
    trace = Trace()
    first, second = storage(), storage()
    trace.allocate(first, 1000, "mm")
    trace.allocate(second, 2000, "add")
    entries = trace.storages[:]
    trace.renumber(lambda number: 1 - number)
    trace.storages.clear()
    trace.events.clear()
    trace.allocated_bytes = trace.peak_bytes = 0
    for index, entry in enumerate(reversed(entries)):
        entry.index = index
        trace.begin_again(entry)
    del second
    assert trace.events == [(ALLOC, 0), (ALLOC, 1), (FREE, 0)]
    assert trace.allocated_bytes == 1024
    assert trace.peak_bytes == 3072
    del first
    assert trace.allocated_bytes == 0
