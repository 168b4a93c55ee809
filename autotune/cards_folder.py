"""The folder of searches on several cards: a run folder for each, and what names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.probe import typed
from autotune.report.cards import CardComparison, CardFailure, CardResult
from autotune.report.model import Report
from autotune.runfolder import RunFolder

FILE = "cards.json"
_OWN = ("work", FILE)
"""What else is in the folder, so that no card's folder may be called so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRun:
    """What is recorded of one card beside its own folder.

    Attributes:
        name: Its folder's name, and what options call it.
        device: ``virtual:`` and the card.
        label: The card's name, as its driver reports it.
        memory_bytes: What a process can use of it.
        price_per_hour: In whatever currency it was given; None if it was not.
        failure: Why its search broke; None if it did not.
    """

    name: str
    device: str
    label: str
    memory_bytes: int
    price_per_hour: float | None = None
    failure: CardFailure | None = None


class CardsFolder(RunFolder):
    """Paths and records of searches on several cards.

    It is started, locked and resumed as the folder of one search is; ``cards.json`` stands in the
    place of ``run.json``.

    Args:
        path: The folder; need not exist.
    """

    @property
    def run_file(self) -> Path:
        """Return the file that names the cards."""
        return self.path / FILE

    def card(self, name: str) -> RunFolder:
        """Return the run folder of one card."""
        return RunFolder(self.path / name)

    def write_cards(self, runs: Sequence[CardRun], details: Mapping[str, Any]) -> None:
        """Record the cards, and what else is to be kept, such as the request."""
        self.write_run(
            details.get("identity", {}), {**details, "cards": [asdict(r) for r in runs]}
        )

    def read_cards(self) -> tuple[CardRun, ...]:
        """Return the cards that :meth:`write_cards` recorded.

        Raises:
            JournalError: If the file cannot be read or names what cannot be a card's folder.
        """
        try:
            runs = tuple(_run(item) for item in self.read_run()["cards"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreadable(f"it names no cards ({error})") from error
        return runs

    def comparison(self, *, interrupted: bool = False) -> CardComparison:
        """Return what the searches have found so far.

        Raises:
            JournalError: If ``cards.json`` cannot be read. A card whose report cannot be is one
                with an error.
        """
        details, runs = self.read_run(), self.read_cards()
        texts = {name: details.get(name) for name in ("model", "dataset", "trainer")}
        cards = tuple(self._result(run) for run in runs)
        stopped = any(card.report is not None and card.report.interrupted for card in cards)
        return CardComparison(
            **{name: text if isinstance(text, str) else "" for name, text in texts.items()},
            cards=cards,
            interrupted=interrupted or stopped,
        )

    def _result(self, run: CardRun) -> CardResult:
        file, report, failure = self.card(run.name).report_file, None, run.failure
        if file.exists():
            try:
                report = Report.load(file)
            except AutotuneError as error:
                failure = CardFailure.of(error)
        return CardResult(
            name=run.name,
            device=run.device,
            label=run.label,
            memory_bytes=run.memory_bytes,
            price_per_hour=run.price_per_hour,
            report=report,
            failure=failure,
        )


def is_cards(path: Path) -> bool:
    """Whether a folder holds searches on several cards."""
    return (path / FILE).is_file()


def folder_names(names: Iterable[str]) -> list[str]:
    """Return a folder's name for each of these cards: its own, in plain characters, and once."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-") or "card"
        unique, number = plain, 1
        while unique.lower() in {*_OWN, *(item.lower() for item in found)}:
            number += 1
            unique = f"{plain}-{number}"
        found.append(unique)
    return found


def _run(data: Any) -> CardRun:
    values = dict(data)
    failure = values.pop("failure", None)
    run = CardRun(**values, failure=None if failure is None else CardFailure(**failure))
    typed.check(run)
    if [run.name] != folder_names([run.name]):
        raise ValueError(f"{run.name!r} is no name of a card's folder")
    return run
