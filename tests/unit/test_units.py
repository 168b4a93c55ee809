from __future__ import annotations

from typing import Any

import pytest

from autotune import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024", 1024),
        ("1b", 1),
        ("1KiB", 1024),
        ("1k", 1024),
        ("2 MiB", 2 * 1024**2),
        ("22GiB", 22 * 1024**3),
        ("22g", 22 * 1024**3),
        ("1.5gib", 3 * 1024**3 // 2),
        (".5GiB", 1024**3 // 2),
        ("800 MB", 800_000_000),
        ("1TB", 10**12),
        ("1TiB", 1024**4),
        (" 3 GB ", 3_000_000_000),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected
    assert isinstance(units.parse_bytes(text), int)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "0", "0GiB", "1 2 GiB", "1e9", "22 parsecs", "1,5GiB", "nan", "1.GiB"],
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        units.parse_bytes(text)


def test_a_size_below_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="size"):
        units.parse_bytes("0.1b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("30m", 1800.0),
        ("30 min", 1800.0),
        ("1.5h", 5400.0),
        ("2D", 172_800.0),
        (".5s", 0.5),
    ],
)
def test_durations_are_read(text: str, expected: float) -> None:
    assert units.parse_duration_s(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-5", "0", "1 fortnight", "1:30", "5ms"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        units.parse_duration_s(text)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0.000 GiB"),
        (512 * 1024**2, "0.500 GiB"),
        (1024**3, "1.00 GiB"),
        (22.125 * 1024**3, "22.12 GiB"),
        (-(1024**3) // 2, "-0.500 GiB"),
    ],
)
def test_bytes_are_shown_as_gib(value: float | None, shown: str) -> None:
    assert units.format_gib(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.85, "850 ms"),
        (1.0, "1.0 s"),
        (12.34, "12.3 s"),
        (245.0, "4 min 05 s"),
        (7800.0, "2 h 10 min"),
        (90_000.0, "25 h 00 min"),
    ],
)
def test_durations_are_shown(value: float | None, shown: str) -> None:
    assert units.format_duration(value) == shown


@pytest.mark.parametrize("value", [0.9996, 59.96, 3599.7])
def test_no_duration_is_shown_as_sixty_of_a_unit(value: float) -> None:
    shown = units.format_duration(value)
    for wrong in ("1000 ms", "60.0 s", "60 min"):
        assert wrong not in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.123456, "0.123"),
        (3.0, "3"),
        (12.345, "12.3"),
        (123.4, "123"),
        (12_345.6, "12,346"),
    ],
)
def test_rates_are_shown(value: float | None, shown: str) -> None:
    assert units.format_rate(value) == shown


@pytest.mark.parametrize("parse", [units.parse_bytes, units.parse_duration_s])
def test_a_number_beyond_all_measure_is_refused(parse: Any) -> None:
    with pytest.raises(ValueError, match="beyond all measure"):
        parse("9" * 400)


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "row", "1 row"),
        (0, "row", "0 rows"),
        (1200, "row", "1,200 rows"),
        (1, "micro-batch", "1 micro-batch"),
        (2, "micro-batch", "2 micro-batches"),
        (20_000, "candidate", "20,000 candidates"),
    ],
)
def test_a_count_has_its_noun_in_the_right_number(count: int, noun: str, text: str) -> None:
    assert units.counted(count, noun) == text


def test_sizes_set_against_each_other_look_different_if_they_differ() -> None:
    assert units.format_gib_apart(units.GIB, 2 * units.GIB) == ("1.00 GiB", "2.00 GiB")
    assert units.format_gib_apart(units.GIB, units.GIB) == ("1.00 GiB", "1.00 GiB")
    near = 2 * units.GIB + 3 * units.MIB
    assert units.format_gib_apart(2 * units.GIB, near) == ("2.000 GiB", "2.003 GiB")
    assert len(set(units.format_gib_apart(64 * units.GIB, 64 * units.GIB + 1))) == 2


@pytest.mark.parametrize("size", [units.GIB, 5_999_999_999, 300_000_001, 48 * units.GIB + 1])
def test_a_budget_as_it_is_printed_rounded_up_holds_the_size(size: int) -> None:
    assert size <= units.parse_bytes(units.format_gib_up(size)) <= size + units.GIB / 100
