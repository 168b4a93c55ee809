from __future__ import annotations

import pytest

from autotune.errors import SpaceError
from autotune.space.domains import Choice, Domain, FloatRange, IntRange, PowerOfTwo, Quantiles
from autotune.space.forms import domain_from_json
from autotune.space.lengths import round_up_useful, useful_lengths


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        (Choice(("b", "a", 3)), ("b", "a", 3)),
        (Choice((3, 1, 2), ordered=True), (1, 2, 3)),
        (IntRange(8, 32, 8), (8, 16, 24, 32)),
        (IntRange(1, 4, 2), (1, 3)),
        (PowerOfTwo(1, 16), (1, 2, 4, 8, 16)),
        (FloatRange(0.0, 1.0, 3), (0.0, 0.5, 1.0)),
        (FloatRange(1e-5, 1e-3, 3, log=True), (1e-5, 1e-4, 1e-3)),
    ],
)
def test_values(domain: Domain, values: tuple[object, ...]) -> None:
    assert domain.values == values
    assert domain.ordered is (domain != Choice(("b", "a", 3)))
    assert isinstance(domain, Domain)
    assert domain_from_json(domain.to_json()) == domain
    for value in domain.values:
        assert domain.validate(value) == value
        assert domain.coerce(str(value)) == value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Choice(()),
        lambda: Choice("abc"),
        lambda: Choice((1, 1)),
        lambda: Choice((1, True)),
        lambda: Choice(([1],)),
        lambda: Choice((float("nan"),)),
        lambda: Choice(("a", 1), ordered=True),
        lambda: Choice((True, False), ordered=True),
        lambda: IntRange(3, 2),
        lambda: IntRange(1, 2, 0),
        lambda: IntRange(1.0, 2),
        lambda: IntRange(True, 2),
        lambda: IntRange(1, 1 << 20).values,
        lambda: PowerOfTwo(3, 8),
        lambda: PowerOfTwo(0, 8),
        lambda: PowerOfTwo(8, 4),
        lambda: FloatRange(1.0, 1.0),
        lambda: FloatRange(0.0, 1.0, log=True),
        lambda: FloatRange(0.0, float("inf")),
        lambda: FloatRange(0.0, 1.0, 1),
        lambda: FloatRange("a", 1.0),
        lambda: FloatRange(0.0, 1.0, log="yes"),
        lambda: Quantiles(()),
        lambda: Quantiles((0.0,)),
        lambda: Quantiles((1.5,)),
        lambda: Quantiles((0.5,)).values,
    ],
)
def test_bad_domains_raise(make) -> None:
    with pytest.raises(SpaceError):
        make()


@pytest.mark.parametrize(
    ("domain", "raw", "value"),
    [
        (Choice(("off", "on")), False, "off"),
        (Choice(("off", "on")), True, "on"),
        (Choice(("off", "on")), "true", "on"),
        (Choice(("off", "on")), "NO", "off"),
        (Choice((False, True)), "on", True),
        (Choice(("none", 8)), None, "none"),
        (Choice(("none", 8)), "null", "none"),
        (Choice(("none", 8)), "8", 8),
        (Choice(("sdpa", "eager")), " SDPA ", "sdpa"),
        (IntRange(1, 4096), "1_024", 1024),
        (FloatRange(0.0, 1.0), "0.3", 0.3),
        (FloatRange(0.0, 1.0), 1, 1.0),
        (Quantiles(), "77", 77),
    ],
)
def test_coerce(domain: Domain, raw: object, value: object) -> None:
    coerced = domain.coerce(raw)
    assert coerced == value
    assert type(coerced) is type(value)


@pytest.mark.parametrize(
    ("domain", "raw"),
    [
        (Choice(("off", "on")), "maybe"),
        (Choice(("off", "on")), 1),
        (Choice((1, 2)), True),
        (Choice((1, 2)), [1]),
        (IntRange(1, 8), "eight"),
        (IntRange(1, 8), 2.0),
        (IntRange(1, 8), True),
        (IntRange(1, 8), 9),
        (IntRange(2, 8, 2), 3),
        (PowerOfTwo(1, 8), 3),
        (PowerOfTwo(1, 8), None),
        (FloatRange(0.0, 1.0), "x"),
        (FloatRange(0.0, 1.0), 1.5),
        (FloatRange(0.0, 1.0), None),
        (FloatRange(0.0, 1.0), True),
        (Quantiles(), 0),
    ],
)
def test_coerce_refuses(domain: Domain, raw: object) -> None:
    with pytest.raises(SpaceError):
        domain.coerce(raw)


def test_the_nearest_value_is_named() -> None:
    with pytest.raises(SpaceError, match=r"'paddd' is not one of padded, bfd.*'padded'"):
        Choice(("padded", "bfd")).validate("paddd")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "an empty mapping describes no values"),
        ({"power_of_two": [1, 2]}, "Did you mean 'powers_of_two'"),
        ({"range": [1, 2], "choice": [1]}, "describes no values"),
        ({"range": 3}, "needs a list of 2 to 3 numbers"),
        ({"range": [1, 2, 3, 4]}, "needs a list of 2 to 3 numbers"),
        ({"range": ["a", 2]}, "whole number"),
        ({"range": [1, 2], "log": True}, "describes no values"),
        ({"powers_of_two": [1]}, "needs a list of 2 numbers"),
        ({"choice": []}, "at least one value"),
        ({"quantiles": []}, "needs a list"),
    ],
)
def test_bad_forms_raise(data: dict[str, object], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        domain_from_json(data)


def test_useful_lengths() -> None:
    assert useful_lengths(600) == (
        *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32), *range(320, 513, 64),
    )  # fmt: skip
    assert useful_lengths(8) == (8,)
    assert useful_lengths(7) == ()
    assert useful_lengths(8192)[-5:] == (4096, 5120, 6144, 7168, 8192)


@pytest.mark.parametrize(
    ("length", "rounded"),
    [(1, 8), (8, 8), (9, 16), (64, 64), (65, 80), (513, 640), (1024, 1024), (1025, 1280)],
)
def test_round_up_useful(length: int, rounded: int) -> None:
    assert round_up_useful(length) == rounded


@pytest.mark.parametrize("length", [0, -5])
def test_round_up_useful_needs_a_length(length: int) -> None:
    with pytest.raises(ValueError, match="greater than zero"):
        round_up_useful(length)
