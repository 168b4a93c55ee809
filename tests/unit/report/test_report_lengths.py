"""What each length would do to a data set: figures, text, JSON and plot."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from dataclasses import replace

import pytest
from pictures_kit import PNG, SVG, matplotlib_missed, suffix_refused
from report_factory import make_profile

from autotune.report import lengths
from autotune.space.context import DataProfile


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [None, 6, 3])
def test_padding_share_equals_the_share_over_all_batches(size, limit):
    rows = [2, 2, 5, 7, 9]
    capped = [row if limit is None else min(row, limit) for row in rows]
    batches = list(itertools.combinations(capped, size))
    positions = sum(max(batch) * size for batch in batches)
    expected = 1 - sum(sum(batch) for batch in batches) / positions
    counts = {row: rows.count(row) for row in rows}
    assert lengths.padding_share(counts, size, limit) == pytest.approx(expected, abs=1e-9)


def test_padding_share_at_the_edges():
    assert lengths.padding_share({7: 100}, 16) == 0
    assert lengths.padding_share({1: 1, 3: 1}, 64) == pytest.approx(1 - 2 / 3)
    with pytest.raises(ValueError, match="at least one row"):
        lengths.padding_share({}, 4)


def test_rows_of_the_table():
    first, second, third = lengths.length_rows(make_profile())
    assert first.rows_cut_share == first.rows_split_bfd_split_share == 0.3
    kept = 4 * 10 + 3 * 50 + 2 * 64 + 64
    assert first.lost_truncation_share == pytest.approx(1 - kept / 1590)
    assert first.lost_bfd_share == first.lost_truncation_share
    assert first.lost_bfd_split_share == first.lost_wrapped_share == 0
    assert second.rows_cut_share == 0.1
    assert third.lost_truncation_share == 0
    assert list(third.padding_shares) == [1, 4, 8, 16]
    assert third.padding_shares[1] == 0
    assert statistics.mean(third.padding_shares.values()) > 0.5


def test_only_lengths_that_tell_something_are_shown():
    counts = {length: 1 for length in range(1, 1001)}
    limits = tuple(range(8, 1001, 8))
    total = sum(counts)
    profile = replace(
        make_profile(),
        num_rows=1000,
        num_tokens=total,
        num_loss_tokens=total,
        length_counts=counts,
        max_lengths=limits,
        loss_tokens_kept=tuple(sum(min(length, limit) for length in counts) for limit in limits),
        rows_cut=tuple(1000 - limit for limit in limits),
        rows_dropped=(0,) * len(limits),
    )
    rows = lengths.length_rows(profile)
    shown = lengths.telling_rows(rows)
    lost = [row.lost_truncation_share for row in shown]
    assert len(shown) == len(lengths.LOST_STEPS)
    assert lost == sorted(set(lost), reverse=True)
    assert all(share <= step for share, step in zip(lost, lengths.LOST_STEPS, strict=True))
    assert shown[-1].max_length == 1000
    text = lengths.render_text(profile)
    assert f"--all tables all {len(limits)}" in " ".join(text.split())
    assert len(lengths.render_text(profile, every=True).splitlines()) > len(limits)
    offered = (8, 440, 448, 2048)
    with_offered = lengths.length_rows(profile, offered)
    chosen = [row.max_length for row in lengths.telling_rows(with_offered, offered)]
    assert chosen == sorted({*(row.max_length for row in shown), 8, 440, 448, 2048})
    table = lengths.render_text(profile, offered, 0.95)
    marked = [line.split()[0] for line in table.splitlines() if re.match(r" *[\d,]+\* ", line)]
    assert marked == ["8*", "440*", "448*", "2,048*"]
    text = " ".join(table.split())
    assert "A search draws max_length from: 8, 440, 448, 2,048." in text
    assert "Those above the longest row cut nothing" in text
    assert "Those that lose more than 5.0% (--min-coverage) are drawn with bfd_split and" in text


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("offered", [(20, 64), (64, 701, 768, 1024), (2048, 4096)])
def test_table_marks_and_footer_name_the_same_lengths(offered, every):
    text = lengths.render_text(make_profile(), offered, every=every)
    marked = re.findall(r"^ *([\d,]+)\* ", text, re.MULTILINE)
    footer = re.search(r"A search draws max_length from: ([\d, ]+)\.", " ".join(text.split()))
    assert footer is not None
    assert marked == footer[1].split(", ") == [f"{value:,}" for value in offered]
    data = lengths.to_json(make_profile(), offered)
    assert set(data["offered"]) <= {row["max_length"] for row in data["max_lengths"]}


def test_a_length_beyond_the_longest_row_cuts_as_little_as_the_longest():
    *_, longest, beyond = lengths.length_rows(make_profile(), (4096,))
    assert replace(beyond, max_length=longest.max_length) == longest


def test_odd_roles_are_noted():
    roles = {f"role{n}": 1 for n in range(6)}
    profile = replace(make_profile(), odd_roles={"usr": 12, **roles})
    text = " ".join(lengths.render_text(profile).split())
    assert "neither system, user, assistant, tool nor developer: 'usr' (12 messages)," in text
    assert "'role3' (1 message) and 2 more. TRL trains on them" in text
    assert DataProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_lengths_that_keep_enough_need_no_word():
    text = lengths.render_text(make_profile(), (1024,), 0.95)
    assert "A search draws max_length from: 1,024." in text
    assert "are drawn with" not in text
    assert lengths.to_json(make_profile(), (64, 1024))["offered"] == [64, 1024]


def test_a_single_length_is_shown_whatever_it_loses():
    rows = lengths.length_rows(make_profile())[:1]
    assert rows[0].lost_truncation_share > 0.5
    assert lengths.telling_rows(rows) == rows


def test_the_columns_are_explained():
    text = " ".join(lengths.render_text(make_profile()).split())
    assert "rows dropped: rows that truncation leaves without any token with loss" in text


def test_a_data_set_without_loss_tokens_loses_none():
    profile = replace(make_profile(), num_loss_tokens=0, loss_tokens_kept=(0, 0, 0))
    assert lengths.length_rows(profile)[0].lost_truncation_share == 0


def test_bins_cover_every_row_once():
    found = lengths.bins(make_profile())
    assert sum(count for _, _, count in found) == 10
    assert found[0] == (9, 16, 4)
    assert found[-1] == (513, 1024, 1)
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(found))


def test_text_and_json():
    text = lengths.render_text(make_profile())
    assert "10 rows (1 empty one left out)" in text
    assert text.count("█") > 40
    assert max(len(line) for line in text.splitlines()) <= 100
    data = json.loads(json.dumps(lengths.to_json(make_profile())))
    assert data["max_lengths"][0]["padding_shares"]["8"] > 0
    assert data["quantiles"]["0.5"] == 50


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize(("suffix", "start"), [("png", PNG), ("svg", SVG)])
def test_plot_writes_what_the_suffix_says(tmp_path, suffix, start):
    path = lengths.plot(make_profile(), tmp_path / f"lengths.{suffix}")
    assert path.read_bytes().startswith(start)


def test_plot_refuses_another_suffix(tmp_path):
    with suffix_refused():
        lengths.plot(make_profile(), tmp_path / "lengths.jpeg")


@pytest.mark.usefixtures("no_matplotlib")
def test_plot_without_matplotlib_says_how_to_install_it(tmp_path):
    with matplotlib_missed():
        lengths.plot(make_profile(), tmp_path / "lengths.png")


@pytest.mark.parametrize(
    ("counts", "most", "expected"),
    [
        ({}, 64, ()),
        ({3: 2}, 64, ((1, 1, 0), (2, 2, 0), (3, 3, 2))),
        ({1: 1, 10: 2, 11: 4}, 3, ((1, 4, 1), (5, 8, 0), (9, 12, 6))),
    ],
)
def test_equal_bins_hold_every_row_once(
    counts: dict[int, int], most: int, expected: tuple[tuple[int, int, int], ...]
) -> None:
    assert lengths.equal_bins(counts, most) == expected


def test_a_report_keeps_few_bins_of_long_data() -> None:
    found = lengths.equal_bins({length: 1 for length in range(1, 5001)})
    assert len(found) <= lengths.MOST_BINS
    assert sum(count for _, _, count in found) == 5000
