"""One knob: a setting that may vary, with everything the search must know about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from autotune.errors import SpaceError
from autotune.registry import Registry
from autotune.space.context import Context
from autotune.space.domains import Domain, Quantiles, Value
from autotune.space.trainers import has_keys

Candidate: TypeAlias = Mapping[str, Value]
Comparison: TypeAlias = Callable[[Value, Value, Candidate, Context], bool]
Change: TypeAlias = Literal["nothing", "tokens", "method"]

_CHANGES = ("nothing", "tokens", "method")
LEAST: Final = "least"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What a user may do where a rule leaves nothing to draw.

    It is named only if something can be drawn then; see :func:`autotune.space.remedies.hint_of`.

    Attributes:
        text: What to do: part of a sentence, such as ``choose a smaller dtype (dtype=bfloat16)``.
        pins: The pins that it comes to, in place of those that were given.
        context: The fields of the context that it changes, such as ``budget_bytes``.
        kind: Of several of one kind, the first that helps is named; empty for one of its own.
        changes: What it changes: a setting, the model or the device. One that takes another
            device is named only where no setting helps.
    """

    text: str
    pins: Mapping[str, Value] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""
    changes: Literal["setting", "model", "device"] = "setting"


class Refusal(str):
    """A rule's reason that also knows remedies, for the error where it leaves nothing to draw."""

    remedies: tuple[Remedy, ...]

    def __new__(cls, reason: str, *, remedies: Sequence[Remedy]) -> Refusal:
        """Return ``reason`` with what may help, the best first."""
        made = super().__new__(cls, reason)
        made.remedies = tuple(remedies)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How faithful a knob's values are to training all weights, exactly, on the data as it is.

    Attributes:
        order: Values from the most faithful on; those in a tuple of their own are as faithful as
            each other. A value that is not named comes after all that are.
        weight: Which knob decides first where candidates differ in several: the one of the
            greatest weight, of equal ones the first that was registered.
    """

    order: tuple[Value | tuple[Value, ...], ...]
    weight: int = 0

    def rank(self, value: Value) -> int:
        """Return the place of a value in the order; 0 is the most faithful."""
        for place, item in enumerate(self.order):
            if value in (item if isinstance(item, tuple) else (item,)):
                return place
        return len(self.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting that may vary: its values, when it applies, what it writes.

    The rules (``active_if``, ``refuse``, ``no_effect``) see a candidate that holds only the knobs
    named in ``depends_on``, and of those only the ones that are in the space and active. A rule
    must therefore read with a default: TRL's own.

    Attributes:
        name: Name in YAML files, pins and reports.
        baseline: The value that changes nothing; TRL's default.
        defaults: Trainers in which TRL's default is another, each with its own.
        changes: What differs in what is learnt: ``nothing``, ``tokens`` or ``method``; one for
            all values, or one per value (those not named are ``method``).
        help: One or two sentences for a person who decides whether to vary it.
        domain: Values that are searched; None to derive them with ``default_values``.
        accepts: Values that a user may ask for; ``domain`` if None.
        keys: TRL keys that belong to the knob, dotted for nested ones: those it writes, and those
            that would silently override it. A space may not fix them. ``(name,)`` if empty.
        needed_keys: TRL keys that a trainer's configuration must have for the knob to exist there.
        trainers: Trainers that it is for, where others have the keys with another meaning; empty
            for all that have them.
        depends_on: Knobs that its rules look at; they are drawn first.
        always: Whether it is part of every space, at its baseline where the space is silent.
        default_values: Values derived from the context, given the quantiles asked for.
        write: TRL keys for a value; ``{name: value}`` if None.
        active_if: Reason why the knob does not apply; None if it applies.
        refuse: Reason why a value would fail or mislead; None if it is legal.
        no_effect: Reason why a value is accepted and ignored. It is not searched; a user who
            pins it is told.
        effective: The value that has the same effect; equal effective values are one candidate.
        trains_as: What the value means for what is trained; called with None where the knob is
            inactive. ``effective`` if None.
        memory_at_least: Whether the first value needs at least as much device memory as the
            second, all else equal; None if that is never certain. Gets the candidate with the
            first value.
        loads_at_least: Whether a candidate with the first value needs at least the device memory
            that loading takes with the second: all before the first step, which is the weights
            above all. Either is None where the knob is inactive. Gets the candidate with the
            first value. None if that is certain of equal values alone.
        needs: Requirements per value, such as ``flash-attn>=2.3.3``: what must be installed where
            it is run. Rules read them for this machine, exported files name them for another.
        leanest: Values from the one that needs least device memory on, for a candidate that is to
            fit if anything does; ``LEAST`` for the smallest number. Empty to keep to the baseline.
        fidelity: Which values the pick ``highest-fidelity`` prefers; None if it is all the same to
            what is learnt, or nobody can say.
        ignored_when_inactive: Whether a pin on an inactive knob is harmless rather than refused.
        pin_needs_active: Whether a pin rules out whatever makes the knob inactive.
    """

    name: str
    baseline: Value
    changes: Change | Mapping[Value, Change]
    help: str
    defaults: Mapping[str, Value] = field(default_factory=dict)
    domain: Domain | None = None
    accepts: Domain | None = None
    keys: tuple[str, ...] = ()
    needed_keys: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    depends_on: tuple[str, ...] = ()
    always: bool = False
    default_values: Callable[[Context, Quantiles | None], tuple[Value, ...]] | None = None
    write: Callable[[Value, Candidate, Context], dict[str, Any]] | None = None
    active_if: Callable[[Candidate, Context], str | None] | None = None
    refuse: Callable[[Value, Candidate, Context], str | None] | None = None
    no_effect: Callable[[Value, Candidate, Context], str | None] | None = None
    effective: Callable[[Value, Candidate, Context], Value] | None = None
    trains_as: Callable[[Value, Candidate, Context], Value] | None = None
    memory_at_least: Comparison | None = None
    loads_at_least: Comparison | None = None
    needs: Mapping[Value, tuple[str, ...]] = field(default_factory=dict)
    leanest: tuple[Value, ...] | Literal["least"] = ()
    fidelity: Fidelity | None = None
    ignored_when_inactive: bool = False
    pin_needs_active: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", self.name):
            raise SpaceError(f"{self.name!r} is not a name for a knob; write it like lora_r.")
        changes = [self.changes] if isinstance(self.changes, str) else list(self.changes.values())
        for change in changes:
            if change not in _CHANGES:
                raise SpaceError(
                    f"the knob {self.name!r} must change one of {', '.join(_CHANGES)},"
                    f" not {change!r}."
                )
        if self.domain is None and self.default_values is None:
            raise SpaceError(f"the knob {self.name!r} needs a domain or default_values.")
        if self.domain is None and self.accepts is None:
            raise SpaceError(f"the knob {self.name!r} derives its values, so it needs accepts.")
        if self.domain is not None and self.accepts is not None:
            self.check_domain(self.domain)
        if isinstance(self.domain, Quantiles) and self.default_values is None:
            raise SpaceError(f"the knob {self.name!r} has no quantiles.")
        if self.accepts is None:
            # Kept when a space narrows the domain: a pin may still name any of these.
            object.__setattr__(self, "accepts", self.domain)
        if not self.keys:
            object.__setattr__(self, "keys", (self.name,))

    def is_for(self, trainer: str) -> bool:
        """Whether the trainer's configuration has what the knob writes."""
        meant = not self.trainers or trainer in self.trainers
        return meant and has_keys(trainer, self.needed_keys)

    def of(self, trainer: str) -> Knob:
        """Return the knob with the trainer's own default as its baseline."""
        default = self.defaults.get(trainer, self.baseline)
        return self if default == self.baseline else replace(self, baseline=default)

    @property
    def accepted(self) -> Domain:
        """Return all values that a user may ask for."""
        assert self.accepts is not None  # set in __post_init__
        return self.accepts

    @property
    def ordered(self) -> bool:
        """Whether a larger value means more of the same thing."""
        return self.accepted.ordered

    def check_domain(self, domain: Domain) -> None:
        """Check that every value of ``domain`` is one that the knob can take.

        Raises:
            SpaceError: If one is not, or if the knob has no quantiles.
        """
        if isinstance(domain, Quantiles):
            if self.default_values is None:
                raise SpaceError(f"the knob {self.name!r} has no quantiles.")
            return
        for value in domain.values:
            self.parse(value)

    def parse(self, raw: object) -> Value:
        """Return the value that ``raw``, from YAML or a command line, stands for.

        Raises:
            SpaceError: If the knob cannot take it; the message names what it can take.
        """
        try:
            return self.accepted.coerce(raw)
        except SpaceError as error:
            message = f"the knob {self.name!r} cannot be {raw!r}: {error.message}"
            raise SpaceError(message, hint=error.hint) from None

    def values(self, context: Context) -> tuple[Value, ...]:
        """Return the values that are searched, before any rule is applied."""
        if self.domain is not None and not isinstance(self.domain, Quantiles):
            values = self.domain.values
        else:
            assert self.default_values is not None  # checked in __post_init__
            values = self.default_values(context, self.domain)
        numbers = [v for v in values if isinstance(v, int | float)]
        return tuple(sorted(numbers)) if self.ordered else values

    def change(self, value: Value) -> Change:
        """Return what differs in what is learnt when the knob takes ``value``."""
        if isinstance(self.changes, str):
            return self.changes
        return self.changes.get(value, "method")

    def written(self, value: Value, candidate: Candidate, context: Context) -> dict[str, Any]:
        """Return the TRL keys for ``value``."""
        if self.write is None:
            return {self.name: value}
        return self.write(value, candidate, context)

    def lean(self, legal: Sequence[Value]) -> Value:
        """Return the value of ``legal`` that needs least device memory, as far as it is known."""
        numbers = [value for value in legal if isinstance(value, int | float)]
        if self.leanest == LEAST and numbers:
            return min(numbers)
        wanted = (*self.leanest, self.baseline) if isinstance(self.leanest, tuple) else ()
        return next((value for value in wanted if value in legal), nearest(self, legal))

    def effect(self, value: Value, candidate: Candidate, context: Context) -> Value:
        """Return the value that has the same effect as ``value``."""
        return self.effective(value, candidate, context) if self.effective else value

    def meaning(self, candidate: Candidate, context: Context) -> Value:
        """Return what the candidate's value means for what is trained."""
        value = candidate.get(self.name)
        if self.trains_as is not None:
            return self.trains_as(value, candidate, context)
        return self.effect(value, candidate, context) if self.name in candidate else None


