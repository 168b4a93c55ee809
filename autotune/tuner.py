"""The Python API: a search from request to report."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import shlex
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune import composing, export, lessons, objectives
from autotune.devices import host
from autotune.errors import AutotuneError, JournalError
from autotune.executors.base import Executor, ending
from autotune.executors.disk import temporary_folder
from autotune.executors.subprocess import SubprocessExecutor
from autotune.listener import Budget, Listener, Silent
from autotune.loop import SearchLoop
from autotune.masking import masked_command
from autotune.objectives import Constraint, Objective
from autotune.plan import Plan, Request, make_plan, make_profile
from autotune.probe import journal, sources
from autotune.report.model import SIZE_LIMIT, Report
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.screen import Screening
from autotune.search import samplers
from autotune.search.pool import pool
from autotune.search.storage import check_storage
from autotune.search.study import Study
from autotune.space.context import DataProfile
from autotune.space.space import SearchSpace

ENDED = "The search ended after"


class Tuner:
    """A search for the memory configurations of one fine-tuning run.

    Args:
        model: Hub id or local folder.
        dataset: Hub id, or a local json, jsonl, parquet, csv or arrow file, or a folder.
        space: What is searched: a :class:`SearchSpace`, or its name or path.
        objectives: One or more quantities; by default trained tokens/s and peak memory. Of a
            single one, the Pareto set is the best trial, and what the noise cannot tell from it.
        constraints: Limits beyond the memory budget and the coverage.
        executor: Where probes run; it stays open. By default subprocesses on ``device``, which
            end with the search.
        run_dir: Folder of the run; by default ``runs/<model>-<time>``.
        sampler: ``auto`` or one of Optuna's: ``tpe``, ``nsgaii``, ``gp``, ``random``, ``grid``.
        study: Optuna storage URL or journal file; by default a journal in the run folder.
        resume: Go on with the search in ``run_dir``.
        learn_from: Folders of earlier searches on this device, of this or another model, of which
            the sampler learns how far predictions are off.
        learn_anyway: Learn from them even if device, versions or trainer differ.
        screen: Whether candidates are predicted before they are probed, where that can be done
            and the sampler learns of it.
        listener: Hears of progress.
        command: The command line to record; a password in it is masked.
        shared: Folder whose ``work`` takes the tokenised rows where several searches share them;
            it stays. By default the run's own.
        **request: Further fields of :class:`autotune.plan.Request`, such as ``device``,
            ``memory_budget_bytes``, ``global_batch``, ``pins`` and ``processes``.
    """

    def __init__(
        self,
        model: str,
        dataset: str,
        *,
        space: SearchSpace | str = "sft",
        objectives: Sequence[Objective] = (),
        constraints: Sequence[Constraint] = (),
        executor: Executor | None = None,
        run_dir: str | Path | None = None,
        sampler: str = "auto",
        study: str | None = None,
        resume: bool = False,
        learn_from: Sequence[str | Path] = (),
        learn_anyway: bool = False,
        screen: bool = True,
        listener: Listener | None = None,
        command: str = "",
        shared: RunFolder | None = None,
        **request: Any,
    ) -> None:
        found = SearchSpace.load(space) if isinstance(space, str) else space
        self.request = Request(model=model, dataset=dataset, space=found, **request)
        samplers.resolve(sampler, num_trials=None, space_size=0)
        self.folder = RunFolder(run_dir if run_dir is not None else default_run_dir(model))
        self._learn_from = lessons.check_folders(learn_from, self.folder)
        self._learn_anyway = learn_anyway
        self._screen = screen
        self._objectives = tuple(objectives) or _default_objectives()
        self._extra_constraints = tuple(constraints)
        self._executor = executor
        self._sampler = sampler
        self._storage = study
        self._resume = resume
        self._listener: Listener = listener if listener is not None else Silent()
        self._command = masked_command(command)
        self._shared = shared
        self._report: Report | None = None

    @property
    def report(self) -> Report | None:
        """Return the report so far; None before the search has a plan."""
        return self._report

    @property
    def resume_command(self) -> str:
        """Return the command line that goes on with this search; empty if none is known."""
        return resume_command(self._command, self.folder)

    def plan(self, *, check: bool = False) -> Plan:
        """Gather the facts and resolve the space without probing or recording anything.

        Args:
            check: Whether to look as well if :meth:`search` could write to the run folder and
                the study, and go on with the search that it is to resume.

        Raises:
            AutotuneError: If model, data, device, space or pins cannot be used.
        """
        if not check:
            with self._scratch() as (folder, executor):
                return make_plan(self.request, folder, executor)
        self.folder.check(resume=self._resume)
        if self._storage is not None:
            check_storage(self._storage)
        earlier = self.folder.read_run() if self._resume else {}
        budget = earlier.get("budget_bytes")
        with self._scratch() as (folder, executor):
            data = self._shared or folder
            plan = make_plan(self.request, data, executor, budget_bytes=budget)
        self._learn(plan, earlier)
        if self._resume:
            self.folder.check_identity(self._identity(plan))
            load_trials(self.folder)
            if self._storage is None:
                check_storage(str(self.folder.study_file))
        return plan

    def profile(self) -> DataProfile:
        """Return the token lengths of the data, as TRL tokenises it; nothing else is looked at.

        Raises:
            AutotuneError: If model or data cannot be used.
        """
        return self.lengths()[0]

    def lengths(self) -> tuple[DataProfile, tuple[int, ...]]:
        """Return what :meth:`profile` does, and each ``max_length`` that the space offers for it.

        Raises:
            AutotuneError: If model or data cannot be used.
        """
        with self._scratch() as (folder, executor):
            return make_profile(self.request, folder, executor)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[tuple[RunFolder, Executor]]:
        with temporary_folder("autotune-") as path:
            folder = RunFolder(path)
            folder.work.mkdir()
            with self._open_executor(folder) as executor:
                yield folder, executor

    def search(
        self, budget: Budget | None = None, *, also: Sequence[Mapping[str, Any]] | None = None
    ) -> Report:
        """Search until ``budget`` is used up and return the report.

        The run folder is current after each probe. A ``KeyboardInterrupt`` ends the running
        probe and returns the report so far, marked as interrupted.

        Args:
            budget: When the search ends.
            also: Candidates to try in a search that has ended, in place of going on with it, such
                as those that are best on another device. Those that cannot be drawn here, or were
                tried, are left out; of the budget the time counts.

        Raises:
            AutotuneError: If the search cannot go on; what was found is in the run folder.
        """
        budget = budget if budget is not None else Budget()
        self.folder.start(resume=self._resume)
        try:
            with self._open_executor(self.folder) as executor:
                return self._search(budget, executor, also)
        finally:
            self.folder.release()

    def _search(
        self,
        budget: Budget,
        executor: Executor,
        also: Sequence[Mapping[str, Any]] | None,
    ) -> Report:
        started = time.monotonic()
        deadline = None if budget.wall_time_s is None else started + budget.wall_time_s
        earlier = self.folder.read_run() if self._resume else {}
        data, budget_bytes = self._shared or self.folder, earlier.get("budget_bytes")
        plan = make_plan(self.request, data, executor, budget_bytes=budget_bytes)
        if self._resume:
            self.folder.check_identity(self._identity(plan))
        learnt = self._learn(plan, earlier)
        run_id = str(earlier.get("run_id") or uuid.uuid4().hex)
        study, sampler = self._open_study(plan, budget, run_id)
        if not self._resume:
            self._write_run(plan, run_id)
        loop = SearchLoop(
            plan,
            study,
            executor,
            self.folder,
            objectives=self._objectives,
            constraints=self._constraints(),
            trials=load_trials(self.folder),
            on_probe=self._listener.on_probe,
            on_trial=lambda trial: heard(trial),
            min_gain=budget.min_gain,
        )
        previous = _previous(self.folder) if self._resume else {}
        wall_before = float(previous.get("wall_time_s", 0.0))
        ended = [text for text in previous.get("notices", ()) if text.startswith(ENDED)]
        unused = _unused(study, plan) if self._learn_from else ()
        screening = Screening(
            plan,
            self.folder,
            self._objectives,
            earlier=previous.get("screening"),
            on_screen=self._listener.on_screen,
        )

        def publish(**state: Any) -> Report:
            wall = wall_before + time.monotonic() - started
            self._report = composing.compose(
                plan,
                loop.trials,
                self._objectives,
                sampler=sampler,
                wall_time_s=wall,
                num_slots=loop.num_slots,
                notices=(
                    *plan.notices,
                    *(unused or learnt.notices),
                    *screening.notices,
                    *(settled_notice(loop, budget) if also is None else ended),
                ),
                screening=screening.summary,
                command=self._command,
                resume_with=self.resume_command,
                **state,
            )
            self._report.save(self.folder.report_file)
            export.write_configs(self._report, self.folder.configs)
            return self._report

        def heard(trial: Trial) -> None:
            self._listener.on_trial(trial, publish())

        self._listener.on_plan(plan, budget)
        study.close_abandoned()
        try:
            if study.wants_guesses and not plan.context.device.is_virtual:
                if self._screen and also is None:
                    loop.run(1, deadline)  # the baseline: what a probe takes is known then
                    limits = (budget.trials, budget.wall_time_s, deadline)
                    screening.run(executor, loop.trials, *limits)
                study.inform(screening.guesses(), learnt.lessons)
            if also is None:
                loop.run(budget.trials, deadline)
            else:
                loop.run_also(also, deadline)
            grace = None if deadline is None else deadline + budget_grace(budget)
            finalists = [item.number for item in loop.unconfirmed()]
            if finalists:
                self._listener.on_confirm(finalists)
                loop.confirm(grace)
            if beyond := loop.to_predict_beyond():
                self._listener.on_beyond([trial.number for trial in beyond])
                loop.predict_beyond(beyond, grace)
        except KeyboardInterrupt:
            executor.shutdown()
            return publish(interrupted=True)
        except AutotuneError as error:
            if _was_interrupted(error):
                executor.shutdown()
                return publish(interrupted=True)
            with contextlib.suppress(JournalError):  # such as a full disk, which is the error
                publish()
            raise
        report = publish(finished=True)
        self.folder.clear_work()
        return report

    def _learn(self, plan: Plan, earlier: Mapping[str, Any]) -> lessons.Learnt:
        return lessons.learn(
            self._learn_from,
            plan,
            self._objectives,
            anyway=self._learn_anyway,
            own_id=str(earlier.get("run_id") or ""),
        )

    @contextlib.contextmanager
    def _open_executor(self, folder: RunFolder) -> Iterator[Executor]:
        """Lend the caller's executor, or one of our own that ends with the block."""
        if self._executor is not None:
            yield self._executor
            return
        device = self.request.device
        # Predictions take a processor each and share nothing, so as many run as there are.
        copies = host.usable_cpus() if device.startswith("virtual:") else 1
        with ending(
            SubprocessExecutor(
                devices=(device,) * copies,
                processes=self.request.num_processes,
                timeout_s=self.request.probe_timeout_s,
                log_folder=folder.work,
                trainer=self.request.trainer,
            )
        ) as executor:
            yield executor

    def _open_study(self, plan: Plan, budget: Budget, run_id: str) -> tuple[Study, str]:
        size = plan.space.size(SIZE_LIMIT)
        sampler = samplers.resolve(self._sampler, num_trials=budget.trials, space_size=size)
        identity = self._identity(plan)
        study = Study(
            plan.space.draw,
            directions=[item.direction for item in self._objectives],
            storage=self._storage or str(self.folder.study_file),
            name=_study_name(plan, identity),
            sampler=sampler,
            seed=self.request.seed,
            num_trials=budget.trials,
            identity=identity,
            owner=run_id,
            candidates=lambda: pool(plan.space, seed=self.request.seed),
            objectives=[item.name for item in self._objectives],
        )
        return study, sampler

    def _identity(self, plan: Plan) -> dict[str, Any]:
        """Return what must be the same for results to belong to one search."""
        names = tuple(item.name for item in self._objectives)
        if set(names) == set(objectives.DEFAULT_NAMES):
            return plan.identity()  # as in records from before others could be asked for
        return {**plan.identity(), "objectives": list(names)}

    def _constraints(self) -> tuple[Constraint, ...]:
        own = [objectives.memory_budget()]
        if self.request.least_coverage > 0:
            own.append(objectives.coverage(self.request.least_coverage))
        return (*own, *self._extra_constraints)

    def _write_run(self, plan: Plan, run_id: str) -> None:
        self.folder.write_run(
            self._identity(plan),
            {
                "run_id": run_id,
                "created_at": composing.now(),
                "budget_bytes": plan.budget_bytes,
                "budget_source": plan.budget_source,
                "command": self._command,
                "config": dict(plan.base_config),
                "versions": composing.versions(plan.environment),
            },
        )


