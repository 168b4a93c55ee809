"""Value sets: what a knob may be set to. Every domain is finite and holds plain JSON scalars."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from autotune.errors import SpaceError

Value: TypeAlias = str | int | float | bool | None

# A list of values longer than this is a slip of the pen, not a search.
MAX_VALUES = 10_000


@runtime_checkable
class Domain(Protocol):
    """A finite set of values."""

    @property
    def values(self) -> tuple[Value, ...]:
        """Return all values; ascending if the domain is ordered."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether a larger value means more of the same thing."""
        ...

    def validate(self, value: Value) -> Value:
        """Return ``value`` if the domain holds it.

        Raises:
            SpaceError: If it does not; the message says what would be accepted.
        """
        ...

    def coerce(self, raw: object) -> Value:
        """Return the value that ``raw``, read from YAML or a command line, stands for.

        Raises:
            SpaceError: If it stands for none.
        """
        ...

    def describe(self) -> str:
        """Return what is accepted, in words."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON that :func:`autotune.space.forms.domain_from_json` reads back."""
        ...


def same(left: object, right: object) -> bool:
    """Whether two values are equal and of one type, so that ``True`` is not ``1``."""
    return type(left) is type(right) and left == right


def require_int(value: object, what: str) -> int:
    """Return ``value`` if it is a whole number, and not on or off.

    Raises:
        SpaceError: If it is not; ``what`` is its name in the message.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpaceError(f"{what} must be a whole number, not {value!r}.")
    return value


def read_int(raw: object) -> object:
    """Return the whole number that text stands for; anything else as it is."""
    if isinstance(raw, str):
        try:
            return int(raw.replace("_", ""))
        except ValueError:
            return raw
    return raw


@dataclass(frozen=True, slots=True)
class Choice:
    """A list of values, without an order unless it is declared.

    Attributes:
        values: The values; their order is kept, and sorted if ``ordered``.
        ordered: Whether a larger value means more of the same thing; needs numbers.
    """

    values: tuple[Value, ...]
    ordered: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.values, str) or not isinstance(self.values, Iterable):
            raise SpaceError(f"a list of values is needed, not {self.values!r}.")
        values = tuple(self.values)
        if not values:
            raise SpaceError("a domain needs at least one value.")
        for index, value in enumerate(values):
            if value is not None and not isinstance(value, str | int | float):
                raise SpaceError(f"{value!r} is not a plain value (text, number, on/off).")
            if isinstance(value, float) and not math.isfinite(value):
                raise SpaceError(f"{value!r} is not a finite number.")
            # Plain equality: a dictionary could not tell True from 1 either.
            if value in values[:index]:
                raise SpaceError(f"the value {value!r} is listed twice.")
        if self.ordered:
            if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                raise SpaceError("an ordered list may hold numbers only.")
            values = tuple(sorted(values, key=lambda value: float(value or 0)))
        object.__setattr__(self, "values", values)

    def validate(self, value: Value) -> Value:
        """Return ``value`` if it is listed."""
        for known in self.values:
            if same(known, value):
                return known
        texts = [str(known) for known in self.values]
        close = difflib.get_close_matches(str(value), texts, n=2, cutoff=0.5)
        hint = f"Did you mean {' or '.join(repr(text) for text in close)}?" if close else ""
        raise SpaceError(f"{value!r} is not one of {self.describe()}.", hint=hint)

    def coerce(self, raw: object) -> Value:
        """Return the listed value that ``raw`` stands for.

        YAML 1.1 reads ``on``, ``off``, ``yes`` and ``no`` as booleans and ``null`` as nothing;
        they stand for the values written ``on``, ``off`` and ``none`` where those are listed.
        """
        for known in self.values:
            if same(known, raw):
                return known
        texts = {str(known).lower(): known for known in self.values}
        names: tuple[str, ...] = ()
        if raw is None or isinstance(raw, bool):
            names = {True: ("on", "true"), False: ("off", "false"), None: ("none",)}[raw]
        elif isinstance(raw, str):
            text = raw.strip().lower()
            aliases = {
                "true": "on", "yes": "on", "on": "true",
                "false": "off", "no": "off", "off": "false", "null": "none",
            }  # fmt: skip
            names = (text, aliases.get(text, text))
        for name in names:
            if name in texts:
                return texts[name]
        if isinstance(raw, str | int | float) or raw is None:
            return self.validate(raw)
        raise SpaceError(f"a single value is needed, not {raw!r}.")

    def describe(self) -> str:
        """Return the values, separated by commas."""
        return ", ".join(str(value) for value in self.values)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        data: dict[str, Any] = {"choice": list(self.values)}
        return {**data, "ordered": True} if self.ordered else data


@dataclass(frozen=True, slots=True)
class IntRange:
    """Whole numbers from ``low`` to ``high``, both included, in steps of ``step``."""

    low: int
    high: int
    step: int = 1

    def __post_init__(self) -> None:
        for name in ("low", "high", "step"):
            require_int(getattr(self, name), name)
        if self.step < 1 or self.low > self.high:
            raise SpaceError(f"the range from {self.low} to {self.high} by {self.step} is empty.")

    @property
    def values(self) -> tuple[Value, ...]:
        """Return all numbers, ascending.

        Raises:
            SpaceError: If there are too many to search.
        """
        numbers = range(self.low, self.high + 1, self.step)
        if len(numbers) > MAX_VALUES:
            raise SpaceError(f"{len(numbers)} values are too many; give a larger step.")
        return tuple(numbers)

    @property
    def ordered(self) -> bool:
        """Return True."""
        return True

    def validate(self, value: Value) -> Value:
        """Return ``value`` if it lies in the range and on its grid."""
        number = require_int(value, "the value")
        if number not in range(self.low, self.high + 1, self.step):
            raise SpaceError(f"{number} is not one of {self.describe()}.")
        return number

    def coerce(self, raw: object) -> Value:
        """Return the number that ``raw`` stands for."""
        return self.validate(require_int(read_int(raw), "the value"))

    def describe(self) -> str:
        """Return the range in words."""
        steps = f" in steps of {self.step}" if self.step != 1 else ""
        return f"the whole numbers from {self.low} to {self.high}{steps}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {"range": [self.low, self.high, self.step]}


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Powers of two from ``low`` to ``high``, both included and themselves powers of two."""

    low: int
    high: int

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            number = require_int(getattr(self, name), name)
            if number < 1 or number & (number - 1):
                raise SpaceError(f"{name} must be a power of two, not {number}.")
        if self.low > self.high:
            raise SpaceError(f"there is no power of two from {self.low} to {self.high}.")

    @property
    def values(self) -> tuple[Value, ...]:
        """Return all powers, ascending."""
        return tuple(
            1 << exponent for exponent in range(self.low.bit_length() - 1, self.high.bit_length())
        )

    @property
    def ordered(self) -> bool:
        """Return True."""
        return True

    def validate(self, value: Value) -> Value:
        """Return ``value`` if it is a power of two in the range."""
        number = require_int(value, "the value")
        if number not in self.values:
            raise SpaceError(f"{number} is not one of {self.describe()}.")
        return number

    def coerce(self, raw: object) -> Value:
        """Return the number that ``raw`` stands for."""
        return self.validate(require_int(read_int(raw), "the value"))

    def describe(self) -> str:
        """Return the range in words."""
        return f"the powers of two from {self.low} to {self.high}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {"powers_of_two": [self.low, self.high]}