def needed_by(candidate: Candidate) -> list[str]:
    """Return what must be installed to run a candidate, in words, with the value that asks."""
    found = []
    for name, value in candidate.items():
        # A record may hold knobs of a package that is not installed here.
        needs = registry.get(name).needs.get(value, ()) if name in registry.names() else ()
        if needs:
            plural = "s" if len(needs) > 1 else ""
            found.append(f"the package{plural} {' and '.join(needs)}, for {name}={value}")
    return found


def infidelity(candidate: Candidate) -> tuple[int, ...]:
    """Return how far a candidate is from the most faithful one, knob by knob; less is better.

    Knobs that it does not hold are at their baseline. Compare it with that of other candidates
    only.
    """
    knobs = [(knob, knob.fidelity) for _, knob in registry if knob.fidelity is not None]
    knobs.sort(key=lambda pair: -pair[1].weight)
    return tuple(
        fidelity.rank(candidate.get(knob.name, knob.baseline)) for knob, fidelity in knobs
    )


def at_least(larger: Value, smaller: Value, candidate: Candidate, context: Context) -> bool:
    """Compare numbers: for knobs where more of the value never needs less memory."""
    if not isinstance(larger, int | float) or not isinstance(smaller, int | float):
        return False
    return larger >= smaller


def loads_alike(larger: Value, smaller: Value, candidate: Candidate, context: Context) -> bool:
    """Tell that no value matters before the first step."""
    return True