def load_trials(folder: RunFolder) -> list[Trial]:
    """Return the trials of a run folder's journal; the last record of a number counts.

    Raises:
        JournalError: If the journal is damaged.
    """
    trials: dict[int, Trial] = {}
    for line, record in folder.records():
        try:
            if record["kind"] == "trial":
                trial = Trial.from_dict(record["trial"])
                trials[trial.number] = trial
        except KeyError as error:
            raise journal.damaged(folder.journal_file, line, f"{error} is missing") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise journal.damaged(folder.journal_file, line, str(error)) from error
    return sorted(trials.values(), key=lambda trial: trial.number)


def resume_command(command: str, folder: RunFolder) -> str:
    """Return the command line that goes on with what ``command`` began; empty if none is known."""
    try:
        words = shlex.split(command)
    except ValueError:  # not a command line, whatever a script has given
        words = []
    if not words:
        return ""
    if "--resume" not in words:
        words.append("--resume")
    if "demo" not in words and not any(word.startswith("--run-dir") for word in words):
        words += ["--run-dir", str(folder.path)]
    return shlex.join(words)


def default_run_dir(model: str) -> Path:
    """Return ``runs/<model>-<local time>``."""
    stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{sources.short_name(model)}-{stamp}"


def _study_name(plan: Plan, identity: Mapping[str, Any]) -> str:
    """Return a name that hosts with the same search agree on, and others do not share."""
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    model = sources.short_name(plan.request.model)
    return f"autotune-{model}-{plan.request.trainer}-{digest}"


