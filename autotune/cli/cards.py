"""Several cards in one command: ``search --device A,B``, and what to do with its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli import common, interrupts
from autotune.errors import AutotuneError, NoFeasibleConfigError, UsageError
from autotune.masking import MASK

if TYPE_CHECKING:
    from autotune.card_search import CardSearch, NamedCard
    from autotune.cards_folder import CardsFolder
    from autotune.listener import Budget, Listener
    from autotune.report.cards import CardComparison


@dataclass(frozen=True, slots=True)
class Several:
    """Cards that are to be compared, with their prices per hour by name."""

    devices: tuple[str, ...]
    prices: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a search was asked for on the command line."""

    model: str
    dataset: str
    settings: dict[str, Any]
    cards: Several
    budget: Budget
    command: str


def given(
    device: str, price: Sequence[str] | None, prices: Path | None
) -> tuple[str, Several | None]:
    """Return the device to search on, and the cards if ``--device`` names several.

    Raises:
        UsageError: If a real device is among several, or a price is given for a single one.
        UnknownNameError, PrerequisiteError: If there is no such card.
    """
    parts = [part for part in device.split(",") if part.strip()]
    if len(parts) > 1:
        from autotune.card_search import named_cards

        found = {card.device: card.name for card in named_cards(parts)}
        if len(found) > 1:
            return device, Several(tuple(found), prices_of(found, price, prices))
        device = next(iter(found))
    check_no_prices(price, prices)
    return device, None


def check_no_prices(price: Sequence[str] | None, prices: Path | None) -> None:
    """Refuse prices where a single device is searched on.

    Raises:
        UsageError: If there are any.
    """
    if price or prices is not None:
        raise UsageError(
            "prices are for a comparison of cards, and this is a search on a single device.",
            hint="Compare some with `autotune search`, such as --device"
            " virtual:rtx-4090,virtual:a100-80gb.",
        )


def prices_of(
    compared: Mapping[str, str], price: Sequence[str] | None, file: Path | None
) -> dict[str, float]:
    """Return the prices per hour that ``--price`` and ``--prices`` give, by a card's name.

    Args:
        compared: The comparison's name of each card, by device.
        price: ``CARD=PER_HOUR`` pairs, which go before the file.
        file: A list of prices.

    Raises:
        UsageError: If they cannot be read, or are of other cards.
    """
    from autotune import prices

    listed = {} if file is None else prices.by_card(prices.read(file), compared, from_file=True)
    return listed | prices.by_card(prices.parse(price or ()), compared)


def search(asked: Asked, as_json: bool) -> int:
    """Search on each card, show the comparison and return the exit code.

    Raises:
        AutotuneError: If the search broke on all of them, or it fits on none.
    """
    interrupts.end_in_order("\ninterrupted: ending the running probe; once more to leave at once")
    common.say("starting the worker and reading model and data ...")
    progress = _Progresses(len(asked.cards.devices))
    cards = _card_search(
        asked, listen=progress.of, on_failure=progress.failed, on_winners=progress.winners
    )
    found = cards.search(asked.budget)
    show(found, as_json)
    if found.interrupted:
        common.say(f"interrupted; continue with: {cards.resume_command}")
        if MASK in cards.resume_command:
            common.say(f"  with the password of --study in place of {MASK}")
        return common.INTERRUPTED
    check_fits(found)
    common.say(f"run folder: {cards.folder.path}, with one for each card in it")
    chosen = found.cheapest or found.smallest
    assert chosen is not None  # it fits on one
    common.say(f"the configurations of {chosen.name}: {cards.folder.card(chosen.name).configs}")
    return 0


def check_fits(found: CardComparison) -> None:
    """Refuse a comparison in which nothing fits.

    Raises:
        NoFeasibleConfigError: If it fits on no card.
    """
    if found.fitting:
        return
    broken = [card.name for card in found.cards if card.is_broken]
    aside = f"; the search broke on {', '.join(broken)}" if broken else ""
    raise NoFeasibleConfigError(
        f"it fits on none of {len(found.cards)} cards{aside}.",
        hint="The notes above say for each what came closest, and what helps.",
    )


def show(found: CardComparison, as_json: bool) -> None:
    """Print a comparison on standard output."""
    from autotune.report import cards_text

    if as_json:
        common.show_json(found.to_dict())
        return
    console = common.stdout_console()
    text = cards_text.render(found, console.width)
    common.show_text(text, console)


