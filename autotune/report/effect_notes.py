"""What is odd about a setting's effect, in a sentence: above all a saving that saves nothing."""

from __future__ import annotations

from autotune.probe import trl_yaml
from autotune.probe.result import Interval
from autotune.report.effects import Effect, value_text
from autotune.space.knob import LEAST, registry
from autotune.units import counted


def note(effect: Effect) -> str:
    """Return what is odd about an effect, in a whole sentence; empty if nothing is.

    A setting that is meant to save memory and did not, one that costs both memory and rate, and
    one that gains both are worth knowing; what trades one for the other is what was asked for.
    """
    turned = effect if _saves(effect) is not False else _turned(effect)
    name = trl_yaml.settings({turned.knob: turned.after})
    against = f"instead of {value_text(turned.knob, turned.before)}"
    aside = f"({counted(len(effect.pairs), 'pair')}, all else equal)"
    slower = not turned.rate_is_noise and turned.rate.median < 1
    faster = not turned.rate_is_noise and turned.rate.median > 1
    fatter = not turned.memory_is_noise and turned.memory.median > 1
    leaner = not turned.memory_is_noise and turned.memory.median < 1
    cost = f"cost {_share(turned.rate)} of the rate"
    if _saves(turned) and fatter:
        also = f" and {cost}" if slower else ""
        return (
            f"{name} {against} should need less memory, but needed {_share(turned.memory)} more"
            f" here{also} {aside}."
        )
    if _saves(turned) and turned.memory_is_noise and slower:
        return (
            f"{name} {against} saved no memory here that can be told from noise, and {cost}"
            f" {aside}."
        )
    if (fatter and slower) or (leaner and faster):
        gain = _both(turned if leaner else _turned(turned))
        better, worse = (turned.after, turned.before) if leaner else (turned.before, turned.after)
        other = f" It is another training ({', '.join(effect.changes)})." if effect.changes else ""
        return (
            f"{trl_yaml.settings({turned.knob: better})} was better than"
            f" {value_text(turned.knob, worse)} in both: {gain} {aside}.{other}"
        )
    return ""


def _both(effect: Effect) -> str:
    return f"{_share(effect.memory)} less memory and {_share(effect.rate)} more rate"


def _share(ratio: Interval) -> str:
    """Return how far a ratio is from 1, in per cent."""
    off = abs(ratio.median - 1.0)
    return f"{off:.1%}" if off < 0.1 else f"{off:.0%}"


def _saves(effect: Effect) -> bool | None:
    """Whether ``after`` is the value that is meant to need less memory; None if neither is."""
    if effect.knob not in registry.names():
        return None
    knob = registry.get(effect.knob)
    if knob.leanest == LEAST:
        numbers = [v for v in (effect.before, effect.after) if isinstance(v, int | float)]
        return numbers[1] < numbers[0] if len(numbers) > 1 else None
    order = list(knob.leanest)
    # A value that is not named there is none that a lean candidate would take.
    first, second = (
        order.index(value) if value in order else len(order)
        for value in (effect.before, effect.after)
    )
    return None if first == second else second < first


def _turned(effect: Effect) -> Effect:
    return Effect(
        knob=effect.knob,
        before=effect.after,
        after=effect.before,
        pairs=tuple((second, first) for first, second in effect.pairs),
        memory=_inverse(effect.memory),
        rate=_inverse(effect.rate),
        memory_is_noise=effect.memory_is_noise,
        rate_is_noise=effect.rate_is_noise,
        changes=effect.changes,
    )


def _inverse(ratio: Interval) -> Interval:
    return Interval(median=1 / ratio.median, low=1 / ratio.high, high=1 / ratio.low)
