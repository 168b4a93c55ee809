"""What a predicted peak is made of: the table, the picture in text and the plot."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from copy import deepcopy

import pytest
from pictures_kit import PNG, SVG, matplotlib_missed, suffix_refused
from rich.console import Console

from autotune.report import makeup
from autotune.report.pictures import new_figure
from autotune.units import GIB


def make_summary() -> dict:
    """Return ten events of a run: loading, a forward and a backward pass, an optimizer step."""
    kinds = ["parameters", "gradients", "optimizer_states", "activations", "temporaries"]
    levels = [
        [1, 0, 0, 0, 0],
        [4, 0, 0, 0, 0],
        [4, 0, 0, 1, 0],
        [4, 0, 0, 2, 0],
        [4, 2, 0, 2, 0],
        [4, 3, 0, 1, 0],
        [4, 4, 0, 0, 0],
        [4, 4, 4, 0, 0],
        [4, 4, 6, 0, 2],
        [4, 0, 6, 0, 0],
    ]
    return {
        "peak_bytes": 16 * GIB,
        "peak_event": {
            "index": 8,
            "op": "mm",
            "module": "model.layers.*.mlp.down_proj",
            "phase": "backward",
            "mark": "first step",
        },
        "at_peak": {
            "parameters": 4 * GIB,
            "gradients": 4 * GIB,
            "optimizer_states": 6 * GIB,
            "temporaries": 2 * GIB,
        },
        "largest": [
            {
                "bytes": 6 * GIB,
                "count": 48,
                "kind": "optimizer_states",
                "op": "zeros_like",
                "module": "",
                "phase": "optimizer",
            },
            {
                "bytes": 2 * GIB,
                "count": 1,
                "kind": "temporaries",
                "op": "mm",
                "module": "model.layers.*.mlp.down_proj",
                "phase": "backward",
            },
        ],
        "timeline": {
            "num_events": 10,
            "kinds": kinds,
            "points": [[n, *(size * GIB for size in level)] for n, level in enumerate(levels)],
            "phases": [
                "load",
                "load",
                "forward",
                "forward",
                *["backward"] * 3,
                *["optimizer"] * 3,
            ],
            "marks": [[2, "first step"], [9, "step_0"]],
        },
        "host_peak_bytes": 0,
    }


def empty_summary() -> dict:
    summary = make_summary()
    summary |= {"peak_bytes": 0, "at_peak": {}, "largest": []}
    summary["peak_event"] = {"index": 0, "op": "", "module": "", "phase": "", "mark": ""}
    summary["timeline"] = {"num_events": 0, "kinds": [], "points": [], "phases": [], "marks": []}
    return summary


def area(picture: str) -> list[str]:
    """Return the rows of the area alone, from the top."""
    return [line[10:] for line in picture.splitlines() if line[9:10] in ("┤", "│")]


def printed(text, *, color: bool) -> str:
    stream = io.StringIO()
    Console(
        file=stream, width=300, color_system="standard" if color else None, force_terminal=color
    ).print(text, markup=False, highlight=False, soft_wrap=True)
    return stream.getvalue()


TABLE = """\
Predicted peak in backward of
model.layers.*.mlp.down_proj, op mm, in the first step:
16.00 GiB allocated.
kind                 GiB   share
parameters          4.00   25.0%  ██████
optimizer states    6.00   37.5%  ▒▒▒▒▒▒▒▒▒
gradients           4.00   25.0%  ▓▓▓▓▓▓
temporaries         2.00   12.5%  ▚▚▚
total              16.00    100%
Largest at the peak, predicted:
- 6.00 GiB optimizer states: 48 x zeros_like (in the
  optimizer step)
- 2.00 GiB temporaries: mm in model.layers.*.mlp.down_proj
  (backward)
"""

PICTURE = """\
Predicted memory allocated, in GiB;
across: allocations and frees in order
predicted peak 16.00 GiB allocated ▼
   16.00 ┤                        ▚▚▚
         │                        ▓▓▓
   12.00 ┤                     ▓▓▓▓▓▓
         │                     ▓▓▓▒▒▒▒▒▒
    8.00 ┤            ░░░▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒
         │      ░░░░░░▓▓▓▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒
    4.00 ┤   ███████████████████████████
         │██████████████████████████████
       0 └──────┬────────────────────┬──
   phase  llllllffffffbbbbbbbbbooooooooo
                first step        step_0
