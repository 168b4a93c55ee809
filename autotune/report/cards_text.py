"""A comparison of cards as text for people."""

from __future__ import annotations

from rich.text import Text

from autotune.probe import prediction
from autotune.report.cards import CardComparison, CardPick, CardResult
from autotune.report.cards_notes import cost
from autotune.report.cells import UNKNOWN, gib, percent, settings
from autotune.report.columns import aligned, fitted, wrapped
from autotune.units import counted, format_duration, format_gib, format_rate

TITLE = "Predicted, not measured"
DISPENSABLE = ("headroom", "GiB", "per hour", "per 1M tokens", "peak", "full")
"""Columns left out, in this order, where the table is too wide; the lines below have the peaks."""

LEFT = ("card", "fits")


def render(comparison: CardComparison, width: int) -> Text:
    """Return the answer in sentences, the table with a few lines for each card, and the notes."""
    title = (
        f"{TITLE}: {comparison.model} ({comparison.trainer}) on {comparison.dataset}, on"
        f" {counted(len(comparison.cards), 'card')}"
    )
    tried = [len(card.report.trials) for card in comparison.cards if card.report is not None]
    title += f", up to {counted(max(tried), 'trial')} on each" if tried else ""
    text = Text().append(wrapped(title, width), "bold")
    if comparison.interrupted:
        text.append("\n" + wrapped("Interrupted; this is what is known so far.", width), "yellow")
    for sentence in comparison.summary:
        style = "green" if comparison.fitting else "bold red"
        text.append("\n" + wrapped(sentence, width, hang=2), style)
    text.append("\n\n").append_text(_table(comparison, width))
    for note in comparison.notes:
        text.append("\n" + wrapped(f"note: {note}", width, hang=6))
    trust = prediction.trust(*(card.label for card in comparison.cards))
    return text.append("\n\n" + wrapped(trust, width), "yellow")


def _table(comparison: CardComparison, width: int) -> Text:
    has_prices = any(card.price_per_hour is not None for card in comparison.cards)
    rows = [_row(card, has_prices=has_prices) for card in comparison.cards]
    sizes = fitted(rows, width, DISPENSABLE)
    text = Text(aligned({name: name for name in sizes}, sizes, LEFT), style="")
    text.stylize("bold")
    for card, row in zip(comparison.cards, rows, strict=True):
        text.append("\n" + aligned(row, sizes, LEFT), f"not bold {_style(card)}")
        for line in _lines(card):
            text.append("\n" + wrapped(line, width, indent=4, hang=2), "not bold")
    return text.append("\n" + wrapped(_legend(sizes), width), "not bold dim")


def _row(card: CardResult, *, has_prices: bool) -> dict[str, str]:
    pick = card.fastest
    rate = None if pick is None else pick.tokens_per_s
    row = {
        "card": card.name,
        "GiB": gib(card.memory_bytes),
        "fits": _fits(card),
        "tokens/s": format_rate(None if rate is None else rate.median),
        "epoch": format_duration(None if pick is None else pick.epoch_s),
        "peak": gib(None if pick is None else pick.peak_bytes),
        "headroom": percent(None if pick is None else pick.headroom_ratio),
        "full": _full(card),
    }
    if not has_prices:
        return row
    return row | {
        "per hour": cost(card.price_per_hour),
        "per epoch": cost(None if pick is None else pick.cost_per_epoch),
        "per 1M tokens": cost(None if pick is None else pick.cost_per_million_tokens),
    }


def _fits(card: CardResult) -> str:
    if card.fits is None:
        return "error" if card.is_broken else "not yet"
    return "yes" if card.fits else "no"


def _full(card: CardResult) -> str:
    pick = card.full
    rate = None if pick is None else pick.tokens_per_s
    if rate is not None:
        return format_rate(rate.median)
    return UNKNOWN if card.full_fits is None else "no"


def _lines(card: CardResult) -> list[str]:
    """Return the configurations that a card's figures are of, one line each."""
    picks = {"fastest": card.fastest, "balanced": card.balanced}
    lines: list[str] = []
    numbers: dict[int, list[str]] = {}
    for name, pick in picks.items():
        if pick is not None:
            numbers.setdefault(pick.trial.number, []).append(name)
    for number, names in numbers.items():
        pick = picks[names[0]]
        assert pick is not None  # it has a number
        lines.append(f"[{', '.join(names)}] trial {number}: {_figures(pick)}")
    return lines


def _figures(pick: CardPick) -> str:
    rate = format_rate(None if pick.tokens_per_s is None else pick.tokens_per_s.median)
    figures = f"{rate} tokens/s, epoch {format_duration(pick.epoch_s)}"
    figures += f", peak {format_gib(pick.peak_bytes)}"
    if pick.cost_per_epoch is not None:
        figures += f", {cost(pick.cost_per_epoch)} per epoch"
    edge = " (on the edge of memory)" if pick.trial.on_the_edge else ""
    return f"{figures}; {settings(pick.trial.changed)}{edge}"


def _style(card: CardResult) -> str:
    if card.fits is None:
        return "yellow"
    return "green" if card.fits else "red"


def _legend(shown: dict[str, int]) -> str:
    texts = {
        "GiB": "GiB: the card's memory.",
        "tokens/s": f"tokens/s, epoch, peak: of the fastest configuration that fits, predicted;"
        f" rates and times ±{prediction.RATE_ERROR:.0%}.",
        "peak": "peak: reserved memory and context, GiB.",
        "headroom": "headroom: share of the card's memory beside the peak.",
        "full": "full: tokens/s of the fastest that trains all weights, no if none of those tried"
        " fits, - if none was tried.",
        "per epoch": "Costs: predicted times the price per hour, in its currency.",
    }
    return " ".join(text for name, text in texts.items() if name in shown)
