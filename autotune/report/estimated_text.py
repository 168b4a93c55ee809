"""An estimate as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from autotune.probe import prediction
from autotune.probe.modelled import engine_of
from autotune.probe.result import Measurement, Outcome, phase_name
from autotune.probe.trl_yaml import TRL_COMMANDS
from autotune.report.cells import gib, percent
from autotune.report.columns import aligned, fitted, wrapped
from autotune.report.estimated import CardEstimate, Estimate
from autotune.report.makeup import BUDGET_MEANS, makeup_table, timeline_picture
from autotune.units import counted, format_duration, format_gib, format_rate

TITLE = "Predicted, not measured"


def render(estimate: Estimate, width: int) -> Text:
    """Return an estimate as text: figures and pictures of one card, or a line for each of more."""
    cards = estimate.cards
    where = f" on {cards[0].label}" if len(cards) == 1 else ""
    trl = "trl " if estimate.trainer in TRL_COMMANDS else ""
    title = f"{TITLE}: {estimate.file} ({trl}{estimate.trainer}){where}"
    text = Text().append(wrapped(title, width), "bold")
    text.append(f"\n{wrapped(_data_line(estimate), width)}\n")
    if len(cards) == 1:
        text.append_text(_one(cards[0], width))
    else:
        text.append_text(_table(cards, width))
    for note in estimate.notes:
        text.append("\n" + wrapped(f"note: {note}", width, hang=6))
    if not _has_figures(estimate):
        return text
    trust = prediction.trust(*(card.label for card in cards))
    return text.append("\n\n" + wrapped(trust, width), "dim")


def _has_figures(estimate: Estimate) -> bool:
    """Whether any card got as far as to have figures; what is refused trains on nothing."""
    return any(card.measurement or card.outcome is Outcome.DEVICE_OOM for card in estimate.cards)


def _data_line(estimate: Estimate) -> str:
    if estimate.coverage is None or not _has_figures(estimate):
        return f"{estimate.data}."
    return f"{estimate.data}; trains on {percent(estimate.coverage)} of the tokens with loss."


def _one(card: CardEstimate, width: int) -> Text:
    text = Text("\n").append(wrapped(card.verdict(), width), _style(card))
    if card.measurement is None:
        return text
    rows = _figures(card, card.measurement)
    size = max(len(name) for name, _ in rows)
    text.append("\n")
    for name, value in rows:
        text.append("\n" + wrapped(f"{name:<{size}}  {value}", width, hang=size + 2))
    makeup = card.makeup
    if makeup is None:
        return text
    text.append("\n\n").append_text(makeup_table(makeup, width=width))
    budget = card.budget_bytes - card.context_bytes
    picture = timeline_picture(makeup, width=width, budget_bytes=budget)
    if not picture.plain:
        return text
    text.append("\n\n").append_text(picture)
    return text.append("\n" + wrapped(BUDGET_MEANS, width))


def _figures(card: CardEstimate, pooled: Measurement) -> list[tuple[str, str]]:
    error = f"within about {prediction.ALLOCATED_ERROR:.0%}"
    rate, time = card.tokens_per_s, card.step_time_s
    off, why_off = f"±{prediction.RATE_ERROR:.0%}", prediction.rate_error(card.label)
    if engine_of(card.makeup) is not None:
        # Those errors are of what is traced.
        error = f"vLLM's share modelled and the rest {error}"
        off, why_off = (f"vLLM's time modelled, the rest {text}" for text in (off, why_off))
    rows = [
        (
            "allocated",
            f"{format_gib(pooled.peak_of('allocated_bytes'))} predicted, {error}, as PyTorch"
            " counts its blocks",
        ),
        (
            "reserved",
            f"{format_gib(pooled.peak_of('reserved_bytes'))} predicted; fragmentation"
            f" {percent(card.fragmentation)} of it",
        ),
        (
            "used",
            f"{format_gib(card.used_bytes)} predicted: reserved, and"
            f" {format_gib(card.context_bytes)} of context; reached in"
            f" {phase_name(pooled.peak_phase)}",
        ),
        (
            "on the host",
            f"{format_gib(card.host_bytes)} predicted: offloaded activations, paged states and the"
            " like",
        ),
    ]
    if card.outcome is Outcome.OK and rate is not None and time is not None:
        rows += [
            (
                "rate",
                f"{format_rate(rate.median)} tokens/s predicted, {why_off}:"
                f" {format_rate(rate.low)} to {format_rate(rate.high)}",
            ),
            (
                "step time",
                f"{format_duration(time.median)} predicted, {off}, of"
                f" {counted(pooled.accumulation_steps, 'micro-batch')}",
            ),
            ("padding", f"{percent(pooled.padding_share)} of the tokens computed"),
        ]
    if pooled.worst_batch is not None:
        num_rows, length = pooled.worst_batch
        rows.append(("worst batch", f"{counted(num_rows, 'row')} of {length:,} tokens"))
    if pooled.num_alloc_retries:
        times = counted(pooled.num_alloc_retries, "time")
        rows.append(("on the edge", f"the allocator gives its cache back {times} to go on"))
    return rows


def _table(cards: Sequence[CardEstimate], width: int) -> Text:
    rows = [_row(card) for card in cards]
    sizes, left = fitted(rows), ("card", "fits")
    head = aligned({name: name for name in sizes}, sizes, sizes)
    text = Text("\n").append(head, "bold")
    for card, row in zip(cards, rows, strict=True):
        text.append("\n" + aligned(row, sizes, left), _style(card))
    for card in cards:
        if not card.is_known or card.is_refusal:
            text.append("\n" + wrapped(f"{card.label}: {card.verdict()}", width, hang=2))
        elif card.outcome is Outcome.OK and card.host_warning():
            text.append("\n" + wrapped(f"{card.label}:{card.host_warning()}", width), "yellow")
    legend = (
        "All columns are predicted, but for memory and limit (the card's memory less"
        f" {prediction.MEMORY_MARGIN:.0%}). GiB; used: reserved and context; host: what the device"
        f" moves there; tokens/s and step: ±{prediction.RATE_ERROR:.0%}."
    )
    return text.append("\n" + wrapped(legend, width), "dim")


def _row(card: CardEstimate) -> dict[str, str]:
    pooled, ran = card.measurement, card.outcome is Outcome.OK
    rate, time = card.tokens_per_s, card.step_time_s
    known = {True: "yes", False: "too close" if ran else "no"}
    return {
        "card": card.label,
        "fits": known[card.fits] if card.is_known else "?",
        "allocated": gib(pooled.peak_of("allocated_bytes") if pooled else None),
        "reserved": gib(pooled.peak_of("reserved_bytes") if pooled else None),
        "used": gib(card.used_bytes),
        "limit": gib(card.budget_bytes),
        "memory": gib(card.memory_bytes),
        "host": gib(card.host_bytes),
        "tokens/s": format_rate(rate.median if rate and ran else None),
        "step": format_duration(time.median if time and ran else None),
    }


def _style(card: CardEstimate) -> str:
    if card.outcome is not Outcome.OK:
        return "bold red"
    return "green" if card.fits and not card.host_warning() else "yellow"