def _unused(study: Study, plan: Plan) -> tuple[str, ...]:
    """Return a notice where nothing takes what earlier runs teach; empty if the sampler does."""
    if not study.wants_guesses:
        text = "Nothing was learnt from earlier runs: give --sampler learned, which does."
        return (text,)
    if plan.context.device.is_virtual:
        text = "Nothing was learnt from earlier runs: they correct predictions of a real device."
        return (text,)
    return ()


def _was_interrupted(error: BaseException) -> bool:
    """Whether ``error`` arose while an interrupt was unwinding, as from Optuna's file lock."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def budget_grace(budget: Budget) -> float:
    """Return the seconds that confirming may take beyond a wall-time budget: a quarter of it."""
    return 0.25 * (budget.wall_time_s or 0.0)


def settled_notice(loop: SearchLoop, budget: Budget) -> list[str]:
    """Return that a search ended before its budget, and why; nothing if it did not."""
    if not loop.settled or budget.trials is None or loop.num_probed >= budget.trials:
        return []
    return [
        f"{ENDED} {loop.num_probed} of {budget.trials} trials: no other candidate"
        f" is expected to add as much as {budget.min_gain:.1%} to what the Pareto set dominates."
        " --min-gain 0 with --resume uses the budget up."
    ]


def _default_objectives() -> tuple[Objective, ...]:
    return objectives.named(objectives.DEFAULT_NAMES)


def _previous(folder: RunFolder) -> dict[str, Any]:
    try:
        return Report.load(folder.report_file).to_dict()
    except JournalError:
        return {}
