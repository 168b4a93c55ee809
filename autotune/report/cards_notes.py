"""A comparison of cards in whole sentences: the answer, and what its figures do not tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from autotune.probe import prediction
from autotune.report.model import SIZE_LIMIT
from autotune.report.picks import FEW
from autotune.units import format_duration, format_gib, format_rate

if TYPE_CHECKING:
    from autotune.report.cards import CardComparison, CardResult

SAME = "the same training as the baseline"


def summary(comparison: CardComparison) -> tuple[str, ...]:
    """Return the answer: the cheapest or smallest card on which it fits, and the fastest."""
    if not comparison.fitting:
        return (_fits_on_none(comparison),)
    found = [*_by_price(comparison), *_smallest(comparison), *_fastest(comparison)]
    return (*found, *_full(comparison))


def notes(comparison: CardComparison) -> tuple[str, ...]:
    """Return what a reader of the figures should know beside them."""
    return (
        *_close(comparison),
        *_unlike(comparison),
        *_removed(comparison),
        *_unpriced(comparison),
        *_few_tried(comparison),
        *_versions(comparison),
        *_endings(comparison),
    )


def cost(value: float | None) -> str:
    """Return a cost in the currency of the prices, with about three digits; ``-`` if unknown."""
    return format_rate(value)


def _fits_on_none(comparison: CardComparison) -> str:
    if all(card.fits is False for card in comparison.cards):
        return "It fits on none of these cards."
    if any(card.is_broken for card in comparison.cards):
        return "It is not known to fit on any of these cards: see the errors below."
    return "It is not known yet if it fits on any of these cards."


def _by_price(comparison: CardComparison) -> list[str]:
    card, least = comparison.cheapest, comparison.lowest_priced
    pick = None if card is None else card.fastest
    found = []
    if card is not None and pick is not None:
        first = "Cheapest card on which it fits"
        priced = [item for item in comparison.fitting if item.price_per_hour is not None]
        if len(priced) == 1 < len(comparison.fitting):
            first = "The only card with a price on which it fits"
        elif len(priced) < len(comparison.fitting):
            first = f"Cheapest of the {len(priced)} cards with a price on which it fits"
        found.append(
            f"{first}: {_named(card)}, at a predicted"
            f" {cost(pick.cost_per_epoch)} per epoch of {format_duration(pick.epoch_s)}"
            f" ({_rated(card)}; {cost(card.price_per_hour)} per hour)."
        )
    if least is not None:
        same = ", the same card" if least is card else ""
        found.append(
            f"Lowest price per hour of those on which it fits: {least.name},"
            f" {cost(least.price_per_hour)}{same}."
        )
    return found


def _smallest(comparison: CardComparison) -> list[str]:
    card = comparison.smallest
    if card is None or all(item.price_per_hour is not None for item in comparison.fitting):
        return []
    smallest = f"Smallest card on which it fits: {_named(card)}, at {_rated(card)}."
    if comparison.cheapest is not None:
        return [smallest]  # what lacks a price is in the notes
    hint = "Which is the cheapest depends on prices, which you can give: "
    hint += " ".join(f"--price {item.name}=PER_HOUR" for item in comparison.fitting)
    return [smallest, f"{hint}."]


def _fastest(comparison: CardComparison) -> list[str]:
    card, others = comparison.fastest, comparison.fitting
    if card is None or len(others) == 1:
        return []
    against = comparison.cheapest or comparison.smallest
    ratio = ""
    if against is not None and against is not card and _rate(against):
        ratio = f", {_rate(card) / _rate(against):.2f} times the rate of {against.name}"
    same = ", the same card" if against is card else ""
    return [f"Fastest: {_named(card)}, at {_rated(card)}{ratio}{same}."]


def _full(comparison: CardComparison) -> list[str]:
    """Return on which card full fine-tuning fits, where it is not all of those that fit."""
    known = [card for card in comparison.fitting if card.full_fits]
    if not known or len(known) == len(comparison.fitting):
        return []
    by_price = comparison.cheapest is not None
    first = known[0]  # in the table's order
    word = "First card in the order of cost" if by_price else "Smallest card"
    pick = first.full
    rate = None if pick is None or pick.tokens_per_s is None else pick.tokens_per_s.median
    return [
        f"{word} on which full fine-tuning fits: {first.name}, at a predicted"
        f" {format_rate(rate)} tokens/s."
    ]


def _close(comparison: CardComparison) -> list[str]:
    """Return that an order may be another on the cards, if predictions are not that good."""
    found = []
    first = comparison.fastest
    if first is not None:
        near = [
            card.name
            for card in comparison.fitting
            if card is not first and _rate(card) * (1 + prediction.RATE_ERROR) >= _rate(first)
        ]
        found += _may_swap(near, f"faster {first.name}", "rates")
    cheapest = comparison.cheapest
    least = None if cheapest is None or cheapest.fastest is None else cheapest.fastest
    if cheapest is not None and least is not None and least.cost_per_epoch is not None:
        limit = least.cost_per_epoch * (1 + prediction.RATE_ERROR)
        near = [
            card.name
            for card in comparison.fitting
            if card is not cheapest
            and card.fastest
            and (card.fastest.cost_per_epoch or limit + 1) <= limit
        ]
        found += _may_swap(near, f"cheaper {cheapest.name}", "costs")
    return found


def _may_swap(near: Sequence[str], first: str, what: str) -> list[str]:
    if not near:
        return []
    return [
        f"{' and '.join(near)} and the {first} lie within the ±{prediction.RATE_ERROR:.0%} that"
        f" predicted {what} may be off by: on the cards the order may be another."
    ]


def _unlike(comparison: CardComparison) -> list[str]:
    """Return that the fastest configurations train differently, where they do."""
    kinds = _grouped(
        comparison.fitting,
        lambda card: "+".join(card.fastest.trial.changes) or SAME if card.fastest else "",
    )
    methods = _grouped(
        comparison.fitting,
        lambda card: (
            str(card.fastest.trial.candidate.get("adaptation", "")) if card.fastest else ""
        ),
    )
    found = []
    if len(methods) > 1:
        told = "; ".join(f"{method} on {_listed(names)}" for method, names in methods.items())
        found.append(
            f"The fastest configurations do not train the same ({told}), so that their rates and"
            " costs are of different trainings; the column full compares those that train all"
            " weights, and --pin adaptation=VALUE compares one kind."
        )
    elif len(kinds) > 1:
        told = "; ".join(
            f"{kind if kind == SAME else f'other {kind}'} on {_listed(names)}"
            for kind, names in kinds.items()
        )
        found.append(f"The fastest configurations do not train the same ({told}).")
    return found


def _removed(comparison: CardComparison) -> list[str]:
    """Return which values a card's search lacked that another one's had, with the reasons."""
    searched = [card for card in comparison.cards if card.report is not None]
    lacking = {card.name: _left_out(card) for card in searched}
    told: dict[tuple[str, str], list[str]] = {}
    for name, left_out in lacking.items():
        own = {
            value: reason
            for value, reason in left_out.items()
            if any(value not in others for others in lacking.values())
        }
        for reason, values in _inverted(own).items():
            told.setdefault((_listed(values), reason.rstrip(".")), []).append(name)
    return [
        f"{_listed(names)} {'was' if len(names) == 1 else 'were'} searched without {values},"
        f" which other cards have: {reason}."
        for (values, reason), names in told.items()
    ]


def _left_out(card: CardResult) -> dict[str, str]:
    """Return the knobs and values that a card rules out, each with the reason, in common words."""
    if card.report is None:
        return {}
    values = dict(card.report.removed_values)
    told = {value.partition("=")[0] for value in values}  # whose last value needs no reason
    knobs = {name: reason for name, reason in card.report.inactive_knobs if name not in told}
    label = str(card.report.device.get("label") or card.label)
    return {name: text.replace(label, "the card") for name, text in (knobs | values).items()}


def _unpriced(comparison: CardComparison) -> list[str]:
    if all(card.price_per_hour is None for card in comparison.cards):
        return []
    lacking = [card.name for card in comparison.fitting if card.price_per_hour is None]
    if not lacking:
        return []
    options = " ".join(f"--price {name}=PER_HOUR" for name in lacking)
    has, takes = ("has", "takes") if len(lacking) == 1 else ("have", "take")
    return [
        f"{_listed(lacking)} {has} no price, and {takes} no part in what is cheapest: {options}."
    ]


def _few_tried(comparison: CardComparison) -> list[str]:
    few = [
        card.report
        for card in comparison.cards
        if card.report is not None
        and card.report.trials
        and len(card.report.trials) < FEW * card.report.num_candidates
    ]
    if not few:
        return []
    tried = max(len(report.trials) for report in few)
    size = max(report.num_candidates for report in few)
    more = " or more" if size >= SIZE_LIMIT else ""
    return [
        f"At most {tried} of {size:,}{more} candidates were tried on a card: there may be faster"
        " ones, and on a card where none fits, one that does. The same command with --resume and"
        " more --trials goes on."
    ]


def _versions(comparison: CardComparison) -> list[str]:
    """Return that cards were searched with different packages, as after an update."""
    reports = [card.report for card in comparison.cards if card.report is not None]
    names = {name for report in reports for name in report.versions}
    differing = sorted(
        name for name in names if len({report.versions.get(name) for report in reports}) > 1
    )
    if not differing:
        return []
    return [
        f"The cards were searched with different versions of {_listed(differing)}, so that"
        " differences between them may come from those."
    ]


def _endings(comparison: CardComparison) -> list[str]:
    """Return a sentence for each card without a verdict, or without anything that fits."""
    found = []
    for card in comparison.cards:
        if card.failure is not None:
            word = "does not fit" if card.failure.is_verdict else "its search broke"
            found.append(
                f"{card.name}: {word}: {card.failure.message} {card.failure.hint}".strip()
            )
        elif card.report is None:
            found.append(f"{card.name}: not searched yet; --resume goes on.")
        elif card.fits is None:
            found.append(f"{card.name}: its search is not finished, and nothing fits so far.")
        elif not card.fits:
            error = card.report.nothing_fits()
            found.append(f"{card.name}: {error.message} {error.hint}".strip())
        elif not card.report.finished:
            found.append(f"{card.name}: its search is not finished; --resume goes on.")
    return found


def _named(card: CardResult) -> str:
    return f"{card.name} ({card.label}, {format_gib(card.memory_bytes)})"


def _rated(card: CardResult) -> str:
    return f"a predicted {format_rate(_rate(card))} tokens/s ±{prediction.RATE_ERROR:.0%}"


def _rate(card: CardResult) -> float:
    rate = None if card.fastest is None else card.fastest.tokens_per_s
    return 0.0 if rate is None else rate.median


def _grouped(
    cards: Sequence[CardResult], key: Callable[[CardResult], str]
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for card in cards:
        found.setdefault(key(card), []).append(card.name)
    return found


def _inverted(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for value, reason in reasons.items():
        found.setdefault(reason, []).append(value)
    return found


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
