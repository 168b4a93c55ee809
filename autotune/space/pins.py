"""Turns a space, a context and the user's pins into a :class:`ResolvedSpace`, or says why not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.errors import SpaceError, UnknownNameError
from autotune.space.context import Context
from autotune.space.domains import Value
from autotune.space.fixed import shown
from autotune.space.knob import Knob, registry
from autotune.space.plan import Plan, seen_by
from autotune.space.remedies import Tries, hint_of, is_possible, make_plan, never_active
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
    parsed = parse_pins(knobs, context.trainer, pins)
    plan = make_plan(knobs, context, parsed)
    tries = _tries(knobs, context, parsed)
    if not plan.size:
        raise _nothing_left(plan, context, parsed, tries)
    notices = _check_pins(plan, context, parsed, tries)
    inactive, removed = _describe(plan, parsed)
    return ResolvedSpace(
        plan,
        context,
        pins=parsed,
        fixed=fixed,
        inactive=inactive,
        removed=removed,
        notices=notices,
    )


def _tries(knobs: Sequence[Knob], context: Context, pins: Mapping[str, Value]) -> Tries:
    """Return what tells whether something can be drawn with other pins or facts."""

    def tries(
        other: Mapping[str, Value], changes: Mapping[str, Any], dropped: Collection[str]
    ) -> bool:
        kept = {name: value for name, value in pins.items() if name not in dropped}
        return is_possible(knobs, replace(context, **changes), {**kept, **other})

    return tries


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


def _check_pins(
    plan: Plan, context: Context, pins: Mapping[str, Value], tries: Tries
) -> tuple[str, ...]:
    """Return notices on pins without effect; raise for those that never apply."""
    notices = []
    unused = {knob.name: reason for knob, reason in never_active(plan, pins)}
    for index, knob in enumerate(plan.knobs):
        if knob.name not in pins:
            continue
        value, steps = pins[knob.name], plan.steps[index]
        if knob.name in unused:
            # A neutral knob that does not apply is as if at its baseline; a rank or a length is
            # not, so that asking for one beside the pin that takes it away is a slip.
            neutral = knob.changes == "nothing" or not _blame(knob, value, pins, plan, context)
            if value == knob.baseline and neutral:
                continue
            reason = unused[knob.name]
            if not knob.ignored_when_inactive:
                raise _contradiction(knob, value, reason, pins, plan, context, tries)
            notices.append(f"{shown(knob.name, value)} has no effect here: {reason}.")
        elif knob.no_effect is not None:
            for state in steps:
                reason_or_none = knob.no_effect(value, seen_by(knob, dict(state)), context)
                if reason_or_none is not None:
                    notices.append(f"{shown(knob.name, value)}: {reason_or_none}.")
                    break
    return tuple(notices)


def _contradiction(
    knob: Knob,
    value: Value,
    reason: str,
    pins: Mapping[str, Value],
    plan: Plan,
    context: Context,
    tries: Tries,
) -> SpaceError:
    others = _blame(knob, value, pins, plan, context)
    if not others:
        return SpaceError(
            f"the pin {shown(knob.name, value)} is not possible here: {reason}.",
            hint=hint_of([reason], tries, _what_to_drop([knob.name], pins, tries)),
        )
    texts = " and ".join(shown(name, pins[name]) for name in others)
    drop = _what_to_drop([knob.name, *others], pins, tries)
    return SpaceError(
        f"the pins {shown(knob.name, value)} and {texts} contradict each other: {reason}.",
        hint=f"{drop} {hint_of([reason], tries)}".strip(),
    )


def _what_to_drop(names: Sequence[str], pins: Mapping[str, Value], tries: Tries) -> str:
    """Return which of the pins to drop, so that something is left; empty if none helps."""
    found = [name for name in names if tries({}, {}, (name,))]
    if 1 < len(found) == len(names):
        return "Drop one of them."
    return f"Drop {' or '.join(shown(name, pins[name]) for name in found)}." if found else ""


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


def _nothing_left(
    plan: Plan, context: Context, pins: Mapping[str, Value], tries: Tries
) -> SpaceError:
    """Return the error for a space without any candidate: at the knob that has no value."""
    # The last one is where every way ends: nothing comes after it.
    for steps, knob in reversed(list(zip(plan.tried, plan.knobs, strict=True))):
        dead = [step for step in steps.values() if step.inactive is None and not step.legal]
        if not dead:
            continue
        value, reason = dead[0].refused[0]
        if knob.name in pins:
            return _contradiction(knob, value, reason, pins, plan, context, tries)
        reasons = "; ".join(f"{value}: {reason}" for value, reason in dead[0].refused[:6])
        depends = [shown(name, pins[name]) for name in knob.depends_on if name in pins]
        given = f" with {' and '.join(depends)}" if depends else ""
        return SpaceError(
            f"no value of the knob {knob.name!r} is possible here{given}: {reasons}.",
            hint=hint_of(
                [reason for step in dead for _, reason in step.refused],
                tries,
                "Give it other values in the search space.",
            ),
        )
    raise AssertionError("a plan without candidates has a knob without values")


def _describe(
    plan: Plan, pins: Mapping[str, Value]
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, Value, str], ...]]:
    """Return the knobs that cannot vary, and the values that cannot be drawn, with reasons."""
    inactive: list[tuple[str, str]] = []
    removed: list[tuple[str, Value, str]] = []
    for index, knob in enumerate(plan.knobs):
        steps = list(plan.steps[index].values())
        if all(step.inactive is not None for step in steps):
            inactive.append((knob.name, str(steps[0].inactive)))
            continue
        if knob.name in plan.implied:
            continue
        left = plan.union(index)
        reasons: dict[Value, str] = {}
        for step in steps:
            for value, reason in step.refused:
                reasons.setdefault(value, reason)
        removed += [(knob.name, v, reasons[v]) for v in plan.values[knob.name] if v not in left]
        if len(left) == 1 and len(plan.values[knob.name]) > 1 and knob.name not in pins:
            inactive.append((knob.name, f"{left[0]} is the only value left here"))
    return tuple(inactive), tuple(removed)
