"""What a search optimises and what it must stay within.

An objective reads one quantity, with its spread, from a measurement. A constraint reads how far a
measurement is over a limit, as a share of that limit, so that violations of different kinds can
be compared and summed: positive is over, zero or less is within.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.errors import UsageError
from autotune.probe.result import Interval, Measurement
from autotune.registry import Registry

Direction = Literal["minimize", "maximize"]

RESOLUTION_RATIO = 0.01
"""Differences below this share are a tie whatever the spread within one probe: fresh processes
with the same settings differ by about as much, and the steps of one process cannot show that."""

TIE_LIMIT = 0.10
"""Spread counts up to this share of the median to each side. A probe that other work disturbed
would otherwise tie with everything; within it, two medians of a tie differ by a fifth at most."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A quantity to minimise or to maximise.

    Attributes:
        name: Name in the registry and in reports.
        unit: Unit of the values, such as ``tokens/s``.
        direction: ``minimize`` or ``maximize``.
        read: Gives the value of one measurement with its spread; raises ``ValueError`` where
            the measurement has none.
        per: What the spread of a trial with several probes is taken over: ``step`` pools their
            steps, ``probe`` spans from the least to the greatest of the probes' values.
        resolution_ratio: Values closer than this share of each other are a tie.
    """

    name: str
    unit: str
    direction: Direction
    read: Callable[[Measurement], Interval]
    per: Literal["step", "probe"] = "step"
    resolution_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.direction not in ("minimize", "maximize"):
            raise UsageError(
                f"objective {self.name!r} has the direction {self.direction!r}.",
                hint="Use 'minimize' or 'maximize'.",
            )

    def of(self, measurement: Measurement) -> Interval:
        """Return the value of one measurement with its spread.

        Raises:
            ValueError: If it has none that can be compared: ``read`` fails, or gives what is no
                interval of finite numbers.
        """
        try:
            found = self.read(measurement)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(f"reading it failed with {error!r}") from error
        values = [getattr(found, name, None) for name in ("median", "low", "high")]
        if not all(isinstance(item, int | float) and math.isfinite(item) for item in values):
            raise ValueError(f"it is {found!r}")
        return found

    @property
    def maximize(self) -> bool:
        """Whether more is better."""
        return self.direction == "maximize"

    def is_better(self, value: float, other: float) -> bool:
        """Whether ``value`` is strictly better than ``other``."""
        return value > other if self.maximize else value < other


@dataclass(frozen=True, slots=True)
class Constraint:
    """A limit that a trial must keep.

    Attributes:
        name: Name in reports and in the study.
        read: Gives, for a measurement and the facts of the search, how far it is over the limit;
            positive is over. Facts are ``budget_bytes``, ``device_total_bytes``, ``coverage``.
    """

    name: str
    read: Callable[[Measurement, Mapping[str, Any]], float]


registry: Registry[Callable[[], Objective]] = Registry("objective", group="autotune.objectives")
register = registry.register


DEFAULT_NAMES = ("peak_memory", "tokens_per_s")
"""What a search optimises that is not told otherwise."""


def get(name: str) -> Objective:
    """Return the registered objective called ``name``.

    Raises:
        UnknownNameError: If there is none.
        UsageError: If what is registered, such as a plug-in's, makes none.
    """
    made = registry.get(name)
    try:
        found = made()
    except Exception as error:  # a stranger's package may raise anything
        raise UsageError(
            f"the objective {name!r} cannot be made: {type(error).__name__}: {error}.",
            hint="Mend the package that registers it, or leave the objective out.",
        ) from error
    if not isinstance(found, Objective):
        raise UsageError(
            f"the objective {name!r} is registered as what makes {type(found).__name__}, not an"
            " autotune.objectives.Objective.",
            hint="Register a function without arguments that returns an Objective.",
        )
    # Reports look it up by the name that it is registered under.
    return found if found.name == name else replace(found, name=name)


def named(names: Iterable[str]) -> tuple[Objective, ...]:
    """Return objectives by names as people write them, with dashes or underscores, each once.

    They are sorted by name, so that the order in which they are given makes no other search.

    Raises:
        UnknownNameError: If there is none of a name; it lists the nearest ones.
    """
    # A plug-in's own name may have dashes.
    known = set(registry.names())
    asked = {name if name in known else name.replace("-", "_") for name in map(str.strip, names)}
    return tuple(get(name) for name in sorted(asked))


@register("tokens_per_s")
def tokens_per_s() -> Objective:
    """Return the training rate, in trained (non-padding) tokens per second."""
    return Objective(
        "tokens_per_s",
        "tokens/s",
        "maximize",
        lambda measurement: measurement.tokens_per_s,
        resolution_ratio=RESOLUTION_RATIO,
    )


@register("peak_memory")
def peak_memory() -> Objective:
    """Return the whole run's peak of the memory that decides the fit, in bytes."""
    return Objective(
        "peak_memory",
        "bytes",
        "minimize",
        lambda measurement: _point(measurement.peak_bytes),
        per="probe",
        resolution_ratio=RESOLUTION_RATIO,
    )


