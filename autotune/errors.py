"""The exceptions a search can end with, each with its exit code and a hint.

A candidate's failure is never an exception: it is an :class:`autotune.Outcome`. What is raised
here means that the *search* cannot go on as asked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, Self, TypeVar

NUM_CLOSE = 3
MAX_LISTED = 20
"""More known names than this are not listed in an error."""


_ARGUMENTS = {
    "accelerate-config": "accelerate_config",
    "dataset-config": "dataset_config",
    "device": "device",
    "global-batch": "global_batch",
    "learn-anyway": "learn_anyway=True",
    "learn-from": "learn_from",
    "measured-steps": "measured_steps",
    "memory-budget": "memory_budget_bytes",
    "objective": "objectives",
    "min-coverage": "min_coverage",
    "phases": "phases",
    "pin": "pins",
    "min-gain": "Budget(min_gain=...)",
    "price": "prices",
    "prices": "prices",
    "probe-timeout": "probe_timeout_s",
    "processes": "processes",
    "resume": "resume=True",
    "revision": "revision",
    "reward": "SearchSpace.with_reward(...)",
    "run-dir": "run_dir",
    "sampler": "sampler",
    "screen": "screen=True",
    "seed": "seed",
    "space": "space",
    "split": "split",
    "study": "study",
    "time-budget": "Budget(wall_time_s=...)",
    "trainer": "trainer",
    "trials": "Budget(trials=...)",
    "trust-remote-code": "trust_remote_code=True",
    "weights": "weights",
}
"""What the options of ``autotune search`` are called from Python."""

# Whole commands, between backticks, are typed in a shell from wherever they are read.
_OPTION = re.compile(
    r"`[^`]*`|--pin (?P<knob>\w+)=(?P<setting>[\w.-]*\w)"
    r"|--pin (?P<named>\w+)(?=:)"
    r"|--(?P<option>(?=device |weights )\w+) '?(?P<value>cpu|cuda|random|real"
    r"|(?<=')virtual:[^']+(?=')|virtual:[\w.-]*\w)\b'?"
    r"|--(?P<bare>[a-z-]*[a-z])"
)


E = TypeVar("E", bound="AutotuneError")


class AutotuneError(Exception):
    """Base of all errors of this package.

    Args:
        message: What happened.
        hint: What to do next; empty if there is nothing to add.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own __reduce__ drops keyword arguments; errors cross process borders.
        return _rebuild, (type(self), self.message, self.hint)

    def at(self, place: str) -> Self:
        """Return the same error with the place that it is about before its message."""
        return _rebuild(type(self), f"{place}: {self.message}", self.hint)

    @property
    def python_message(self) -> str:
        """Return the message with the arguments of :class:`autotune.Tuner` in place of options."""
        return _OPTION.sub(_as_argument, self.message)

    @property
    def python_hint(self) -> str:
        """Return the hint with the arguments of :class:`autotune.Tuner` in place of options."""
        return _OPTION.sub(_as_argument, self.hint)

    def __str__(self) -> str:
        """Return the message and, after it, the hint, as a script's traceback shows them."""
        return f"{self.python_message} {self.python_hint}".strip()


def _as_argument(match: re.Match[str]) -> str:
    """Return the Python argument for an option that was found in a text."""
    option, value = match["option"] or match["bare"], match["value"]
    if match["knob"]:
        return f'pins={{"{match["knob"]}": "{match["setting"]}"}}'
    if match["named"]:
        return f'pins["{match["named"]}"]'
    if option not in _ARGUMENTS:
        return match[0]
    argument = _ARGUMENTS[option]
    if value is None:
        return argument
    given = f'{argument}="{value}"'
    if option == "device" and not value.startswith("virtual:"):
        # The tuner's own device does not count where it is given an executor.
        given += f' (with an executor of your own, its devices=("{value}",))'
    return given


def _rebuild(cls: type[E], message: str, hint: str) -> E:
    error = cls.__new__(cls)
    AutotuneError.__init__(error, message, hint=hint)
    return error


class UsageError(AutotuneError, ValueError):
    """The request itself is wrong."""

    exit_code: ClassVar[int] = 2


class SpaceError(UsageError):
    """A search space, a pin or a knob's domain is wrong."""


class TooSmallError(UsageError):
    """The memory that there is does not even hold the weights, so that no search is needed."""


class UnknownNameError(UsageError):
    """A name is not known; the message lists the nearest known ones.

    Args:
        kind: What the name should have been, such as ``"knob"``.
        name: The unknown name.
        known: All names that would have been accepted.
        where: Where the name was read, such as ``"my.yaml, line 7"``.
        listing: Sentence that says where all of them are listed; empty if nowhere.
        hint: What to do, where near names would be of no help, as among numbers.
        num_known: How many things the names stand for, where some have several.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        *,
        where: str = "",
        listing: str = "",
        hint: str = "",
        num_known: int | None = None,
    ) -> None:
        names = sorted(set(known))
        place = f"{where}: " if where else ""
        if not hint:
            hint = _nearest(name, names, len(names) if num_known is None else num_known)
            hint = f"{hint} {listing}".rstrip() if len(names) > MAX_LISTED else hint
        super().__init__(f"{place}unknown {kind} {name!r}.", hint=hint)


def _nearest(name: str, names: Sequence[str], num_known: int) -> str:
    close = difflib.get_close_matches(name, names, n=NUM_CLOSE, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(item) for item in close)}?"
    if len(names) <= MAX_LISTED:
        return f"Known: {', '.join(names)}." if names else "None is known."
    # Not close, but better than none: a list of hundreds hides what matters.
    near = difflib.get_close_matches(name, names, n=NUM_CLOSE, cutoff=0.0)
    return f"Nearest of {num_known} known: {', '.join(near)}."


class PrerequisiteError(AutotuneError):
    """A package, a device, access or disk space is missing."""

    exit_code: ClassVar[int] = 2


class StudyMismatchError(AutotuneError):
    """A run is resumed with another model, data set, space or schema."""

    exit_code: ClassVar[int] = 2


class NoFeasibleConfigError(AutotuneError):
    """Every probe reached a verdict and none fits."""

    exit_code: ClassVar[int] = 3


class ExecutorError(AutotuneError, RuntimeError):
    """A worker could not be started or reached."""


class BaselineError(AutotuneError):
    """The baseline is unsupported or crashes: the set-up is broken."""


class JournalError(AutotuneError):
    """A run folder's records cannot be read or written."""