█ parameters  ▒ optimizer states
▓ gradients  ░ activations
▚ temporaries  l load  f forward
b backward  o optimizer
"""


def test_the_table():
    assert makeup.makeup_table(make_summary(), width=58).plain + "\n" == TABLE


def test_the_table_names_what_lies_on_the_host():
    summary = make_summary() | {"host_peak_bytes": 3 * GIB}
    last = makeup.makeup_table(summary).plain.splitlines()[-1]
    assert last == "Predicted peak of what is moved to the host: 3.00 GiB."


@pytest.mark.parametrize(
    ("count", "modules", "words"),
    [
        (1, ["lm_head"], "1 tensor of lm_head (in the optimizer step)"),
        (9, ["a", "b", "c"], "9 tensors of a, b, c (in the optimizer step)"),
        (9, ["a", "b", "c", "d", "e"], "9 tensors of a, b, c and 2 more (in the optimizer step)"),
        (9, [], "9 x zeros_like (in the optimizer step)"),
    ],
)
def test_the_table_names_modules_rather_than_operators(count, modules, words):
    summary = make_summary()
    summary["largest"][0] |= {"count": count, "modules": modules}
    text = makeup.makeup_table(summary, width=100).plain
    assert f"- 6.00 GiB optimizer states: {words}" in text.splitlines()


def test_one_peak_is_shown_as_the_allocator_counts_it():
    summary = make_summary() | {"allocated_bytes": 17 * GIB}
    table = makeup.makeup_table(summary, width=160).plain
    picture = makeup.timeline_picture(summary, 60, 8, 20 * GIB).plain
    assert "17.00 GiB allocated." in table
    assert "whole blocks        1.00    5.9%" in table
    assert "total              17.00    100%" in table
    assert "allocator hands out some blocks whole" in table
    assert "predicted peak 17.00 GiB allocated" in picture
    assert "the predicted peak is 3.00 GiB below it" in picture
    assert "16.00" not in table + picture


@pytest.mark.parametrize("allocated", [None, 16 * GIB])
def test_without_whole_blocks_they_are_not_mentioned(allocated):
    table = makeup.makeup_table(make_summary() | {"allocated_bytes": allocated}, width=58)
    assert table.plain + "\n" == TABLE


def test_the_table_lists_as_many_groups_as_asked():
    text = makeup.makeup_table(make_summary(), num_largest=1).plain
    assert "zeros_like" in text
    assert "(backward)" not in text


def test_the_table_of_a_run_without_memory():
    assert makeup.makeup_table(empty_summary()).plain.splitlines()[:2] == [
        "Predicted peak: 0.000 GiB allocated.",
        "kind      GiB   share",
    ]


def test_the_picture():
    picture = makeup.timeline_picture(make_summary(), 40, 8).plain
    assert "".join(f"{line.rstrip()}\n" for line in picture.splitlines()) == PICTURE


@pytest.mark.parametrize("width", [40, 41, 57, 80, 120, 200])
@pytest.mark.parametrize("height", [4, 9, 14, 30])
@pytest.mark.parametrize("budget_gib", [None, 8, 16, 24, 80])
def test_everything_keeps_to_the_width(width, height, budget_gib):
    budget = None if budget_gib is None else budget_gib * GIB
    picture = makeup.timeline_picture(make_summary(), width, height, budget).plain
    table = makeup.makeup_table(make_summary(), width=width).plain
    assert max(len(line) for line in [*picture.splitlines(), *table.splitlines()]) <= width
    rows = area(picture)
    assert len(rows) == height
    assert {len(row) for row in rows} == {width - 10}
    assert picture.startswith("Predicted")
    assert table.startswith("Predicted")


def test_a_budget_in_sight_is_a_line_at_its_height():
    picture = makeup.timeline_picture(make_summary(), 60, 8, 12 * GIB).plain
    assert [row for row in area(picture) if "─" in row] == ["─" * 50]
    assert "   12.00 ┤───" in picture
    assert picture.endswith("─ budget 12.00 GiB; the predicted peak is 4.00 GiB over it")
    above = makeup.timeline_picture(make_summary(), 80, 8, 32 * GIB).plain
    assert above.endswith("─ budget 32.00 GiB; the predicted peak is 16.00 GiB below it")
    assert area(above)[0] == "─" * 70
    assert not any(row.strip() for row in area(above)[1:4])


def test_a_budget_far_above_is_only_named():
    picture = makeup.timeline_picture(make_summary(), 100, 8, 80 * GIB).plain
    assert not any("─" in row for row in area(picture))
    assert "Not drawn, far above: budget 80.00 GiB" in picture
    assert area(picture) == area(makeup.timeline_picture(make_summary(), 100, 8).plain)


def test_each_kind_has_a_character_and_a_colour_of_its_own():
    assert len({look[0] for look in makeup.LOOKS.values()}) == len(makeup.LOOKS)
    assert len({look[1] for look in makeup.LOOKS.values()}) == len(makeup.LOOKS)
    assert all(len(look[0]) == 1 for look in makeup.LOOKS.values())


def test_colours_only_add_to_the_text():
    for text in (
        makeup.timeline_picture(make_summary(), 60, 8, 20 * GIB),
        makeup.makeup_table(make_summary(), width=60),
    ):
        assert printed(text, color=False) == text.plain + "\n"
        coloured = printed(text, color=True)
        assert re.search("\x1b\\[34m *██", coloured)
        assert re.search("\x1b\\[35m *▒▒", coloured)


def test_a_kind_that_is_not_known_is_drawn_on_top():
    summary = make_summary()
    summary["timeline"]["kinds"][0] = "caches"
    picture = makeup.timeline_picture(summary, 60, 8).plain
    assert "? caches" in picture
    assert area(picture)[0].strip() == "?????"


def test_columns_show_the_most_among_their_events():
    summary = make_summary()
    timeline = summary["timeline"]
    timeline["num_events"] = 1000
    timeline["kinds"] = ["parameters"]
    timeline["points"] = [[n, GIB] for n in range(1000)]
    timeline["points"][501][1] = 16 * GIB
    timeline["phases"] = ["forward"] * 1000
    summary["peak_event"]["index"] = 501
    rows = area(makeup.timeline_picture(summary, 50, 8).plain)
    assert [row.count("█") for row in rows] == [1] * 7 + [40]
    assert rows[0].index("█") == 20


def test_what_no_column_shows_yet_is_blank_and_gaps_hold_the_last_level():
    summary = make_summary()
    summary["timeline"] |= {
        "num_events": 40,
        "kinds": ["parameters"],
        "points": [[10, 16 * GIB], [30, 8 * GIB]],
        "phases": ["load", "forward"],
        "marks": [],
    }
    rows = area(makeup.timeline_picture(summary, 50, 4).plain)
    assert rows[0] == " " * 10 + "█" * 20 + " " * 10
    assert rows[3] == " " * 10 + "█" * 30


def test_more_marks_than_there_is_room_for_are_counted():
    summary = make_summary()
    summary["timeline"]["marks"] = [[n % 10, f"a_rather_long_mark_{n}"] for n in range(30)]
    picture = makeup.timeline_picture(summary, 44, 6).plain
    assert "a_rather_long_mark_0" in picture
    num_named = picture.count("a_rather_long_mark_")
    assert f"({30 - num_named} more marks)" in picture
    assert max(len(line) for line in picture.splitlines()) <= 44


def test_no_picture_of_a_run_without_memory():
    assert makeup.timeline_picture(empty_summary()).plain == ""


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize(("suffix", "start"), [("png", PNG), ("SVG", SVG)])
@pytest.mark.parametrize("budget_gib", [None, 20, 80])
def test_the_plot_is_what_the_suffix_says(tmp_path, suffix, start, budget_gib):
    budget = None if budget_gib is None else budget_gib * GIB
    path = makeup.save_timeline(make_summary(), tmp_path / f"memory.{suffix}", budget)
    content = path.read_bytes()
    assert content.startswith(start)
    if suffix == "SVG":
        # matplotlib notes each text in a comment beside its shapes.
        text = content.decode()
        assert "predicted memory allocated, GiB" in text
        assert "Predicted peak in backward of model.layers.*.mlp.down_proj, op mm" in text
        assert "predicted peak, 16.00 GiB" in text
        assert "optimizer states" in text
        assert "first step" in text
        assert (f"budget, {budget_gib}.00 GiB" in text) == (budget is not None)


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize("budget_gib", [None, 20, 80])
def test_nothing_in_the_plot_lies_on_something_else(tmp_path, budget_gib):
    summary = make_summary()
    summary["timeline"] |= {"num_events": 1000}
    summary["timeline"]["marks"] = [[0, "load"], [8, "first step"], [20, "later steps"]]
    summary["timeline"]["marks"] += [[999, "save"]]
    summary["peak_event"]["module"] = "base_model.model.model.layers.*.self_attn.q_proj.lora_A"
    figure = new_figure(tmp_path / "memory.png")
    makeup.draw_timeline(summary, figure, budget_gib and budget_gib * GIB)
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    boxes = [item.get_window_extent() for item in (*axes.texts, axes.title, legend)]
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:number])
    assert all(0 <= box.x0 <= box.x1 <= figure.bbox.width for box in boxes)
    assert all(item.get_window_extent().x0 >= axes.bbox.x0 for item in axes.texts)
    names = [item.get_text() for item in legend.get_texts()]
    assert any("budget" in name for name in names) == (budget_gib == 20)
    assert ("80.00 GiB: far above, not drawn" in axes.get_title()) == (budget_gib == 80)


@pytest.mark.usefixtures("matplotlib")
def test_a_plot_of_a_run_without_memory(tmp_path):
    assert makeup.save_timeline(empty_summary(), str(tmp_path / "memory.png")).exists()


def test_a_plot_refuses_another_suffix(tmp_path):
    with suffix_refused():
        makeup.save_timeline(make_summary(), tmp_path / "memory.pdf")


@pytest.mark.usefixtures("no_matplotlib")
def test_a_plot_without_matplotlib_says_how_to_install_it(tmp_path):
    with matplotlib_missed():
        makeup.save_timeline(make_summary(), tmp_path / "memory.png")


@pytest.mark.usefixtures("matplotlib")
def test_nothing_changes_the_summary(tmp_path):
    summary = make_summary()
    before = deepcopy(summary)
    makeup.makeup_table(summary)
    makeup.timeline_picture(summary, budget_bytes=20 * GIB)
    makeup.save_timeline(summary, tmp_path / "memory.svg")
    assert summary == before


def test_it_loads_neither_torch_nor_the_tracer():
    code = (
        "import sys, autotune.report.makeup;"
        "print({'torch', 'matplotlib', 'autotune.virtual'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "set()\n"