@dataclass(frozen=True, slots=True)
class FloatRange:
    """Numbers from ``low`` to ``high``, searched on a grid.

    Attributes:
        low: Smallest number.
        high: Largest number.
        num_values: Points of the grid that is searched; any number between is accepted as a pin.
        log: Whether the points are spaced by ratio instead of by difference; needs ``low`` > 0.
    """

    low: float
    high: float
    num_values: int = 9
    log: bool = False

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise SpaceError(f"{name} must be a number, not {value!r}.")
            if not math.isfinite(value):
                raise SpaceError(f"{name} must be finite, not {value!r}.")
            object.__setattr__(self, name, float(value))
        if not isinstance(self.log, bool):
            raise SpaceError(f"log must be true or false, not {self.log!r}.")
        if not 2 <= require_int(self.num_values, "num_values") <= MAX_VALUES:
            raise SpaceError(f"num_values must lie between 2 and {MAX_VALUES}.")
        if self.low >= self.high:
            raise SpaceError(f"the range from {self.low:g} to {self.high:g} is empty.")
        if self.log and self.low <= 0:
            raise SpaceError(f"a logarithmic range must start above zero, not at {self.low:g}.")

    @property
    def values(self) -> tuple[Value, ...]:
        """Return the points of the grid, ascending; both ends are exact."""
        shares = [index / (self.num_values - 1) for index in range(1, self.num_values - 1)]
        if self.log:
            # Ratios of very different ends may overflow; logarithms do not.
            low, high = math.log(self.low), math.log(self.high)
            inner = [math.exp(low + share * (high - low)) for share in shares]
        else:
            inner = [self.low * (1 - share) + self.high * share for share in shares]
        rounded = [float(f"{point:.12g}") for point in inner]
        kept = {point for point in rounded if self.low < point < self.high}
        return (self.low, *sorted(kept), self.high)

    @property
    def ordered(self) -> bool:
        """Return True."""
        return True

    def validate(self, value: Value) -> Value:
        """Return ``value`` as a float if it lies in the range."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpaceError(f"the value must be a number, not {value!r}.")
        if not self.low <= value <= self.high:
            raise SpaceError(f"{value:g} is not one of {self.describe()}.")
        return float(value)

    def coerce(self, raw: object) -> Value:
        """Return the number that ``raw`` stands for."""
        if isinstance(raw, str):
            try:
                raw = float(raw)
            except ValueError:
                raise SpaceError(f"the value must be a number, not {raw!r}.") from None
        if not isinstance(raw, int | float):
            raise SpaceError(f"the value must be a number, not {raw!r}.")
        return self.validate(raw)

    def describe(self) -> str:
        """Return the range in words."""
        return f"the numbers from {self.low:g} to {self.high:g}"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        data: dict[str, Any] = {"float_range": [self.low, self.high, self.num_values]}
        return {**data, "log": True} if self.log else data


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths at the given shares of the data's rows; known only once the data is read.

    Attributes:
        shares: Shares of the rows (above 0, up to 1) that are not longer, ascending.
    """

    shares: tuple[float, ...] = (0.5, 0.75, 0.9, 0.95, 1.0)

    def __post_init__(self) -> None:
        shares = tuple(self.shares)
        for share in shares:
            number = isinstance(share, int | float) and not isinstance(share, bool)
            if not number or not 0 < share <= 1:
                raise SpaceError(f"a quantile must be above 0 and at most 1, not {share!r}.")
        if not shares:
            raise SpaceError("at least one quantile is needed.")
        object.__setattr__(self, "shares", tuple(sorted({float(share) for share in shares})))

    @property
    def values(self) -> tuple[Value, ...]:
        """Raise: the values are known only once the data is read."""
        raise SpaceError("quantiles become values only once the data is read.")

    @property
    def ordered(self) -> bool:
        """Return True."""
        return True

    def validate(self, value: Value) -> Value:
        """Return ``value`` if it is a positive whole number."""
        if require_int(value, "the value") < 1:
            raise SpaceError(f"{value!r} is not a positive number of tokens.")
        return value

    def coerce(self, raw: object) -> Value:
        """Return the number that ``raw`` stands for."""
        return self.validate(require_int(read_int(raw), "the value"))

    def describe(self) -> str:
        """Return the shares in words."""
        return "the lengths at " + ", ".join(f"{share:.0%}" for share in self.shares)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {"quantiles": list(self.shares)}
