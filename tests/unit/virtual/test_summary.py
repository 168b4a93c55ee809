from __future__ import annotations

import json
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.virtual.summary import collapsed, summarise
from autotune.virtual.trace import ALLOC, FREE, KINDS, MARK, PHASES, Storage, Trace, rounded


def alloc(trace, nbytes, kind="", *, op="empty", phase="load", module="") -> int:
    number = len(trace.storages)
    trace.storages.append(Storage(number, nbytes, op, phase, module, kind))
    trace.events.append((ALLOC, number))
    trace.allocated_bytes += rounded(nbytes)
    trace.peak_bytes = max(trace.peak_bytes, trace.allocated_bytes)
    return number


def free(trace, number, phase="backward") -> None:
    trace.storages[number].freed_phase = phase
    trace.events.append((FREE, number))
    trace.allocated_bytes -= rounded(trace.storages[number].nbytes)


def one_step() -> Trace:
    """Return a step of two layers; the peak is where the second layer's backward runs."""
    trace = Trace(host_peak_bytes=4096)
    for layer in range(2):
        alloc(trace, 1000, "parameters", module=f"model.layers.{layer}.mlp.up")
    trace.mark("first_step")
    kept = [
        alloc(trace, 2048, op="gelu", phase="forward", module=f"model.layers.{layer}.mlp")
        for layer in range(2)
    ]
    scratch = alloc(trace, 100, op="mm", phase="forward", module="model.layers.1.mlp")
    free(trace, scratch, "forward")
    alloc(trace, 513, "gradients", op="mm", phase="backward", module="model.layers.1.mlp.up")
    free(trace, kept[1])
    free(trace, kept[0])
    trace.mark("end")
    return trace


def test_what_the_peak_of_a_step_is_made_of():
    summary = summarise(one_step())
    assert summary["peak_bytes"] == one_step().peak_bytes == 2 * 1024 + 2 * 2048 + 1024
    assert summary["at_peak"] == {"parameters": 2048, "gradients": 1024, "activations": 4096}
    assert summary["host_peak_bytes"] == 4096


@pytest.fixture
def plain() -> dict:
    return summarise(one_step())


def test_the_peak_event(plain):
    assert plain["peak_event"] == {
        "index": 7,
        "op": "mm",
        "module": "model.layers.*.mlp.up",
        "phase": "backward",
        "mark": "first_step",
    }


def test_the_largest_groups_join_layers(plain):
    assert plain["largest"] == [
        {
            "bytes": 4096,
            "count": 2,
            "kind": "activations",
            "op": "gelu",
            "module": "model.layers.*.mlp",
            "phase": "forward",
            "modules": [],
        },
        {
            "bytes": 2048,
            "count": 2,
            "kind": "parameters",
            "op": "empty",
            "module": "",
            "phase": "load",
            "modules": ["model.layers.*.mlp.up"],
        },
        {
            "bytes": 1024,
            "count": 1,
            "kind": "gradients",
            "op": "mm",
            "module": "",
            "phase": "backward",
            "modules": ["model.layers.*.mlp.up"],
        },
    ]


def test_a_short_run_keeps_every_event(plain):
    timeline = plain["timeline"]
    assert timeline["num_events"] == 11
    assert timeline["kinds"] == ["parameters", "gradients", "activations", "temporaries"]
    assert timeline["marks"] == [[2, "first_step"], [10, "end"]]
    assert timeline["points"] == [
        [0, 1024, 0, 0, 0],
        [1, 2048, 0, 0, 0],
        [2, 2048, 0, 0, 0],
        [3, 2048, 0, 2048, 0],
        [4, 2048, 0, 4096, 0],
        [5, 2048, 0, 4096, 512],
        [6, 2048, 0, 4096, 0],
        [7, 2048, 1024, 4096, 0],
        [8, 2048, 1024, 2048, 0],
        [9, 2048, 1024, 0, 0],
        [10, 2048, 1024, 0, 0],
    ]
    assert timeline["phases"] == ["load"] * 3 + ["forward"] * 4 + ["backward"] * 4
    assert json.loads(json.dumps(plain)) == plain


def test_few_points_are_the_most_of_their_stretch():
    points = summarise(one_step(), max_points=3)["timeline"]["points"]
    assert points == [[1, 2048, 0, 0, 0], [5, 2048, 0, 4096, 512], [7, 2048, 1024, 4096, 0]]
    points = summarise(one_step(), max_points=1)["timeline"]["points"]
    assert points == [[7, 2048, 1024, 4096, 0]]


def test_of_equal_peaks_the_first_counts():
    trace = Trace()
    for op in ("first", "second"):
        free(trace, alloc(trace, 512, "temporaries", op=op))
    for max_points in (1, 2, 4, 240):
        assert summarise(trace, max_points=max_points)["peak_event"]["op"] == "first"


def test_a_peak_before_a_reset_still_counts():
    trace = Trace()
    free(trace, alloc(trace, 10_000, "temporaries", op="load"))
    trace.reset_peak()
    alloc(trace, 512, "parameters")
    assert trace.peak_bytes == 512
    summary = summarise(trace)
    assert summary["peak_bytes"] == 10_240
    assert summary["peak_event"] | {"index": 0, "op": "load", "mark": ""} == summary["peak_event"]
    assert summary["at_peak"] == {"temporaries": 10_240}


