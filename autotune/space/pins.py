"""Turns a space, a context and the user's pins into a :class:`ResolvedSpace`, or says why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import SpaceError, UnknownNameError
from autotune.space.context import Context
from autotune.space.domains import Value
from autotune.space.fixed import shown
from autotune.space.knob import Knob, Refusal, registry
from autotune.space.plan import Plan, in_order, seen_by
from autotune.space.resolve import ResolvedSpace


def resolve(
    knobs: tuple[Knob, ...],
    context: Context,
    *,
    pins: Mapping[str, object],
    fixed: Mapping[str, Any],
) -> ResolvedSpace:
    """Return what can be drawn in ``context`` with ``pins``.

    Raises:
        UnknownNameError: If a pin names no knob.
        SpaceError: If a pin's value is impossible, pins contradict each other, or nothing is left
            to draw.
    """
    named = {knob.name: knob for knob in knobs}
    offered = {name: knob for name, knob in registry if knob.is_for(context.trainer)}
    parsed = parse_pins(knobs, context.trainer, pins)
    implied = frozenset(
        name
        for name, knob in offered.items()
        if knob.always and {name}.isdisjoint({*named, *pins})
    )
    added = [knob for name, knob in offered.items() if name in {*pins, *implied} - {*named}]
    ordered = in_order((*knobs, *added))
    values = {
        knob.name: (parsed[knob.name],) if knob.name in parsed else knob.values(context)
        for knob in ordered
    }
    for name, offers in values.items():
        if not offers:
            raise SpaceError(f"the knob {name!r} has no values for this model and data.")
    plan = Plan(ordered, values, context, pins=parsed, implied=implied)
    if not plan.size:
        raise _nothing_left(plan, context, parsed)
    notices = _check_pins(plan, context, parsed)
    inactive, removed = _describe(plan, values, parsed, implied)
    return ResolvedSpace(
        plan,
        context,
        pins=parsed,
        fixed=fixed,
        inactive=inactive,
        removed=removed,
        notices=notices,
    )


def parse_pins(
    knobs: tuple[Knob, ...], trainer: str, pins: Mapping[str, object]
) -> dict[str, Value]:
    """Return the values that pins stand for; needs no context.

    Raises:
        UnknownNameError: If a pin names no knob.
        SpaceError: If the knob can never take the value.
    """
    offered = {name: knob for name, knob in registry if knob.is_for(trainer)}
    by_name = {**offered, **{knob.name: knob for knob in knobs}}
    for name in pins:
        if name not in by_name:
            raise UnknownNameError("knob", name, by_name, where="--pin")
    return {name: by_name[name].parse(raw) for name, raw in pins.items()}


def _check_pins(plan: Plan, context: Context, pins: Mapping[str, Value]) -> tuple[str, ...]:
    """Return notices on pins without effect; raise for those that never apply."""
    notices = []
    for index, knob in enumerate(plan.knobs):
        if knob.name not in pins:
            continue
        value, steps = pins[knob.name], plan.steps[index]
        reasons = [step.inactive for step in steps.values()]
        if all(reason is not None for reason in reasons):
            # A neutral knob that does not apply is as if at its baseline; a rank or a length is
            # not, so that asking for one beside the pin that takes it away is a slip.
            neutral = knob.changes == "nothing" or not _blame(knob, value, pins, plan, context)
            if value == knob.baseline and neutral:
                continue
            if not knob.ignored_when_inactive:
                raise _contradiction(knob, value, str(reasons[0]), pins, plan, context)
            notices.append(f"{shown(knob.name, value)} has no effect here: {reasons[0]}.")
        elif knob.no_effect is not None:
            for state in steps:
                reason = knob.no_effect(value, seen_by(knob, dict(state)), context)
                if reason is not None:
                    notices.append(f"{shown(knob.name, value)}: {reason}.")
                    break
    return tuple(notices)


def _contradiction(
    knob: Knob,
    value: Value,
    reason: str,
    pins: Mapping[str, Value],
    plan: Plan,
    context: Context,
) -> SpaceError:
    others = _blame(knob, value, pins, plan, context)
    if not others:
        return SpaceError(
            f"the pin {shown(knob.name, value)} is not possible here: {reason}.",
            hint=_hint(reason),
        )
    texts = " and ".join(shown(name, pins[name]) for name in others)
    return SpaceError(
        f"the pins {shown(knob.name, value)} and {texts} contradict each other: {reason}.",
        hint=f"Drop one of them. {_hint(reason)}".rstrip(),
    )


def _hint(reason: str, otherwise: str = "") -> str:
    """Return the remedy that a rule gave with its reason; ``otherwise`` if it gave none."""
    return reason.hint if isinstance(reason, Refusal) else otherwise


def _blame(
    knob: Knob, value: Value, pins: Mapping[str, Value], plan: Plan, context: Context
) -> list[str]:
    """Return the other pins without which ``value`` might be possible."""
    pinned = [name for name in knob.depends_on if name in pins]
    seen = {name: pins[name] for name in pinned}
    by_name = {other.name: other for other in plan.knobs}
    return [
        name
        for name in pinned
        if any(
            _why_not(knob, value, {**seen, name: other}, context) is None
            for other in by_name[name].values(context)
        )
    ]


def _why_not(knob: Knob, value: Value, seen: Mapping[str, Value], context: Context) -> str | None:
    reason = knob.active_if(seen, context) if knob.active_if else None
    if reason is None and knob.refuse is not None:
        reason = knob.refuse(value, seen, context)
    return reason


def _nothing_left(plan: Plan, context: Context, pins: Mapping[str, Value]) -> SpaceError:
    """Return the error for a space without any candidate: at the knob that has no value."""
    # The last one is where every way ends: nothing comes after it.
    for steps, knob in reversed(list(zip(plan.tried, plan.knobs, strict=True))):
        dead = [step for step in steps.values() if step.inactive is None and not step.legal]
        if not dead:
            continue
        value, reason = dead[0].refused[0]
        if knob.name in pins:
            return _contradiction(knob, value, reason, pins, plan, context)
        reasons = "; ".join(f"{value}: {reason}" for value, reason in dead[0].refused[:6])
        depends = [shown(name, pins[name]) for name in knob.depends_on if name in pins]
        given = f" with {' and '.join(depends)}" if depends else ""
        return SpaceError(
            f"no value of the knob {knob.name!r} is possible here{given}: {reasons}.",
            hint=_hint(reason, "Give it other values in the search space."),
        )
    raise AssertionError("a plan without candidates has a knob without values")


def _describe(
    plan: Plan,
    values: Mapping[str, tuple[Value, ...]],
    pins: Mapping[str, Value],
    implied: frozenset[str],
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, Value, str], ...]]:
    """Return the knobs that cannot vary, and the values that cannot be drawn, with reasons."""
    inactive: list[tuple[str, str]] = []
    removed: list[tuple[str, Value, str]] = []
    for index, knob in enumerate(plan.knobs):
        steps = list(plan.steps[index].values())
        if all(step.inactive is not None for step in steps):
            inactive.append((knob.name, str(steps[0].inactive)))
            continue
        if knob.name in implied:
            continue
        left = plan.union(index)
        reasons: dict[Value, str] = {}
        for step in steps:
            for value, reason in step.refused:
                reasons.setdefault(value, reason)
        removed += [(knob.name, v, reasons[v]) for v in values[knob.name] if v not in left]
        if len(left) == 1 and len(values[knob.name]) > 1 and knob.name not in pins:
            inactive.append((knob.name, f"{left[0]} is the only value left here"))
    return tuple(inactive), tuple(removed)
