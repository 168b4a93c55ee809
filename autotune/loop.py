"""The loop of a search: ask, probe, tell, journal - until the budget or the space is used up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.errors import AutotuneError, BaselineError
from autotune.executors.base import Executor
from autotune.implied import changed, implied_by, is_too_large
from autotune.objectives import Constraint, Objective, violations
from autotune.plan import Plan
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.probe_specs import probe_spec
from autotune.report import pareto
from autotune.report.compare import closest_first
from autotune.report.pareto import pareto_set, thinned
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.search.study import Proposal, Study

BASELINE = 0
MAX_CRASHES_IN_A_ROW = 3
MAX_REPEATED_DRAWS = 25
MAX_WALKED = 20_000
MAX_BLIND_DRAWS = 1000
MAX_FINALISTS = 8
CONFIRM_ROUNDS = 3
PATIENCE = 3
"""Probes in a row that were expected to gain next to nothing, after which a search ends."""

MAX_BEYOND = 4
"""Candidates that are predicted once more where nothing fits."""

_BROKEN_BASELINE = (Outcome.UNSUPPORTED, Outcome.CRASHED)


@dataclass(slots=True)
class _Pending:
    """A trial whose probe is running."""

    number: int
    candidate: dict[str, Any]
    digest: str
    proposal: Proposal | None
    results: list[ProbeResult] = field(default_factory=list)


class SearchLoop:
    """Runs the trials of one search.

    Args:
        plan: What is fixed.
        study: Where candidates come from; None proposes only the baseline.
        executor: Where probes run.
        folder: Where every result is recorded before anything else happens with it.
        objectives: What is optimised.
        constraints: What must be kept.
        trials: Trials of an earlier run that is being resumed.
        on_trial: Called with each finished trial.
        on_probe: Called as each probe starts, with its number and candidate.
        min_gain: Share of the front's hypervolume below which a candidate is not worth a probe,
            by what the sampler expects of it; 0 to go on until the budget is used up.

    Attributes:
        trials: All that have ended.
        exhausted: Whether the space is used up.
        settled: Whether no candidate was left that was expected to gain ``min_gain``.
    """

    def __init__(
        self,
        plan: Plan,
        study: Study,
        executor: Executor,
        folder: RunFolder,
        *,
        objectives: Sequence[Objective],
        constraints: Sequence[Constraint],
        trials: Sequence[Trial] = (),
        on_trial: Callable[[Trial], None] = lambda trial: None,
        on_probe: Callable[[int, Mapping[str, Any]], None] = lambda number, candidate: None,
        min_gain: float = 0.0,
    ) -> None:
        self.trials: list[Trial] = list(trials)
        if len(self.trials) == 1 and self.trials[0].outcome in _BROKEN_BASELINE:
            self.trials = []  # the set-up was broken; it may have been mended
        self.exhausted = False
        self.settled = False
        self._min_gain = min_gain
        self._num_idle = 0
        self._plan = plan
        self._study = study
        self._executor = executor
        self._folder = folder
        self._objectives = tuple(objectives)
        self._constraints = tuple(constraints)
        self._on_trial = on_trial
        self._on_probe = on_probe
        self._random = random.Random(plan.request.seed)
        self._running: dict[Future[ProbeResult], _Pending] = {}
        self._unseen: list[dict[str, Any]] | None = None
        self._tried_leanest = False
        self._next_number = 1 + max((trial.number for trial in self.trials), default=BASELINE)

    def run(self, num_trials: int | None, deadline_s: float | None) -> None:
        """Probe until ``num_trials`` trials have one, the deadline passes or none is left.

        Args:
            num_trials: Trials with a probe, those of a resumed run included; None for no limit.
            deadline_s: ``time.monotonic`` value after which no further probe starts.

        Raises:
            BaselineError: If the baseline is unsupported or crashes.
            AutotuneError: If three probes in a row crash.
        """
        while True:
            while len(self._running) < self._executor.slots and self._may_start(
                num_trials, deadline_s
            ):
                pending = self._next(deadline_s)
                if pending is None:
                    self.exhausted = not _is_past(deadline_s)
                    break
                self._submit(pending)
            if not self._running:
                return
            self._collect()

    def run_also(
        self, candidates: Sequence[Mapping[str, Any]], deadline_s: float | None
    ) -> list[int]:
        """Probe candidates whatever the budget; those not of the space or known are left out.

        Returns:
            The numbers of the trials.
        """
        before, settled, exhausted = len(self.trials), self.settled, self.exhausted
        self._tried_leanest = True  # nothing else is to be drawn in their place
        for candidate in candidates:
            if self._known(self._plan.space.digest(candidate)) is None and self._study.enqueue(
                candidate
            ):
                self.settled = self.exhausted = False
                self.run(self.num_probed + 1, deadline_s)
        self.settled, self.exhausted = settled, exhausted
        return [trial.number for trial in self.trials[before:]]

    def confirm(self, deadline_s: float | None) -> None:
        """Probe the members of the Pareto set again, alone, until each has been confirmed.

        A second probe may move a member off the front and another onto it, so this is repeated a
        few times; at most eight members, spread over the front, are confirmed.
        """
        for _ in range(CONFIRM_ROUNDS):
            waiting = self.unconfirmed()
            if not waiting:
                return
            for trial in waiting:
                if _is_past(deadline_s):
                    return
                self._confirm(trial)

    def unconfirmed(self) -> list[Trial]:
        """Return the finalists that one probe alone speaks for.

        A prediction repeated is the same prediction, so that there is nothing to confirm.
        """
        return [
            trial
            for trial in self.finalists()
            if not trial.confirmed and trial.source == "measured"
        ]

    def to_predict_beyond(self) -> list[Trial]:
        """Return the trials to predict once more without the card's limit; empty if one ran.

        What the allocation lacked that failed first says little of what the whole run needs. A few
        of those that came closest are enough, and the leanest candidate, if it was tried.
        """
        ran = any(trial.outcome is Outcome.OK for trial in self.trials)
        if ran or not self.trials or not self._plan.context.device.is_virtual:
            return []
        leanest = self._plan.space.digest(self._plan.space.leanest)
        failed = [item for item in self.trials if item.outcome is Outcome.DEVICE_OOM]
        chosen = [item for item in failed if item.digest == leanest]
        for trial in closest_first(failed):
            if len(chosen) < MAX_BEYOND and trial not in chosen:
                chosen.append(trial)
        return [trial for trial in chosen if trial.needed_bytes is None]

    def predict_beyond(self, trials: Sequence[Trial], deadline_s: float | None) -> None:
        """Note what trials that ran out would need, each in one probe without the card's limit."""
        if _is_past(deadline_s):
            return
        probes = [(trial, self._executor.submit(self._beyond(trial))) for trial in trials]
        for trial, future in probes:
            measurement = future.result().measurement
            if measurement is not None:
                self._replace(replace(trial, needed_bytes=measurement.peak_bytes))

    def finalists(self) -> list[Trial]:
        """Return the Pareto set, thinned evenly by memory to at most eight members."""
        return thinned(pareto_set(self.trials, self._objectives), MAX_FINALISTS)

    @property
    def num_slots(self) -> int:
        """Return how many probes run at a time, at most."""
        return self._executor.slots

    @property
    def num_probed(self) -> int:
        """Return the trials that took a probe."""
        return sum(trial.num_probes > 0 for trial in self.trials)

    @property
    def _has_baseline(self) -> bool:
        return any(trial.number == BASELINE for trial in self.trials)

    def _may_start(self, num_trials: int | None, deadline_s: float | None) -> bool:
        if not self._has_baseline:
            # It runs alone and first, and whatever was used up: without it there is nothing to
            # tell. A resumed run can lack it as well.
            return not self._running
        if self.exhausted or self.settled or _is_past(deadline_s):
            return False
        return num_trials is None or self.num_probed + len(self._running) < num_trials

    def _next(self, deadline_s: float | None) -> _Pending | None:
        """Return the next candidate worth a probe; None if the space or the time is used up."""
        if not self._has_baseline:
            return self._first()
        repeated = 0
        self._enqueue_leanest()
        while not _is_past(deadline_s):
            if repeated >= MAX_REPEATED_DRAWS and not self._enqueue_unseen():
                return None
            proposal = self._study.ask()
            digest = self._plan.space.digest(proposal.candidate)
            known = self._known(digest)
            if known is not None:
                self._study.tell_known(proposal, known)
                repeated += 1
                continue
            implied = implied_by(self._plan.space, proposal.candidate, self.trials)
            if implied is not None:
                self._record_implied(proposal, digest, implied[1])
                continue
            self._study.mark_digest(proposal, digest)
            self._note_gain()
            return _Pending(self._take_number(), proposal.candidate, digest, proposal)
        return None

    def _note_gain(self) -> None:
        """Count probes that are expected to gain next to nothing; enough of them end the search.

        They are still run: what they find may be what was not expected.
        """
        gain = self._study.expected_gain
        is_idle = gain is not None and gain < self._min_gain
        self._num_idle = self._num_idle + 1 if is_idle else 0
        self.settled = self._num_idle >= PATIENCE and any(item.feasible for item in self.trials)

    def _take_number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def _first(self) -> _Pending:
        baseline = dict(self._plan.space.baseline)
        proposal = self._study.ask() if self._study.enqueue(baseline) else None
        return _Pending(BASELINE, baseline, self._plan.space.digest(baseline), proposal)

    def _known(self, digest: str) -> int | None:
        for trial in self.trials:
            if trial.digest == digest:
                return trial.number
        for pending in self._running.values():
            if pending.digest == digest:
                return pending.number
        return -1 if digest in self._study.known_elsewhere() else None

    def _enqueue_leanest(self) -> None:
        """Make the next draw the leanest candidate, once, if the baseline is too large.

        Most samplers know nothing yet; drawn blindly, most of a small search would be too large.
        """
        if self._tried_leanest or any(trial.feasible for trial in self.trials):
            return
        if self._study.is_informed:
            return  # the sampler knows better what may fit
        self._tried_leanest = True
        baseline = next(trial for trial in self.trials if trial.number == BASELINE)
        leanest = self._plan.space.leanest
        if is_too_large(baseline) and self._known(self._plan.space.digest(leanest)) is None:
            self._study.enqueue(leanest)

    def _enqueue_unseen(self) -> bool:
        """Make the next draw a candidate that has not been seen; False if there is none.

        A small space is walked; in a huge one uniform draws find an unseen candidate at once.
        """
        space = self._plan.space
        if self._unseen is None and space.size(MAX_WALKED) < MAX_WALKED:
            self._unseen = list(space.enumerate())
            self._random.shuffle(self._unseen)
        if self._unseen is None:
            draws = (
                space.draw(lambda name, values, ordered: self._random.choice(values))
                for _ in range(MAX_BLIND_DRAWS)
            )
        else:
            draws = (self._unseen.pop() for _ in range(len(self._unseen)))
        for candidate in draws:
            if self._known(space.digest(candidate)) is None:
                return self._study.enqueue(candidate)
        return False

    def _submit(self, pending: _Pending) -> None:
        suffix = f"-{len(pending.results)}" if pending.results else ""
        spec = self._spec(f"{pending.number:04d}{suffix}", pending.candidate)
        self._on_probe(pending.number, pending.candidate)
        self._running[self._executor.submit(spec)] = pending

    def _spec(self, probe_id: str, candidate: Mapping[str, Any]) -> ProbeSpec:
        return probe_spec(self._plan, self._folder, probe_id, candidate)

    def _beyond(self, trial: Trial) -> ProbeSpec:
        spec = self._spec(f"{trial.number:04d}-beyond", trial.candidate)
        return replace(spec, beyond_device=True)

    def _collect(self) -> None:
        done, _ = wait(self._running, timeout=0.5, return_when=FIRST_COMPLETED)
        # Results first: one that could not be run ends the search.
        for future in sorted(done, key=lambda item: item.exception() is not None):
            pending = self._running.pop(future)
            result = future.result()
            pending.results.append(result)
            if len(pending.results) <= result.outcome.num_retries:
                self._submit(pending)
                continue
            self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        trial = self._trial(pending, pending.results[-1].outcome)
        self._record(trial)
        if pending.proposal is not None:
            self._tell(pending.proposal, trial)
        self._on_trial(trial)
        self._check_setup(trial)

    def _trial(
        self,
        pending: _Pending,
        outcome: Outcome,
        skipped_because: str | None = None,
    ) -> Trial:
        space = self._plan.space
        trial = Trial(
            number=pending.number,
            candidate=pending.candidate,
            changed=changed(pending.candidate, space.baseline),
            changes=tuple(sorted(space.changes(pending.candidate))),
            config=self._plan.config(pending.candidate),
            accelerate=self._plan.accelerate(pending.candidate),
            coverage=space.coverage(pending.candidate),
            outcome=outcome,
            source="predicted" if self._plan.context.device.is_virtual else "measured",
            results=tuple(pending.results),
            skipped_because=skipped_because,
            digest=pending.digest,
        )
        return self._judged(trial)

    def _judged(self, trial: Trial) -> Trial:
        """Return the trial with its constraints read from all its probes."""
        measurement = trial.measurement
        if trial.outcome is not Outcome.OK or measurement is None:
            return trial
        facts = {
            "budget_bytes": self._plan.budget_bytes,
            "device_total_bytes": self._plan.context.device.total_bytes,
            "coverage": trial.coverage,
        }
        over = violations(self._constraints, measurement, facts)
        return replace(trial, violations=over, feasible=all(v <= 0 for v in over.values()))

    def _record(self, trial: Trial) -> None:
        self._folder.append("trial", {"trial": trial.to_dict()})
        self.trials.append(trial)

    def _record_implied(self, proposal: Proposal, digest: str, reason: str) -> None:
        pending = _Pending(self._take_number(), proposal.candidate, digest, proposal)
        trial = self._trial(pending, Outcome.DEVICE_OOM, reason)
        self._record(trial)
        self._tell(proposal, trial)
        self._on_trial(trial)

    def _tell(self, proposal: Proposal, trial: Trial) -> None:
        attributes = {"trial": trial.number, "digest": trial.digest}
        if trial.outcome is Outcome.OK and not pareto.missing(trial, self._objectives):
            values = [trial.interval(objective).median for objective in self._objectives]
            self._study.tell_ok(proposal, values, trial.violations, attributes)
        else:
            # What there is no value of cannot be told: as if the probe had been lost.
            outcome = Outcome.LOST if trial.outcome is Outcome.OK else trial.outcome
            self._study.tell_refused(proposal, outcome, attributes)

    def _confirm(self, trial: Trial) -> None:
        spec = self._spec(f"{trial.number:04d}-again", trial.candidate)
        self._on_probe(trial.number, trial.candidate)
        result = self._executor.submit(spec).result()
        confirmed = self.with_result(trial, result)
        self._replace(confirmed)
        self._on_trial(confirmed)

    def _replace(self, trial: Trial) -> None:
        # The whole trial again: the last record of a number counts.
        self._folder.append("trial", {"trial": trial.to_dict()})
        self.trials = [trial if item.number == trial.number else item for item in self.trials]

    def with_result(self, trial: Trial, result: ProbeResult) -> Trial:
        """Return the trial with one more probe; a later verdict overrules an earlier one."""
        outcome = trial.outcome
        if result.outcome.is_verdict:
            outcome = result.outcome
        trial = replace(trial, results=(*trial.results, result), outcome=outcome)
        return self._judged(trial) if outcome is Outcome.OK else replace(trial, feasible=False)

    def _check_setup(self, trial: Trial) -> None:
        last = trial.results[-1]
        if trial.outcome is Outcome.OK:
            self._check_objectives(trial)
        if trial.number == 0 and trial.outcome in _BROKEN_BASELINE:
            raise BaselineError(
                f"the baseline is {trial.outcome.value}: {last.detail}",
                hint=f"The set-up is broken; see {self._folder.probe_folder(last.probe_id)}.",
            )
        tail = [item.outcome for item in self.trials[-MAX_CRASHES_IN_A_ROW:]]
        if len(tail) == MAX_CRASHES_IN_A_ROW and set(tail) == {Outcome.CRASHED}:
            raise AutotuneError(
                f"{MAX_CRASHES_IN_A_ROW} probes in a row crashed, the last one with: "
                f"{last.detail}",
                hint=f"The set-up is broken; see {self._folder.probe_folder(last.probe_id)}.",
            )

    def _check_objectives(self, trial: Trial) -> None:
        """Refuse objectives of which no trial so far has a value, such as on another device.

        A later trial without one is left out of the Pareto set; what it is like is not known.
        """
        reasons = pareto.missing(trial, self._objectives)
        ok = [item for item in self.trials if item.outcome is Outcome.OK]
        if reasons and all(pareto.missing(item, self._objectives) for item in ok):
            texts = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise BaselineError(
                f"trial {trial.number} has no value of what is to be optimised ({texts}).",
                hint="Start another search, in another --run-dir, without --objective"
                f" {' and --objective '.join(reasons)}.",
            )


def _is_past(deadline_s: float | None) -> bool:
    return deadline_s is not None and time.monotonic() > deadline_s