def nearest(knob: Knob, legal: Sequence[Value]) -> Value:
    """Return the baseline or what comes nearest: the next smaller, else the smallest or first."""
    wanted = knob.baseline
    if wanted in legal:
        return wanted
    if knob.ordered and isinstance(wanted, int | float):
        smaller = [v for v in legal if isinstance(v, int | float) and v <= wanted]
        return max(smaller) if smaller else legal[0]
    return legal[0]


registry: Registry[Knob] = Registry(
    "knob",
    group="autotune.knobs",
    builtin=(
        "autotune.space.knobs.kernels",
        "autotune.space.knobs.batching",
        "autotune.space.knobs.precision",
        "autotune.space.knobs.memory",
        "autotune.space.knobs.preference",
        "autotune.space.knobs.online",
        "autotune.space.knobs.vllm",
        "autotune.space.knobs.sharding",
    ),
)


def add(knob: Knob) -> Knob:
    """Register ``knob`` under its own name and return it."""
    registry.register(knob.name, knob)
    return knob


def not_for(knob: Knob, trainer: str) -> str:
    """Return why ``knob`` can't be searched on ``trainer``, without a full stop."""
    keys = " and ".join(repr(key) for key in knob.needed_keys)
    if knob.trainers:
        return f"the knob {knob.name!r} is for {' and '.join(knob.trainers)}, not for {trainer!r}"
    return (
        f"the knob {knob.name!r} is not for the trainer {trainer!r}, whose configuration has no"
        f" {keys}"
    )
