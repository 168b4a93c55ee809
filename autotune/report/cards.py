"""Searches of one run on several cards, set against each other, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autotune.errors import AutotuneError, TooSmallError
from autotune.probe import prediction
from autotune.probe.result import Interval, Outcome
from autotune.report import cards_notes
from autotune.report.figures import figures_of
from autotune.report.model import Report
from autotune.report.trial import Trial

SCHEMA = 1
SECONDS_PER_HOUR = 3600.0
TOKENS_PRICED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFailure:
    """Why a card's search ended with an error.

    Attributes:
        kind: Name of the error's class.
        message: What happened.
        hint: What to do next; empty if there is nothing to add.
    """

    kind: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: AutotuneError) -> CardFailure:
        """Return an error as plain data."""
        return cls(kind=type(error).__name__, message=error.message, hint=error.hint)

    @property
    def is_verdict(self) -> bool:
        """Whether it says that nothing fits, rather than that nobody knows."""
        return self.kind == TooSmallError.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPick:
    """One trial on one card, with what it costs there; all of it predicted.

    Attributes:
        trial: The trial.
        memory_bytes: What the card has.
        price_per_hour: In whatever currency it was given; None if it was not.
    """

    trial: Trial
    memory_bytes: int
    price_per_hour: float | None = None

    @property
    def tokens_per_s(self) -> Interval | None:
        """Return the rate with all that it may be off by."""
        rate = self.trial.tokens_per_s
        return None if rate is None else prediction.rate_interval(rate.median)

    @property
    def epoch_s(self) -> float | None:
        """Return the time of one pass over the data, in seconds."""
        return figures_of(self.trial, None).epoch_s

    @property
    def peak_bytes(self) -> int | None:
        """Return the most that is used of the card, context included."""
        return self.trial.peak_bytes

    @property
    def headroom_ratio(self) -> float | None:
        """Return the share (0 to 1) of the card's memory that is never used."""
        peak = self.peak_bytes
        return None if peak is None or not self.memory_bytes else 1.0 - peak / self.memory_bytes

    @property
    def cost_per_epoch(self) -> float | None:
        """Return what one pass over the data costs; None without a price."""
        if self.price_per_hour is None or self.epoch_s is None:
            return None
        return self.price_per_hour * self.epoch_s / SECONDS_PER_HOUR

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Return what a million trained tokens cost; None without a price."""
        rate = self.tokens_per_s
        if self.price_per_hour is None or rate is None or not rate.median:
            return None
        return self.price_per_hour / SECONDS_PER_HOUR * TOKENS_PRICED / rate.median

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        rate = self.tokens_per_s
        return {
            "trial": self.trial.number,
            "changed": dict(self.trial.changed),
            "changes": list(self.trial.changes),
            "source": self.trial.source,
            "tokens_per_s": None if rate is None else asdict(rate),
            "epoch_s": self.epoch_s,
            "used_peak_bytes": self.peak_bytes,
            "headroom_ratio": self.headroom_ratio,
            "trained_share": self.trial.coverage,
            "cost_per_epoch": self.cost_per_epoch,
            "cost_per_million_tokens": self.cost_per_million_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CardResult:
    """What the search on one card found.

    Attributes:
        name: What options call it, such as ``rtx-4090``; also its folder's name.
        device: ``virtual:`` and the card.
        label: The card's name, as its driver reports it.
        memory_bytes: What a process can use of it, context included.
        price_per_hour: In whatever currency it was given; None if it was not.
        report: The report so far; None if its search has not got to one.
        failure: Why its search broke; None if it did not.
    """

    name: str
    device: str
    label: str
    memory_bytes: int
    price_per_hour: float | None = None
    report: Report | None = None
    failure: CardFailure | None = None

    @property
    def fits(self) -> bool | None:
        """Whether a candidate fits; None if that is not known, or not known yet."""
        if self.report is not None and self.report.picks():
            return True
        if self.failure is not None:
            return False if self.failure.is_verdict else None
        return False if self.report is not None and self.report.finished else None

    @property
    def is_broken(self) -> bool:
        """Whether its search broke before it was known if anything fits."""
        return self.failure is not None and self.fits is None

    @property
    def fastest(self) -> CardPick | None:
        """Return the fastest configuration that fits; None if none does."""
        return self._pick("fastest")

    @property
    def balanced(self) -> CardPick | None:
        """Return the recommended configuration; None if none fits."""
        return self._pick("balanced")

    @property
    def full(self) -> CardPick | None:
        """Return the fastest that trains all weights and fits; None if none of those tried did."""
        rated = [
            (item.tokens_per_s.median, -item.number, item)
            for item in self._tried_full()
            if item.feasible and item.outcome is Outcome.OK and item.tokens_per_s is not None
        ]
        return self._priced(max(rated, key=lambda entry: entry[:2])[2]) if rated else None

    @property
    def full_fits(self) -> bool | None:
        """Whether full fine-tuning fits; None if no candidate that trains all weights was tried.

        False says it of those that were tried.
        """
        if self.full is not None:
            return True
        return False if self._tried_full() or self.fits is False else None

    def _tried_full(self) -> list[Trial]:
        trials = () if self.report is None else self.report.trials
        return [item for item in trials if not item.config.get("use_peft")]

    def _pick(self, which: str) -> CardPick | None:
        number = None if self.report is None else self.report.picks().get(which)
        return None if self.report is None or number is None else self._priced(number)

    def _priced(self, trial: Trial | int) -> CardPick:
        assert self.report is not None  # it is where the trial is from
        number = trial if isinstance(trial, int) else trial.number
        return CardPick(
            trial=self.report.pick(number),
            memory_bytes=self.memory_bytes,
            price_per_hour=self.price_per_hour,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        picks = {"fastest": self.fastest, "balanced": self.balanced, "full": self.full}
        report = self.report
        return {
            "name": self.name,
            "device": self.device,
            "label": self.label,
            "memory_bytes": self.memory_bytes,
            "price_per_hour": self.price_per_hour,
            "fits": self.fits,
            "full_fine_tuning_fits": self.full_fits,
            "picks": {name: pick and pick.to_dict() for name, pick in picks.items()},
            "num_trials": 0 if report is None else len(report.trials),
            "outcomes": {} if report is None else report.outcomes(),
            "finished": report is not None and report.finished,
            "removed_values": []
            if report is None
            else [list(pair) for pair in report.removed_values],
            "error": None if self.failure is None else asdict(self.failure),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CardComparison:
    """Searches of the same run on several cards.

    Attributes:
        model: Model, as given.
        dataset: Data set, as given.
        trainer: Trainer, such as ``sft``.
        cards: The cheapest first where prices are known, else those with the least memory, and of
            equal ones the fastest first.
        interrupted: Whether the user stopped it.
    """

    model: str
    dataset: str
    trainer: str
    cards: tuple[CardResult, ...] = field(default=())
    interrupted: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cards", tuple(sorted(self.cards, key=_by_cost)))

    @property
    def fitting(self) -> tuple[CardResult, ...]:
        """Return the cards on which a candidate fits."""
        return tuple(card for card in self.cards if card.fits)

    @property
    def cheapest(self) -> CardResult | None:
        """Return the card on which an epoch costs least; None if no price is known.

        Of those on which it fits, by the fastest configuration on each.
        """
        costs = [(_cost(card), card) for card in self.fitting]
        known = [(cost, card) for cost, card in costs if cost is not None]
        return min(known, key=lambda pair: pair[0], default=(None, None))[1]

    @property
    def lowest_priced(self) -> CardResult | None:
        """Return the card with the lowest price per hour of those on which it fits."""
        priced = [card for card in self.fitting if card.price_per_hour is not None]
        return min(priced, key=lambda card: card.price_per_hour or 0.0, default=None)

    @property
    def smallest(self) -> CardResult | None:
        """Return the card with the least memory on which it fits; the faster one of equals."""
        return min(self.fitting, key=_by_memory, default=None)

    @property
    def fastest(self) -> CardResult | None:
        """Return the card with the highest rate; None if it fits on none."""
        return max(self.fitting, key=_rate, default=None)

    @property
    def summary(self) -> tuple[str, ...]:
        """Return the answer in whole sentences: the cheapest or smallest card, and the fastest."""
        return cards_notes.summary(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the figures do not tell, in whole sentences."""
        return cards_notes.notes(self)

    def card(self, name: str) -> CardResult | None:
        """Return the card of that name; None if it is not among them."""
        return next((card for card in self.cards if card.name == name), None)

    def with_prices(self, prices: Mapping[str, float]) -> CardComparison:
        """Return it with these prices per hour in place of those of the cards that they name."""
        cards = (
            replace(card, price_per_hour=prices.get(card.name, card.price_per_hour))
            for card in self.cards
        )
        return replace(self, cards=tuple(cards))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the schema number."""
        chosen = {
            "cheapest": self.cheapest,
            "lowest_priced": self.lowest_priced,
            "smallest": self.smallest,
            "fastest": self.fastest,
        }
        return {
            "schema": SCHEMA,
            "model": self.model,
            "dataset": self.dataset,
            "trainer": self.trainer,
            "source": prediction.SOURCE,
            "errors": {
                "allocated": prediction.ALLOCATED_ERROR,
                "memory_margin": prediction.MEMORY_MARGIN,
                "rate": prediction.RATE_ERROR,
            },
            "interrupted": self.interrupted,
            **{name: card and card.name for name, card in chosen.items()},
            "summary": list(self.summary),
            "notes": list(self.notes),
            "cards": [card.to_dict() for card in self.cards],
        }


def _rate(card: CardResult) -> float:
    pick = card.fastest
    rate = None if pick is None else pick.tokens_per_s
    return 0.0 if rate is None else rate.median


def _cost(card: CardResult) -> float | None:
    pick = card.fastest
    return None if pick is None else pick.cost_per_epoch


def _by_memory(card: CardResult) -> tuple[int, float, str]:
    return card.memory_bytes, -_rate(card), card.name


def _by_cost(card: CardResult) -> tuple[Any, ...]:
    cost = _cost(card)
    return cost is None, cost or 0.0, *_by_memory(card)