def test_the_traces_own_counting_agrees():
    trace = Trace()
    trace.reserve(8_519_680, "cublas")
    trace.mark("first_step")
    trace.flash([100, 5000], "softmax")
    trace.close()
    summary = summarise(trace)
    assert summary["peak_bytes"] == trace.peak_bytes == 8_519_680 + 512 + 5120
    assert summary["at_peak"] == {"temporaries": 5632, "workspaces": 8_519_680}
    assert summary["peak_event"]["op"] == "softmax"
    assert [group["count"] for group in summary["largest"]] == [1, 2]


def test_what_belongs_to_parameters_is_one_group_that_names_its_modules():
    trace = Trace()
    for module, size in (("b", 512), ("a", 512), ("layers.0.up", 512), ("layers.1.up", 512)):
        alloc(trace, size, "parameters", op="empty", module=module)
    alloc(trace, 512, "parameters", op="empty")
    (group,) = summarise(trace)["largest"]
    assert (group["count"], group["module"]) == (5, "")
    assert group["modules"] == ["layers.*.up", "a", "b"]


def test_at_most_ten_groups():
    trace = Trace()
    for size in range(20):
        alloc(trace, 512 * (size + 1), "parameters", op=f"op{size}")
    largest = summarise(trace)["largest"]
    assert [group["op"] for group in largest] == [f"op{size}" for size in range(19, 9, -1)]


def test_runs_without_events_or_bytes():
    empty = summarise(Trace())
    assert empty["peak_bytes"] == 0
    assert empty["peak_event"] == {"index": 0, "op": "", "module": "", "phase": "", "mark": ""}
    assert empty["at_peak"] == {}
    assert empty["largest"] == empty["timeline"]["points"] == []
    trace = Trace()
    trace.mark("start")
    alloc(trace, 0, "buffers")
    for max_points in (1, 2):
        summary = summarise(trace, max_points=max_points)
        assert summary["peak_bytes"] == 0
        assert summary["at_peak"] == {}
        assert summary["largest"] == []
        assert summary["timeline"]["marks"] == [[0, "start"]]


def test_a_timeline_needs_a_point():
    with pytest.raises(ValueError, match="at least one point"):
        summarise(Trace(), max_points=0)


def test_a_kind_from_elsewhere_is_kept():
    trace = Trace()
    alloc(trace, 512, "caches")
    alloc(trace, 512, "parameters")
    assert summarise(trace)["timeline"]["kinds"] == ["parameters", "caches"]
    assert summarise(trace)["at_peak"] == {"parameters": 512, "caches": 512}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("", ""),
        ("lm_head", "lm_head"),
        ("model.layers.31.mlp.down_proj", "model.layers.*.mlp.down_proj"),
        ("0.1.linear2", "*.*.linear2"),
        ("model.layers.3.mlp.experts.12.w1", "model.layers.*.mlp.experts.*.w1"),
        ("model.layers.7", "model.layers.*"),
        ("block1.conv2d", "block1.conv2d"),
    ],
)
def test_layer_numbers_are_collapsed(module, expected):
    assert collapsed(module) == expected


actions = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "free", "mark", "reset"]),
        st.integers(0, 5000),
        st.sampled_from(["", *KINDS]),
        st.sampled_from(PHASES),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(actions=actions, max_points=st.integers(1, 150))
def test_kinds_add_up_to_what_is_allocated_at_every_point(actions, max_points):
    trace, alive, totals = Trace(), [], []
    for action, size, kind, phase in actions:
        if action == "alloc":
            alive.append(alloc(trace, size, kind, phase=phase))
        elif action == "free" and alive:
            free(trace, alive.pop(size % len(alive)), phase)
        elif action == "mark":
            trace.mark("step")
        else:
            trace.reset_peak()
            continue
        totals.append(trace.allocated_bytes)
    summary = summarise(trace, max_points=max_points)
    points = summary["timeline"]["points"]
    assert summary["peak_bytes"] == max(totals, default=0)
    assert sum(summary["at_peak"].values()) == summary["peak_bytes"]
    assert len(points) == min(max_points, len(totals)) == len(summary["timeline"]["phases"])
    assert [sum(point[1:]) for point in points] == [totals[point[0]] for point in points]
    for part, (index, *_) in enumerate(points):
        first = part * len(totals) // len(points)
        last = (part + 1) * len(totals) // len(points)
        assert first <= index < last
        assert totals[index] == max(totals[first:last])
    if totals:
        peak_index = summary["peak_event"]["index"]
        assert totals[peak_index] == summary["peak_bytes"]
        assert peak_index in [point[0] for point in points]
    shown = sum(group["bytes"] for group in summary["largest"])
    assert shown <= summary["peak_bytes"]
    if len(summary["largest"]) < 10:
        assert shown == summary["peak_bytes"]
    marks = [index for index, (action, _) in enumerate(trace.events) if action == MARK]
    assert summary["timeline"]["marks"] == [[index, "step"] for index in marks]


def test_a_real_runs_number_of_events_takes_little_time():
    trace = Trace()
    for step in range(3):
        trace.mark(f"step_{step}")
        for layer in range(500):
            kept = [
                alloc(trace, 4096, phase="forward", module=f"model.layers.{layer}.mlp")
                for _ in range(100)
            ]
            for number in kept:
                free(trace, number)
    assert len(trace.events) > 300_000
    # About 0.1 s where nothing else runs; a quadratic pass would take minutes.
    started = process_time()
    summary = summarise(trace)
    assert process_time() - started < 3
    assert summary["peak_bytes"] == 409_600
