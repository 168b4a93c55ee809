"""Prices that users give."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import prices
from autotune.errors import UsageError

COMPARED = {"virtual:rtx-4090": "rtx-4090", "virtual:24GiB": "24GiB"}


@pytest.mark.parametrize("name", ["rtx-4090", "4090", "virtual:4090", "RTX 4090"])
def test_a_card_is_known_by_all_its_names(name: str) -> None:
    assert prices.by_card(prices.parse([f"{name}=0.4"]), COMPARED) == {"rtx-4090": 0.4}


@pytest.mark.parametrize("pair", ["rtx-4090", "=3", "rtx-4090=", "rtx-4090=0", "rtx-4090=-1"])
def test_a_pair_that_is_none_is_refused(pair: str) -> None:
    with pytest.raises(UsageError) as caught:
        prices.parse([pair])
    assert "--price" in caught.value.message


@pytest.mark.parametrize("value", ["nan", "inf", "$3", "1e300", "true"])
def test_a_price_is_a_positive_number(value: str) -> None:
    with pytest.raises(UsageError, match="is no price per hour"):
        prices.parse([f"rtx-4090={value}"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("prices.toml", "rtx-4090 = 0.4\nh200 = 3\n"),
        ("prices.toml", "[prices]\nrtx-4090 = 0.4\n"),
        ("prices.yaml", "rtx-4090: 0.4\nunheard-of: 1\n"),
        ("prices.yml", "prices:\n  virtual:4090: 0.4\n"),
    ],
)
def test_a_file_may_hold_other_cards_too(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    read = prices.read(tmp_path / name)
    assert prices.by_card(read, COMPARED, from_file=True) == {"rtx-4090": 0.4}


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("prices.toml", "rtx-4090 = \n", "cannot be read"),
        ("prices.yaml", "- 1\n- 2\n", "no mapping"),
        ("prices.yaml", "rtx-4090: cheap\n", "rtx-4090: 'cheap' is no price"),
        ("prices.yaml", "rtx-4090: yes\n", "is no price"),
        ("prices.yaml", "a: !!python/object/apply:os.getcwd []\n", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_is_refused(
    name: str, text: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=named):
        prices.read(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        prices.read(tmp_path / "gone.toml")


def test_a_price_from_python_is_checked_too() -> None:
    with pytest.raises(UsageError, match="the price of 4090: -1 is no price per hour"):
        prices.by_card({"4090": -1}, COMPARED)


def test_prices_of_other_cards_alone_are_refused() -> None:
    with pytest.raises(UsageError, match="a price for h200, which is not compared") as caught:
        prices.by_card({"h200": 3.0}, COMPARED)
    assert "rtx-4090, 24GiB" in caught.value.hint
    with pytest.raises(UsageError, match="not compared"):
        prices.by_card({"h200": 3.0}, COMPARED, from_file=True)


def test_a_number_that_no_float_holds_is_no_price(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(f"rtx-4090: {'9' * 401}\n")
    with pytest.raises(UsageError, match="no price per hour"):
        prices.read(path)
