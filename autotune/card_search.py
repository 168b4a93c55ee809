"""The same search on several cards that are not here: which is the cheapest on which it fits?"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune import prices as price_lists
from autotune.cards_folder import CardRun, CardsFolder, folder_names
from autotune.devices import host
from autotune.devices.base import check_name
from autotune.errors import AutotuneError, UsageError
from autotune.executors.base import Executor, ending
from autotune.executors.disk import temporary_folder
from autotune.executors.subprocess import SubprocessExecutor
from autotune.listener import Budget, Listener, Silent
from autotune.masking import masked_command
from autotune.plan import Plan, Request, make_profile
from autotune.report.cards import CardComparison, CardFailure, CardResult
from autotune.runfolder import RunFolder
from autotune.space.space import SearchSpace
from autotune.tuner import Tuner, budget_grace, default_run_dir, resume_command
from autotune.virtual import cards

PREFIX = "virtual:"
REAL = ("auto", "cpu", "cuda", "mps", "xpu")
_OF_ALL = ("--device", "--run-dir", "--price", "--prices")
"""Options whose values are of all cards, so that the command for one has others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCard:
    """A card to search on.

    Attributes:
        name: Its folder's name, and what options call it.
        device: ``virtual:`` and the card.
        card: Its figures.
    """

    name: str
    device: str
    card: cards.Card


Listen = Callable[[NamedCard], contextlib.AbstractContextManager[Listener]]


@contextlib.contextmanager
def _silently(card: NamedCard) -> Iterator[Listener]:
    yield Silent()


