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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autotune import export, lessons, objectives
from autotune.devices import host
from autotune.errors import AutotuneError, JournalError
from autotune.executors.base import Executor
from autotune.executors.disk import temporary_folder
from autotune.executors.subprocess import SubprocessExecutor
from autotune.listener import Budget, Listener, Silent
from autotune.loop import SearchLoop
from autotune.masking import masked_command
from autotune.objectives import Constraint, Objective
from autotune.plan import Plan, Request, make_plan, make_profile
from autotune.probe import journal, sources
from autotune.report import warnings as report_warnings
from autotune.report.model import SIZE_LIMIT, Report, probe_work_s
from autotune.report.pareto import pareto_set
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.screen import Screening
from autotune.search import samplers
from autotune.search.storage import check_storage
from autotune.search.study import Study
from autotune.space.context import DataProfile
from autotune.space.space import SearchSpace


class Tuner:
    """A search for the memory configurations of one fine-tuning run.

    Args:
        model: Hub id or local folder.
        dataset: Hub id, or a local json, jsonl, parquet, csv or arrow file, or a folder.
        space: What is searched: a :class:`SearchSpace`, or its name or path.
        objectives: Two or more quantities; by default trained tokens/s and peak memory.
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
        listener: Hears of progress.
        command: The command line to record; a password in it is masked.
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
        listener: Listener | None = None,
        command: str = "",
        **request: Any,
    ) -> None:
        found = SearchSpace.load(space) if isinstance(space, str) else space
        self.request = Request(model=model, dataset=dataset, space=found, **request)
        samplers.resolve(sampler, num_trials=None, space_size=0)
        self.folder = RunFolder(run_dir if run_dir is not None else default_run_dir(model))
        self._learn_from = lessons.check_folders(learn_from, self.folder)
        self._learn_anyway = learn_anyway
        self._objectives = tuple(objectives) or _default_objectives()
        self._extra_constraints = tuple(constraints)
        self._executor = executor
        self._sampler = sampler
        self._storage = study
        self._resume = resume
        self._listener: Listener = listener if listener is not None else Silent()
        self._command = masked_command(command)
        self._report: Report | None = None

    @property
    def report(self) -> Report | None:
        """Return the report so far; None before the search has a plan."""
        return self._report

    @property
    def resume_command(self) -> str:
        """Return the command line that goes on with this search; empty if none is known."""
        try:
            words = shlex.split(self._command)
        except ValueError:  # not a command line, whatever a script has given
            words = []
        if not words:
            return ""
        if "--resume" not in words:
            words.append("--resume")
        if "demo" not in words and not any(word.startswith("--run-dir") for word in words):
            words += ["--run-dir", str(self.folder.path)]
        return shlex.join(words)

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
            plan = make_plan(self.request, folder, executor, budget_bytes=budget)
        self._learn(plan)
        if self._resume:
            self.folder.check_identity(plan.identity())
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

    def search(self, budget: Budget | None = None) -> Report:
        """Search until ``budget`` is used up and return the report.

        The run folder is current after each probe. A ``KeyboardInterrupt`` ends the running
        probe and returns the report so far, marked as interrupted.

        Raises:
            AutotuneError: If the search cannot go on; what was found is in the run folder.
        """
        budget = budget if budget is not None else Budget()
        self.folder.start(resume=self._resume)
        try:
            with self._open_executor(self.folder) as executor:
                return self._search(budget, executor)
        finally:
            self.folder.release()

    def _search(self, budget: Budget, executor: Executor) -> Report:
        started = time.monotonic()
        deadline = None if budget.wall_time_s is None else started + budget.wall_time_s
        earlier = self.folder.read_run() if self._resume else {}
        plan = make_plan(
            self.request, self.folder, executor, budget_bytes=earlier.get("budget_bytes")
        )
        if self._resume:
            self.folder.check_identity(plan.identity())
        learnt = self._learn(plan)
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
        )
        previous = _previous(self.folder) if self._resume else {}
        wall_before = float(previous.get("wall_time_s", 0.0))
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
            self._report = self._make_report(
                plan,
                loop,
                sampler,
                wall_time_s=wall,
                notices=(*plan.notices, *(unused or learnt.notices), *screening.notices),
                screening=screening.summary,
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
                loop.run(1, deadline)  # the baseline: what a probe takes is known then
                screening.run(executor, loop.trials, budget.trials, budget.wall_time_s, deadline)
                study.inform(screening.guesses(), learnt.lessons)
            loop.run(budget.trials, deadline)
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

    def _learn(self, plan: Plan) -> lessons.Learnt:
        return lessons.learn(self._learn_from, plan, self._objectives, anyway=self._learn_anyway)

    @contextlib.contextmanager
    def _open_executor(self, folder: RunFolder) -> Iterator[Executor]:
        """Lend the caller's executor, or one of our own that ends with the block."""
        if self._executor is not None:
            yield self._executor
            return
        device = self.request.device
        # Predictions take a processor each and share nothing, so as many run as there are.
        copies = host.usable_cpus() if device.startswith("virtual:") else 1
        executor = SubprocessExecutor(
            devices=(device,) * copies,
            processes=self.request.num_processes,
            timeout_s=self.request.probe_timeout_s,
            log_folder=folder.work,
            trainer=self.request.trainer,
        )
        try:
            yield executor
        finally:
            executor.shutdown()

    def _open_study(self, plan: Plan, budget: Budget, run_id: str) -> tuple[Study, str]:
        size = plan.space.size(SIZE_LIMIT)
        sampler = samplers.resolve(self._sampler, num_trials=budget.trials, space_size=size)
        identity = plan.identity()
        study = Study(
            plan.space.draw,
            directions=[item.direction for item in self._objectives],
            storage=self._storage or str(self.folder.study_file),
            name=_study_name(plan),
            sampler=sampler,
            seed=self.request.seed,
            num_trials=budget.trials,
            identity=identity,
            owner=run_id,
        )
        return study, sampler

    def _constraints(self) -> tuple[Constraint, ...]:
        own = [objectives.memory_budget()]
        if self.request.least_coverage > 0:
            own.append(objectives.coverage(self.request.least_coverage))
        return (*own, *self._extra_constraints)

    def _write_run(self, plan: Plan, run_id: str) -> None:
        self.folder.write_run(
            plan.identity(),
            {
                "run_id": run_id,
                "created_at": _now(),
                "budget_bytes": plan.budget_bytes,
                "budget_source": plan.budget_source,
                "command": self._command,
                "config": dict(plan.base_config),
                "versions": _versions(plan.environment),
            },
        )

    def _make_report(
        self,
        plan: Plan,
        loop: SearchLoop,
        sampler: str,
        *,
        wall_time_s: float,
        notices: tuple[str, ...],
        screening: Mapping[str, Any],
        finished: bool = False,
        interrupted: bool = False,
    ) -> Report:
        members = pareto_set(loop.trials, self._objectives)
        numbers = tuple(trial.number for trial in members)
        data = plan.context.data
        return Report(
            trainer=plan.request.trainer,
            model=plan.request.model,
            dataset=plan.request.dataset,
            trials=tuple(sorted(loop.trials, key=lambda trial: trial.number)),
            pareto_numbers=numbers,
            created_at=_now(),
            finished=finished,
            interrupted=interrupted,
            device=plan.context.device.to_dict(),
            model_facts=plan.context.model.to_dict(),
            data={
                "format": data.format,
                "fingerprint": data.fingerprint,
                "num_rows": data.num_rows,
                "num_empty_rows": data.num_empty_rows,
                "num_tokens": data.num_tokens,
                "num_loss_tokens": data.num_loss_tokens,
                "longest": data.longest,
                "mean_length": data.mean_length,
                "median_length": data.quantile(0.5),
            },
            budget_bytes=plan.budget_bytes,
            budget_source=plan.budget_source,
            global_batch=plan.context.global_batch,
            min_coverage=plan.request.least_coverage,
            space=plan.request.space.name,
            space_digest=plan.request.space.digest,
            num_candidates=plan.space.size(SIZE_LIMIT),
            inactive_knobs=tuple(plan.space.inactive),
            removed_values=tuple(
                (f"{name}={value}", reason) for name, value, reason in plan.space.removed
            ),
            lean_pins=plan.lean_pins,
            notices=notices,
            warnings=report_warnings.collect(
                loop.trials, pareto=numbers, resume_with=self.resume_command
            ),
            objectives=tuple(item.name for item in self._objectives),
            seed=plan.request.seed,
            sampler=sampler,
            weights=plan.request.weights,
            versions=_versions(plan.environment),
            wall_time_s=wall_time_s,
            probe_work_s=probe_work_s(loop.trials),
            num_slots=loop.num_slots,
            command=self._command,
            script=plan.script,
            screening=screening,
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


def default_run_dir(model: str) -> Path:
    """Return ``runs/<model>-<local time>``."""
    stamp = datetime.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{sources.short_name(model)}-{stamp}"


def _study_name(plan: Plan) -> str:
    """Return a name that hosts with the same search agree on, and others do not share."""
    text = json.dumps(plan.identity(), sort_keys=True)
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


def _default_objectives() -> tuple[Objective, ...]:
    return (objectives.peak_memory(), objectives.tokens_per_s())


def _previous(folder: RunFolder) -> dict[str, Any]:
    try:
        return Report.load(folder.report_file).to_dict()
    except JournalError:
        return {}


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    try:
        own = version("trl-autotune")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "trl-autotune": own,
        "python": str(environment.get("python", "")),
        **environment.get("packages", {}),
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