def dry_run(asked: Asked, as_json: bool) -> int:
    """Show what would be searched on each card.

    Raises:
        AutotuneError: If it could be searched on none; the first card's error.
    """
    from autotune.cli.planned import planned, print_planned
    from autotune.units import counted, format_duration

    cards = _card_search(asked)
    plans = cards.plans()
    facts: dict[str, dict[str, Any]] = {}
    errors: dict[str, AutotuneError] = {}
    for name, plan in plans.items():
        if isinstance(plan, AutotuneError):
            errors[name] = plan
        else:
            facts[name] = planned(plan, asked.budget)
    if not facts:
        raise next(iter(errors.values()))
    worst_s = sum(item["worst_case_time_s"] for item in facts.values())
    if as_json:
        listed = [
            {
                "name": card.name,
                "device": card.device,
                "plan": facts.get(card.name),
                "error": _as_dict(errors.get(card.name)),
            }
            for card in cards.cards
        ]
        common.show_json({"cards": listed, "worst_case_time_s": worst_s})
        return 0
    console = common.stdout_console()
    for number, card in enumerate(cards.cards, 1):
        console.print(_head(card, number, len(plans)), markup=False, soft_wrap=True)
        if card.name in facts:
            print_planned(facts[card.name], console)
        else:
            error = errors[card.name]
            text = f"cannot be searched: {error.message} {error.hint}".rstrip()
            console.print(text, markup=False, soft_wrap=True)
        print()
    print(
        f"{counted(len(facts), 'card')}, one after the other, each with the trials and the time"
        f" that were given; the bound for all is {format_duration(worst_s)}."
    )
    return 0


def report(run: Path, as_json: bool, *, price: Sequence[str] | None, prices: Path | None) -> int:
    """Show what searches on several cards have found so far."""
    folder = _folder(run)
    found = folder.comparison()
    asked = prices_of({card.device: card.name for card in found.cards}, price, prices)
    show(found.with_prices(asked), as_json)
    return 0


def folder_of(run: Path, card: str | None) -> Path:
    """Return the run folder that ``--card`` names in one of several cards, or ``run`` itself.

    Raises:
        UsageError: If a card is to be named and is not, or the other way round.
        UnknownNameError: If there is no such card in it.
    """
    from autotune.cards_folder import is_cards
    from autotune.errors import UnknownNameError

    if not is_cards(run):
        if card is not None:
            raise UsageError(
                f"--card names a card of several, and {run} holds a single search.",
                hint="Leave --card away.",
            )
        return run
    known = {item.device: item.name for item in _folder(run).read_cards()}
    if card is None:
        raise not_one(run, list(known.values()))
    from autotune.prices import name_in

    name = name_in(known, card)
    if name not in known.values():
        raise UnknownNameError("card", card, known.values(), where=str(run))
    return run / name


def not_one(run: Path, names: Sequence[str]) -> UsageError:
    """Return the error for a command that takes one search, and is given those of several."""
    return UsageError(
        f"{run} holds searches on several cards: {', '.join(names)}.",
        hint=f"Give the folder of one, such as {run / names[0]}"
        f" (`autotune export` also takes --card {names[0]}).",
    )


def check_single(run: Path) -> None:
    """Refuse the folder of several cards where one search is needed.

    Raises:
        UsageError: Naming the folders in it.
    """
    from autotune.cards_folder import is_cards

    if is_cards(run):
        raise not_one(run, [item.name for item in _folder(run).read_cards()])


def _folder(run: Path) -> CardsFolder:
    from autotune.cards_folder import CardsFolder

    return CardsFolder(run)


def _card_search(asked: Asked, **options: Any) -> CardSearch:
    from autotune.card_search import CardSearch

    settings = {key: value for key, value in asked.settings.items() if key != "device"}
    return CardSearch(
        asked.model,
        asked.dataset,
        devices=asked.cards.devices,
        prices=asked.cards.prices,
        command=asked.command,
        **settings,
        **options,
    )


def _as_dict(error: AutotuneError | None) -> dict[str, str] | None:
    if error is None:
        return None
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}


def _head(card: NamedCard, number: int, count: int) -> str:
    from autotune.units import format_gib

    size = format_gib(card.card.memory_bytes)
    return f"== card {number} of {count}: {card.name} ({card.card.name}, {size})"


class _Progresses:
    """The progress of each card's search in turn, with a line above it."""

    def __init__(self, count: int) -> None:
        self._console = common.stderr_console()
        self._count, self._number = count, 0
        self._said: set[str] = set()

    @contextlib.contextmanager
    def of(self, card: NamedCard) -> Iterator[Listener]:
        from autotune.cli.progress import Progress

        self._number += 1
        head = _head(card, self._number, self._count)
        with Progress(self._console, head=head, said=self._said) as progress:
            yield progress

    def winners(self, card: NamedCard, count: int) -> None:
        from autotune.units import counted

        what = counted(count, "configuration")
        common.say(
            f"{card.name}: trying {what} that {'is' if count == 1 else 'are'} best elsewhere"
        )

    def failed(self, card: NamedCard, error: AutotuneError) -> None:
        common.say(f"{card.name}: {error.message}")
        if error.hint:
            common.say(f"  hint: {error.hint}")