@register("samples_per_s")
def samples_per_s() -> Objective:
    """Return the rate in rows of the original data set per second.

    Tokens per second reward long rows; this does not, so prefer it where ``max_length`` varies.
    """
    return Objective(
        "samples_per_s",
        "samples/s",
        "maximize",
        lambda measurement: measurement.samples_per_s,
        resolution_ratio=RESOLUTION_RATIO,
    )


@register("epoch_time")
def epoch_time() -> Objective:
    """Return the time that one pass over the data takes, in seconds."""
    return Objective(
        "epoch_time", "s", "minimize", _read_epoch_time_s, resolution_ratio=RESOLUTION_RATIO
    )


@register("host_memory")
def host_memory() -> Objective:
    """Return the whole run's peak resident size of the process on the host, in bytes."""
    return Objective(
        "host_memory",
        "bytes",
        "minimize",
        _read_host_bytes,
        per="probe",
        resolution_ratio=RESOLUTION_RATIO,
    )


def memory_budget(budget_bytes: int | None = None) -> Constraint:
    """Return the limit on peak memory, in bytes.

    Args:
        budget_bytes: The limit; None for the search's own budget (the fact ``budget_bytes``).
    """

    def read(measurement: Measurement, facts: Mapping[str, Any]) -> float:
        limit = _fact(facts, "budget_bytes") if budget_bytes is None else budget_bytes
        return measurement.peak_bytes / limit - 1.0

    return Constraint("memory_budget", read)


def memory_headroom(at_least: float = 0.1) -> Constraint:
    """Return the limit that leaves a share of the device's memory unused at the peak.

    Args:
        at_least: Share (0 to 1) of the device's total memory that must stay free.

    Raises:
        UsageError: If the share is not from 0 to below 1.
    """
    if not 0.0 <= at_least < 1.0:
        raise UsageError(f"memory headroom must be from 0 to below 1, not {at_least}.")

    def read(measurement: Measurement, facts: Mapping[str, Any]) -> float:
        limit = _fact(facts, "device_total_bytes") * (1.0 - at_least)
        return measurement.peak_bytes / limit - 1.0

    return Constraint("memory_headroom", read)


def coverage(at_least: float) -> Constraint:
    """Return the limit on the tokens with loss that a candidate may leave untrained.

    Args:
        at_least: Least share (0 to 1) of the data's loss tokens to train on.

    Raises:
        UsageError: If the share is not from 0 to 1.
    """
    if not 0.0 <= at_least <= 1.0:
        raise UsageError(f"coverage must be from 0 to 1, not {at_least}.")

    def read(measurement: Measurement, facts: Mapping[str, Any]) -> float:
        return at_least - _fact(facts, "coverage")

    return Constraint("coverage", read)


def violations(
    constraints: Iterable[Constraint], measurement: Measurement, facts: Mapping[str, Any]
) -> dict[str, float]:
    """Return every constraint's violation by name; positive is over its limit."""
    return {item.name: item.read(measurement, facts) for item in constraints}


def _fact(facts: Mapping[str, Any], name: str) -> float:
    value = facts.get(name)
    if value is None:
        raise UsageError(f"a constraint needs {name!r}, which is not known for this search.")
    return float(value)


def _point(value: float) -> Interval:
    return Interval(median=value, low=value, high=value)


def _read_host_bytes(measurement: Measurement) -> Interval:
    value = measurement.peak_of("resident_bytes")
    if value is None:
        raise ValueError("no resident size was measured")
    return _point(value)


def _read_epoch_time_s(measurement: Measurement) -> Interval:
    num_samples = measurement.samples_per_epoch
    if num_samples is None:
        raise ValueError("the number of rows per epoch is not known")
    rate = measurement.samples_per_s
    return Interval(
        median=num_samples / rate.median, low=num_samples / rate.high, high=num_samples / rate.low
    )
