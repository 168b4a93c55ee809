"""Candidates predicted for a real device before they are probed, so that probes go where they pay.

The predictions are virtual probes on a card that stands for the device (``standin.py``). They are
no trials: what they say is a guess that the sampler corrects by what it sees measured. They must
cost less than they can save, so that they get a small share of the time that the probes take.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune import standin, standin_probes
from autotune.devices import host
from autotune.errors import AutotuneError, JournalError
from autotune.executors.base import Executor
from autotune.executors.subprocess import SubprocessExecutor
from autotune.objectives import Objective
from autotune.plan import Plan
from autotune.probe import screened
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe.screened import Screened
from autotune.probe.spec import ProbeSpec
from autotune.report.model import SIZE_LIMIT
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.search.guess import Guess
from autotune.search.pool import MOST, pool
from autotune.search.spread import spread
from autotune.units import format_duration
from autotune.virtual.cards import Card

SHARE = 0.08
"""Of the time that a search's probes are expected to take. They are fewer where a search ends
early, and the baseline, by which they are judged, takes longer than most."""

START_S = 6.0
"""What starting the process that predicts takes: it imports the training stack once more."""

MAX_FRUITLESS = 4
"""Predictions at the start that all fail, after which no other is tried."""

_FASTEST_S = 0.25
"""No prediction takes less; so a pool need not hold more than there is time for at this pace."""

_POOL_AT_LEAST = 200


def allowance_s(
    probe_s: float,
    *,
    num_trials: int | None,
    wall_time_s: float | None,
    slots: int = 1,
    spent_s: float = 0.0,
    share: float = SHARE,
) -> float:
    """Return the seconds that predicting may take.

    Args:
        probe_s: Time of one probe, from being asked for to its result.
        num_trials: Probes of the search; None if only time limits it.
        wall_time_s: Limit of the search's time; None if there is none.
        slots: Probes that run at a time.
        spent_s: What an interrupted part of the same search has spent on it.
        share: Of the time that the probes take.
    """
    limits = [] if wall_time_s is None else [wall_time_s]
    limits += [] if num_trials is None else [probe_s * num_trials / slots]
    return max(share * min(limits, default=0.0) - spent_s, 0.0)


def open_virtual(device: str, plan: Plan, folder: RunFolder) -> Executor:
    """Return where virtual probes run: one at a time on each processor, which share nothing."""
    return SubprocessExecutor(
        devices=(device,) * host.usable_cpus(),
        timeout_s=plan.request.probe_timeout_s,
        log_folder=folder.work,
        trainer=plan.request.trainer,
    )


@dataclass(slots=True)
class _Waiting:
    """A virtual probe that runs."""

    candidate: dict[str, Any]
    digest: str
    spec: ProbeSpec


class Screening:
    """Predicts a search's candidates on a card that stands for its device.

    Args:
        plan: What is fixed.
        folder: Every prediction is recorded there, and none is made twice.
        objectives: What is predicted, in the study's order.
        earlier: What an interrupted part of the same search reported of its screening.
        open_executor: Opens the executor of virtual devices, which is closed after use; by
            default subprocesses.
        on_screen: Called with the number of predictions made and the number of candidates, at
            the start and after each prediction; at an early end with both alike.
        share: Of the time that the search's probes are expected to take, what it may take.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        objectives: Sequence[Objective],
        *,
        earlier: Mapping[str, Any] | None = None,
        open_executor: Callable[[str, Plan, RunFolder], Executor] | None = None,
        on_screen: Callable[[int, int], None] = lambda num_done, num_all: None,
        share: float = SHARE,
    ) -> None:
        self.notices: tuple[str, ...] = ()
        self._plan = plan
        self._share = share
        self._folder = folder
        self._objectives = tuple(objectives)
        self._open_executor = open_executor or open_virtual
        self._on_screen = on_screen
        self._file = folder.path / screened.FILE_NAME
        known = screened.read(self._file)
        self._known: dict[str, Screened] = dict(known.predictions)
        self._stand_in = known.stand_in
        self._spent_s = float((earlier or {}).get("time_s") or 0.0)
        self._number = len(self._known)

    @property
    def spent_s(self) -> float:
        """Return the seconds that this search has spent on predictions so far."""
        return self._spent_s

    @property
    def summary(self) -> dict[str, Any]:
        """Return what the report says of it; empty if nothing was predicted."""
        if not self._known:
            return {}
        done = [item for item in self._known.values() if item.outcome is Outcome.OK]
        over = [item for item in done if (item.peak_bytes or 0) > self._plan.budget_bytes]
        return {
            "num_predicted": len(done),
            "num_failed": len(self._known) - len(done),
            "num_too_large": len(over),
            "num_candidates": self._plan.space.size(SIZE_LIMIT),
            "time_s": self._spent_s,
            "stand_in": (self._stand_in or {}).get("name", ""),
        }

    def guesses(self) -> list[Guess]:
        """Return what is guessed of the candidates that were predicted, in the order of that."""
        return [
            Guess(
                candidate=dict(item.candidate),
                values=tuple(item.values.get(objective.name) for objective in self._objectives),
                load=None if item.peak_bytes is None else item.peak_bytes / self._budget_bytes,
                time_shares=item.time_shares,
                memory_shares=item.memory_shares,
            )
            for item in self._known.values()
        ]

    def run(
        self,
        executor: Executor,
        trials: Sequence[Trial],
        num_trials: int | None,
        wall_time_s: float | None,
        deadline_s: float | None = None,
    ) -> None:
        """Predict candidates until all are done or the time for it is used up.

        Args:
            executor: Where the search's own probes run; none runs meanwhile.
            trials: Those so far, the baseline among them.
            num_trials: Probes of the search; None if only time limits it.
            wall_time_s: Limit of the search's time; None if there is none.
            deadline_s: ``time.monotonic`` value at which the search ends; None for no limit.

        Raises:
            JournalError: If a prediction cannot be recorded.
        """
        started = time.monotonic()
        try:
            reason = self._run(executor, trials, num_trials, wall_time_s, deadline_s)
        except OSError as error:
            raise JournalError(
                f"{self._folder.work} cannot be written: {error.strerror or error}.",
                hint="Free space on the disk and continue with --resume.",
            ) from error
        except JournalError:
            raise
        except AutotuneError as error:
            # Without guesses a search goes on as it would have without them.
            reason = f"{error.message.rstrip('.')}. {error.hint}".strip().rstrip(".")
        finally:
            self._spent_s += time.monotonic() - started
        if reason and self._known:
            self.notices = (f"Predicting candidates ended early: {reason}.",)
        elif reason:
            self.notices = (f"Candidates were not predicted before they were probed: {reason}.",)

    @property
    def _budget_bytes(self) -> int:
        return max(self._plan.budget_bytes, 1)

    def _run(
        self,
        executor: Executor,
        trials: Sequence[Trial],
        num_trials: int | None,
        wall_time_s: float | None,
        deadline_s: float | None,
    ) -> str:
        """Predict, and return why nothing was predicted; empty if something was."""
        started = time.monotonic()
        if reason := standin_probes.not_screened(self._plan):
            return reason
        baseline = next((trial for trial in trials if trial.number == 0), None)
        probe_s = _time_s(baseline)
        if baseline is None or probe_s is None:
            return "the time of the baseline's probe is not known"
        size = self._plan.space.size(MOST)
        planned = size if num_trials is None else min(num_trials, size)
        if sum(trial.num_probes > 0 for trial in trials) >= planned:
            return ""  # there is nothing left to choose
        allowed = allowance_s(
            probe_s,
            num_trials=planned,
            wall_time_s=wall_time_s,
            slots=executor.slots,
            spent_s=self._spent_s,
            share=self._share,
        )
        end_s = started + allowed
        if deadline_s is not None:
            end_s = min(end_s, deadline_s)
        if allowed > START_S >= end_s - started:
            return "the time of the search is nearly used up"
        if allowed <= START_S:
            # What an interrupted part has predicted is used all the same.
            return "" if self._known else _too_short(max(allowed, 0.0))
        first, others = self._pool(trials, allowed)
        if not first and not others:
            return ""
        card = self._card(executor, baseline)
        if card is None:
            return "nothing is known of a card with so little memory"
        return self._predict(card, first, others, end_s)

    def _card(self, executor: Executor, baseline: Trial) -> Card | None:
        """Return the stand-in, the one that earlier predictions of this search are for if any."""
        if self._stand_in is not None:
            return standin.card_of(self._stand_in, self._file)
        card = standin_probes.card_for(self._plan, executor, baseline)
        if card is not None:
            self._stand_in = asdict(card)
            screened.append_stand_in(self._file, self._stand_in)
        return card

    def _pool(
        self, trials: Sequence[Trial], allowed_s: float
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the candidates to predict: those that come first, and the others."""
        space = self._plan.space
        wanted = [space.baseline, space.leanest, *(trial.candidate for trial in trials)]
        first = {space.digest(item): dict(item) for item in wanted}
        others, most = pool(space, seed=self._plan.request.seed), MOST
        if len(others) >= MOST:
            affordable = int(allowed_s * host.usable_cpus() / _FASTEST_S)
            most = min(MOST, max(affordable, _POOL_AT_LEAST))
        found = dict(first)
        for candidate in others:
            if len(found) >= most:
                break
            found.setdefault(space.digest(candidate), candidate)
        left = {digest: item for digest, item in found.items() if digest not in self._known}
        return (
            [item for digest, item in left.items() if digest in first],
            [item for digest, item in left.items() if digest not in first],
        )

    def _predict(
        self,
        card: Card,
        first: list[dict[str, Any]],
        others: list[dict[str, Any]],
        deadline_s: float,
    ) -> str:
        device = standin_probes.write_card(card, self._folder.work / "stand-in.toml")
        known = [item.candidate for item in self._known.values()]
        order = spread(first, others, known=known, seed=self._plan.request.seed)
        num_all = len(first) + len(others) + len(known)
        shutil.rmtree(self._place, ignore_errors=True)  # left by a run that was killed
        executor = self._open_executor(device, self._plan, self._folder)
        try:
            self._on_screen(len(known), num_all)
            return self._run_all(executor, card, device, order, deadline_s, num_all)
        finally:
            executor.shutdown()
            shutil.rmtree(self._place, ignore_errors=True)
            if len(self._known) < num_all:
                self._on_screen(len(self._known), len(self._known))

    def _run_all(
        self,
        executor: Executor,
        card: Card,
        device: str,
        order: Iterator[dict[str, Any]],
        deadline_s: float,
        num_all: int,
    ) -> str:
        running: dict[Future[ProbeResult], _Waiting] = {}
        last = ""
        num_ok = num_done = 0
        while True:
            # One that would be cut off by the end costs time and tells nothing.
            while len(running) < executor.slots and time.monotonic() + self._usual_s < deadline_s:
                candidate = next(order, None)
                if candidate is None:
                    break
                waiting = self._waiting(device, candidate)
                running[executor.submit(waiting.spec)] = waiting
            left = deadline_s - time.monotonic()
            if not running or left <= 0:
                break  # what still runs ends with the executor
            done, _ = wait(running, timeout=left, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                self._record(running.pop(future), result, card)
                num_done += 1
                num_ok += result.outcome is Outcome.OK
                last = last if result.outcome is Outcome.OK else result.detail
                self._on_screen(len(self._known), num_all)
            if num_done >= MAX_FRUITLESS and not num_ok:
                return f"the first {num_done} predictions failed, the last one with: {last}"
        if not self._known:
            return "there was no time for a single prediction"
        return ""

    @property
    def _usual_s(self) -> float:
        """Return what a prediction takes on average, in seconds; 0 if there was none yet."""
        times = [item.time_s for item in self._known.values() if item.time_s is not None]
        return sum(times) / len(times) if times else 0.0

    def _waiting(self, device: str, candidate: dict[str, Any]) -> _Waiting:
        self._number += 1
        folder = self._place / f"{self._number:04d}"
        spec = standin_probes.spec_for(self._plan, candidate, device, folder)
        return _Waiting(candidate, self._plan.space.digest(candidate), spec)

    @property
    def _place(self) -> Path:
        return self._folder.work / "screening"

    def _record(self, waiting: _Waiting, result: ProbeResult, card: Card) -> None:
        values: dict[str, float] = {}
        peak_bytes = None
        if result.measurement is not None:
            measurement = standin.as_measured(
                self._plan.context.device.kind, result.measurement, card
            )
            peak_bytes = measurement.peak_bytes
            for objective in self._objectives:
                try:
                    values[objective.name] = objective.of(measurement).median
                except ValueError:  # it has none
                    continue
        prediction = Screened(
            digest=waiting.digest,
            candidate=waiting.candidate,
            outcome=result.outcome,
            values=values,
            peak_bytes=peak_bytes,
            time_s=_work_s(result),
            time_shares=standin.time_shares(result.measurement, card),
            memory_shares=standin.memory_shares(result.measurement, card),
        )
        screened.append(self._file, prediction)
        self._known[waiting.digest] = prediction
        # Thousands of them would fill the disk, and nobody looks at them.
        shutil.rmtree(waiting.spec.folder, ignore_errors=True)


def _time_s(trial: Trial | None) -> float | None:
    """Return the time of a trial's last probe as a whole, in seconds."""
    if trial is None or not trial.results:
        return None
    return trial.results[-1].timeline.total_s


def _work_s(result: ProbeResult) -> float | None:
    """Return a probe's time without that of starting the process that it was forked from."""
    line = result.timeline
    return None if line.total_s is None else line.total_s - (line.start_s or 0.0)


def _too_short(allowed_s: float) -> str:
    return (
        f"{SHARE:.0%} of the time that the probes should take are {format_duration(allowed_s)},"
        " and predicting would take longer"
    )
