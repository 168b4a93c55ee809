"""Of what a rule names as a remedy, that which leads to something that can be drawn here.

A rule sees one knob. Whether a smaller dtype, 4-bit weights or a larger budget help depends on the
other rules, the pins and the card, so that each is tried before it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from autotune.errors import SpaceError
from autotune.space.context import Context
from autotune.space.domains import Value
from autotune.space.knob import Knob, Refusal, Remedy, registry
from autotune.space.plan import Plan, in_order

Tries: TypeAlias = Callable[[Mapping[str, Value], Mapping[str, Any], Collection[str]], bool]
"""Whether something can be drawn with other pins, other fields of the context, pins dropped."""


def make_plan(knobs: Sequence[Knob], context: Context, pins: Mapping[str, Value]) -> Plan:
    """Return what may be drawn of ``knobs``, with those added that pins or rules ask for.

    Args:
        knobs: Those of the search space.
        context: What is known before anything is drawn.
        pins: Knobs to fix, with their values.

    Raises:
        SpaceError: If a knob has no values for this model and data.
    """
    named = {knob.name for knob in knobs}
    trainer = context.trainer
    offered = {name: knob.of(trainer) for name, knob in registry if knob.is_for(trainer)}
    implied = frozenset(
        name
        for name, knob in offered.items()
        if knob.always and {name}.isdisjoint({*named, *pins})
    )
    added = [knob for name, knob in offered.items() if name in {*pins, *implied} - named]
    ordered = in_order((*knobs, *added))
    values = {
        knob.name: (pins[knob.name],) if knob.name in pins else knob.values(context)
        for knob in ordered
    }
    for name, offers in values.items():
        if not offers:
            raise SpaceError(f"the knob {name!r} has no values for this model and data.")
    return Plan(ordered, values, context, pins=pins, implied=implied)


def is_possible(knobs: Sequence[Knob], context: Context, pins: Mapping[str, Value]) -> bool:
    """Return whether something can be drawn in ``context`` in which every pin takes effect."""
    offered = {name for name, knob in registry if knob.is_for(context.trainer)}
    if not {*pins} <= offered | {knob.name for knob in knobs}:
        return False
    try:
        plan = make_plan(knobs, context, pins)
    except SpaceError:
        return False
    return bool(plan.size) and all(
        knob.ignored_when_inactive or pins[knob.name] == knob.baseline
        for knob, _ in never_active(plan, pins)
    )


def never_active(plan: Plan, pins: Mapping[str, Value]) -> Iterator[tuple[Knob, str]]:
    """Yield the pinned knobs that apply to no candidate, each with the first reason."""
    for index, knob in enumerate(plan.knobs):
        reasons = [step.inactive for step in plan.steps[index].values()]
        if knob.name in pins and reasons and all(reason is not None for reason in reasons):
            yield knob, str(reasons[0])


def hint_of(reasons: Iterable[str], tries: Tries, otherwise: str = "") -> str:
    """Return what helps against ``reasons``, as a sentence; ``otherwise`` if they name nothing.

    Args:
        reasons: Why values cannot be drawn; refusals bring remedies with them.
        tries: Says whether a remedy leads anywhere.
        otherwise: What is said where no reason has a remedy.
    """
    named = [item for reason in reasons if isinstance(reason, Refusal) for item in reason.remedies]
    kept: list[Remedy] = []
    for remedy in named:
        known = any(remedy.kind and remedy.kind == item.kind for item in kept)
        if not known and remedy not in kept and tries(remedy.pins, remedy.context, ()):
            kept.append(remedy)
    if any(item.changes == "setting" for item in kept):
        kept = [item for item in kept if item.changes != "device"]
    if not kept:
        return otherwise
    text = ", or ".join(item.text for item in kept)
    return f"{text[:1].upper()}{text[1:]}."