class CardSearch:
    """One search for each of several virtual cards; data and worker are made ready once.

    Args:
        model: Hub id or local folder.
        dataset: Hub id, data file or folder.
        devices: Virtual cards, each with or without ``virtual:`` before it; what is named twice
            counts once.
        run_dir: Folder of all of them; each card's run folder lies in it. By default
            ``runs/<model>-<time>``.
        resume: Go on with the searches in ``run_dir``, and begin those of cards that are new.
        prices: Price per hour by card, in any one currency.
        executor: Where probes run; its slots must take any virtual card, as those of
            ``SubprocessExecutor(devices=("virtual",))`` do. By default as many as there are
            processors.
        listen: Given a card, returns a context manager that hears of its search.
        on_failure: Told of a card whose search broke.
        on_winners: Told of a card before what is best on the others is tried on it, and how many
            candidates that may be.
        command: The command line to record; a password in it is masked.
        **settings: Further arguments of :class:`autotune.Tuner`, the same for all cards.

    Raises:
        UsageError, UnknownNameError, PrerequisiteError: If the request cannot be, on any card.
    """

    def __init__(
        self,
        model: str,
        dataset: str,
        *,
        devices: Sequence[str],
        run_dir: str | Path | None = None,
        resume: bool = False,
        prices: Mapping[str, float] | None = None,
        executor: Executor | None = None,
        listen: Listen = _silently,
        on_failure: Callable[[NamedCard, AutotuneError], None] = lambda card, error: None,
        on_winners: Callable[[NamedCard, int], None] = lambda card, count: None,
        command: str = "",
        **settings: Any,
    ) -> None:
        self.cards = named_cards(devices)
        self.folder = CardsFolder(run_dir if run_dir is not None else default_run_dir(model))
        space = settings.pop("space", "sft")
        self._settings = {
            **settings,
            "model": model,
            "dataset": dataset,
            "space": SearchSpace.load(space) if isinstance(space, str) else space,
        }
        self._resume = resume
        self._executor = executor
        self._listen = listen
        self._on_failure = on_failure
        self._on_winners = on_winners
        self._command = masked_command(command)
        self._prices = price_lists.by_card(
            prices or {}, {card.device: card.name for card in self.cards}
        )
        self._requests = [self._tuner(card).request for card in self.cards]

    @property
    def resume_command(self) -> str:
        """Return the command line that goes on with these searches; empty if none is known."""
        return resume_command(self._command, self.folder)

    def plans(self) -> dict[str, Plan | AutotuneError]:
        """Return what would be searched on each card, by name, without probing or recording.

        A card that the request cannot be for has its error.

        Raises:
            AutotuneError: If model or data cannot be used, or the folder not written.
        """
        self.folder.check(resume=self._resume)
        if self._resume:
            self.folder.check_identity(self._identity())
        found: dict[str, Plan | AutotuneError] = {}
        with temporary_folder("autotune-") as path:
            scratch = RunFolder(path)
            scratch.work.mkdir()
            with self._open_executor(scratch) as executor:
                make_profile(self._requests[0], scratch, executor)
                for card in self.cards:
                    tuner = self._tuner(card, executor=executor, shared=scratch)
                    try:
                        found[card.name] = tuner.plan(check=True)
                    except AutotuneError as error:
                        found[card.name] = error
        return found

    def search(self, budget: Budget | None = None) -> CardComparison:
        """Search on each card in turn and return the comparison.

        Args:
            budget: Trials and time for each card.

        A card whose search breaks is one with an error, and the others go on. After a
        ``KeyboardInterrupt`` the comparison is what is known so far, marked as interrupted.

        Raises:
            AutotuneError: If model or data cannot be used, or the search broke on every card:
                then it is the first one's error.
        """
        self.folder.start(resume=self._resume)
        try:
            runs = self._runs()
            with self._open_executor(self.folder) as executor:
                # What is wrong with model or data is so for all cards.
                make_profile(self._requests[0], self.folder, executor)
                self._write(runs)
                return self._search_all(runs, budget, executor)
        finally:
            self.folder.release()

    def _search_all(
        self, runs: dict[str, CardRun], budget: Budget | None, executor: Executor
    ) -> CardComparison:
        interrupted, errors = False, dict[str, AutotuneError]()
        for card in self.cards:
            failure = None
            try:
                with self._listen(card) as listener:
                    tuner = self._tuner(
                        card, executor=executor, shared=self.folder, listener=listener
                    )
                    interrupted = tuner.search(budget).interrupted
            except KeyboardInterrupt:
                executor.shutdown()
                interrupted = True
            except AutotuneError as error:
                errors[card.name] = error
                failure = CardFailure.of(error)
                self._on_failure(card, error)
            if interrupted:
                break
            runs[card.name] = replace(runs[card.name], failure=failure)
            self._write(runs)
        if not interrupted:
            interrupted = self._try_winners(budget, executor)
        found = self.folder.comparison(interrupted=interrupted)
        if len(errors) == len(found.cards) and all(item.is_broken for item in found.cards):
            self._forget_if_empty()
            raise next(iter(errors.values()))
        if not interrupted:
            self.folder.clear_work()
        return found

    def _try_winners(self, budget: Budget | None, executor: Executor) -> bool:
        """Try on each card what is best on the others; return whether the user stopped it.

        What one search happened upon and another did not is no difference between their cards.
        """
        wall_time_s = (budget and budget_grace(budget)) or None
        found = self.folder.comparison()
        for card in self.cards:
            result = found.card(card.name)
            if result is None or result.report is None or not result.report.trials:
                continue
            also = winners_elsewhere(found, result)
            if not also:
                continue
            tuner = self._tuner(card, executor=executor, shared=self.folder, resume=True)
            try:
                self._on_winners(card, len(also))
                if tuner.search(Budget(wall_time_s=wall_time_s), also=also).interrupted:
                    return True
            except KeyboardInterrupt:
                executor.shutdown()
                return True
            except AutotuneError as error:  # what its own search found stands
                self._on_failure(card, error)
        return False

    def _forget_if_empty(self) -> None:
        """Take away the record where the searches left nothing else, so that the place is free."""
        if not any(self.folder.card(card.name).path.exists() for card in self.cards):
            self.folder.run_file.unlink(missing_ok=True)

    def _runs(self) -> dict[str, CardRun]:
        """Return what is to be recorded of all cards, with those of the search being resumed."""
        earlier: dict[str, CardRun] = {}
        if self._resume:
            self.folder.check_identity(self._identity())
            earlier = {run.name: run for run in self.folder.read_cards()}
        for card in self.cards:
            known = earlier.get(card.name)
            earlier[card.name] = CardRun(
                name=card.name,
                device=card.device,
                label=card.card.name,
                memory_bytes=card.card.memory_bytes,
                price_per_hour=self._prices.get(
                    card.name, None if known is None else known.price_per_hour
                ),
                failure=None if known is None else known.failure,
            )
        return earlier

    def _write(self, runs: Mapping[str, CardRun]) -> None:
        request = self._requests[0]
        details = {
            "identity": self._identity(),
            "model": request.model,
            "dataset": request.dataset,
            "trainer": request.trainer,
            "command": self._command,
        }
        self.folder.write_cards(tuple(runs.values()), details)

    def _identity(self) -> dict[str, Any]:
        """Return what all the searches of one folder share; each has more in its own."""
        request: Request = self._requests[0]
        keys = request.source_keys()
        return {
            "model": keys.pop("model_name_or_path"),
            "dataset": {name: keys[name] for name in sorted(keys) if "dataset" in name},
            "revision": request.revision,
            "trainer": request.trainer,
            "space": request.space.digest,
            "pins": {key: str(value) for key, value in sorted(request.pins.items())},
            "memory_budget_bytes": request.memory_budget_bytes,
            "global_batch": request.global_batch,
            "min_coverage": request.least_coverage,
            "phases": list(request.phases),
        }

    def _tuner(self, card: NamedCard, **options: Any) -> Tuner:
        folder = self.folder.card(card.name)
        options.setdefault("resume", self._resume and folder.run_file.exists())
        return Tuner(
            **self._settings,
            **options,
            device=card.device,
            run_dir=folder.path,
            command=command_for(self._command, card.device, folder),
        )

    @contextlib.contextmanager
    def _open_executor(self, folder: RunFolder) -> Iterator[Executor]:
        if self._executor is not None:
            yield self._executor
            return
        request = self._requests[0]
        with ending(
            SubprocessExecutor(
                devices=("virtual",) * host.usable_cpus(),
                timeout_s=request.probe_timeout_s,
                log_folder=folder.work,
                trainer=request.trainer,
            )
        ) as executor:
            yield executor


