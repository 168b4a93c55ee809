"""A search's progress on standard error: a bar, a line per probe, the Pareto set so far."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.probe import prediction
from autotune.report.cells import settings
from autotune.report.model import SIZE_LIMIT
from autotune.report.terminal import probe_line
from autotune.units import counted, format_duration, format_gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from autotune.listener import Budget
    from autotune.plan import Plan
    from autotune.report.model import Report, Trial


class Progress:
    """Draws a search's events; without a terminal or with NO_COLOR, one plain line per event.

    Args:
        console: Standard error.
        head: What to say first.
        said: What was said of the set-up of earlier searches, and is not said again.
    """

    def __init__(
        self,
        console: Console,
        *,
        head: str = "starting the worker and reading model and data ...",
        said: set[str] | None = None,
    ) -> None:
        self._console = console
        self._head = head
        self._said = said if said is not None else set()
        self._bar: Any = None
        self._task: TaskID | None = None
        self._baseline: dict[str, Any] = {}
        self._num_trials: int | None = None
        self._num_confirmed = 0
        self._running: set[int] = set()
        self._has_said_order = False
        self._is_confirming = False
        self._is_predicting = False
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        self._say(self._head)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_plan(self, plan: Plan, budget: Budget) -> None:
        """Say what is searched, on what, within which budget."""
        self._baseline = dict(plan.space.baseline)
        size = plan.space.size(SIZE_LIMIT)
        self._num_trials = size if budget.trials is None else min(budget.trials, size)
        if budget.trials is None and size == SIZE_LIMIT:
            self._num_trials = None  # only the time ends it
        device, data = plan.context.device, plan.context.data
        self._say_once(
            f"{plan.context.model.architecture}, {plan.context.model.num_parameters:,} "
            f"parameters; {counted(data.num_rows, 'row')}, {data.num_tokens:,} tokens, longest "
            f"{data.longest:,}"
        )
        self._say(
            f"device: {device.label}; budget {format_gib(plan.budget_bytes)} "
            f"({plan.budget_source}); global batch {plan.context.global_batch}"
        )
        if device.is_virtual:
            self._say_once(f"note: {prediction.trust(device.label)}")
        for notice in plan.notices:
            self._say_once(f"note: {notice}")
        self._start_bar()

    def _start_bar(self) -> None:
        if not self._console.is_terminal or self._console.no_color:
            return
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("baseline", total=self._num_trials)
        self._bar.start()

    def on_probe(self, number: int, candidate: Mapping[str, Any]) -> None:
        """Show which candidate is being probed."""
        self._running.add(number)
        if len(self._running) > 1 and not self._has_said_order:
            self._has_said_order = True
            self._say("note: several probes run at a time, so they do not end in numbers' order")
        if self._bar is None or self._task is None:
            return
        differing = {k: v for k, v in candidate.items() if self._baseline.get(k) != v}
        shown = settings(differing) if differing else "baseline"
        self._bar.update(self._task, description=f"trial {number} {shown[:60]}")

    def on_trial(self, trial: Trial, report: Report) -> None:
        """Write the trial's line, and the Pareto set when it changed."""
        again = self._is_confirming
        self._running.discard(trial.number)
        probed = sum(item.num_probes > 0 for item in report.trials)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=probed)
            head = "again  " if again else ""
        else:
            head = f"[{self._place(trial, probed, again)}] "
        self._say(head + probe_line(trial, report.baseline))
        if trial.number in report.pareto_numbers and not again:
            said = " predicted" if report.is_predicted else ""
            members = ", ".join(
                f"{item.number} ({format_gib(item.peak_bytes)}{said})" for item in report.pareto
            )
            self._say(f"  Pareto set so far: trial {members}")

    def _place(self, trial: Trial, probed: int, again: bool) -> str:
        """Return what the bar shows where there is one: how far it is, and for how long."""
        elapsed = format_duration(time.monotonic() - self._started)
        if again:
            self._num_confirmed += 1
            return f"again {self._num_confirmed}, {elapsed}"
        if trial.num_probes == 0:
            return f"no probe, {elapsed}"
        of = "" if self._num_trials is None else f" of {self._num_trials:,}"
        return f"{probed}{of}, {elapsed}"

    def on_screen(self, num_done: int, num_all: int) -> None:
        """Say that candidates are predicted, show how many were, and say it at the end."""
        if not self._is_predicting:
            self._is_predicting = True
            self._say("predicting candidates for this device before they are probed ...")
        elif num_done == num_all:
            self._is_predicting = False
            self._say(f"{counted(num_done, 'candidate')} predicted")
        if self._bar is not None and self._task is not None:
            shown = f"predicted {num_done:,} of {num_all:,}"
            self._bar.update(self._task, description=shown)

    def on_confirm(self, numbers: Sequence[int]) -> None:
        """Say that the finalists are probed again."""
        self._is_confirming = True
        named = ", ".join(str(number) for number in numbers)
        self._say(f"probing the Pareto set again, one at a time: trial {named}")

    def on_beyond(self, numbers: Sequence[int]) -> None:
        """Say that what does not fit is predicted once more, to see what it would need."""
        named = ", ".join(str(number) for number in numbers)
        self._say(f"nothing fits; predicting what the closest would need: trial {named}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        else:
            self._console.print(text, markup=False, soft_wrap=True)