def compare_cards(
    model: str,
    dataset: str,
    devices: Sequence[str],
    *,
    budget: Budget | None = None,
    prices: Mapping[str, float] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> CardComparison:
    """Search on several virtual cards and return them set against each other; all is predicted.

    Args:
        model: Hub id or local folder.
        dataset: Hub id, data file or folder.
        devices: Virtual cards, such as ``("rtx-4090", "virtual:24GiB")``.
        budget: Trials and time for each card.
        prices: Price per hour by card, in any one currency.
        run_dir: Folder of all of them; by default ``runs/<model>-<time>``.
        resume: Go on with the searches in ``run_dir``.
        **settings: Further arguments of :class:`autotune.Tuner`, the same for all cards; an
            ``executor`` must take any virtual card.

    Raises:
        AutotuneError: If the request cannot be, or the search broke on every card.
    """
    return CardSearch(
        model,
        dataset,
        devices=devices,
        prices=prices,
        run_dir=run_dir,
        resume=resume,
        **settings,
    ).search(budget)


def winners_elsewhere(found: CardComparison, card: CardResult) -> list[dict[str, Any]]:
    """Return the candidates that other cards' picks are and that were not tried on this one.

    A candidate that some card lacks a value of is left to the search to pass over.
    """
    tried = [] if card.report is None else [dict(item.candidate) for item in card.report.trials]
    chosen: list[dict[str, Any]] = []
    for other in found.fitting:
        picks = (other.fastest, other.balanced, other.full) if other.name != card.name else ()
        for pick in picks:
            candidate = None if pick is None else dict(pick.trial.candidate)
            if candidate is not None and candidate not in [*tried, *chosen]:
                chosen.append(candidate)
    return chosen


def named_cards(devices: Sequence[str]) -> tuple[NamedCard, ...]:
    """Return virtual cards by name, each once.

    Args:
        devices: Each with or without ``virtual:`` before it.

    Raises:
        UsageError: If there is none, or one is a real device.
        UnknownNameError, PrerequisiteError: If there is no such card.
    """
    found: dict[str, cards.Card] = {}
    for text in devices:
        name = text.strip()
        if name.partition(":")[0] in REAL:
            raise UsageError(
                f"--device {name} is a real device, and several are compared only if all are"
                " virtual cards.",
                hint=f"Search on {name} alone, or name virtual cards only, such as"
                " virtual:rtx-4090,virtual:a100-80gb (`autotune gpus` lists them).",
            )
        device = cards.full_name(name if name.startswith(PREFIX) else PREFIX + name)
        check_name(device)
        card = cards.find(device.removeprefix(PREFIX))
        # Under its first name: 4090 and rtx-4090 are one card.
        device = PREFIX + card.id if cards.catalogue().get(card.id) is card else device
        found.setdefault(device, card)
    if not found:
        raise UsageError(
            "no card was given.", hint="`autotune gpus` lists those that --device can name."
        )
    names = folder_names(card.id for card in found.values())
    return tuple(
        NamedCard(name=name, device=device, card=card)
        for name, (device, card) in zip(names, found.items(), strict=True)
    )


def command_for(command: str, device: str, folder: RunFolder) -> str:
    """Return the command line that searches on one card alone; empty if none is known."""
    try:
        words = shlex.split(command)
    except ValueError:  # not a command line, whatever a script has given
        return ""
    kept: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_value or word == "--resume":
            is_value = False
        elif name in _OF_ALL:
            is_value = not equals
        else:
            kept.append(word)
    if not kept:
        return ""
    return shlex.join([*kept, "--device", device, "--run-dir", str(folder.path)])
