"""What a trial would take with other settings: a few predictions beside a run that is over."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune import membudget, standin_probes
from autotune.executors.base import Executor, ending
from autotune.executors.disk import temporary_folder
from autotune.executors.subprocess import SubprocessExecutor
from autotune.implied import changed
from autotune.plan import Plan, Request, make_plan
from autotune.probe import screened
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe_specs import probe_spec
from autotune.report.explain import Explanation, Neighbour, against, unknown_settings
from autotune.report.model import Report
from autotune.report.pareto import thinned
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.space.domains import Value
from autotune.space.knob import LEAST, Knob, nearest
from autotune.space.space import ResolvedSpace
from autotune.standin_runs import StandIn, corrected, stand_in_of
from autotune.virtual import cards

MOST_PREDICTIONS = 24
MOST_COMPARED = 3
"""Measured trials that are predicted to correct the predictions of others."""

MOST_CLOSEST = 3
"""Changes that are told where none is enough."""

MOST_PAIRS = 8
"""Of these predictions, those kept for pairs of changes where no single one fits."""

NEAR_RATIO = 1.15
"""Up to so much over the budget, a prediction without the card's limit is followed by one with it:
an allocator that must gives back what it only kept."""

Candidate = dict[str, Value]


class Predictor:
    """Predicts further candidates of a run, on its virtual card or on what stands for its device.

    Args:
        plan: The run's, made anew.
        folder: Takes the probes.
        executor: Runs them.
        report: The run's; candidates that it has are not predicted again.
        on_probe: Called with the changes before each prediction.
        most: Predictions that may be made.
        stand_in: What stands for the run's device, if that is a real one.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        executor: Executor,
        report: Report,
        *,
        on_probe: Callable[[Mapping[str, Value]], None] = lambda changes: None,
        most: int = MOST_PREDICTIONS,
        stand_in: StandIn | None = None,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._executor = executor
        self._report = report
        self._on_probe = on_probe
        self._most = most
        self._stand_in = stand_in
        self._known: dict[str, tuple[Trial, bool]] = {}
        self._own_peak: int | None = None
        self.num_made = 0
        self._numbers = itertools.count()  # of their folders

    def compare_own(self) -> None:
        """Predict a few of the run's own trials, unless the run did that, to correct the rest.

        What stands for a device is never quite like it: uncorrected, its predictions are nothing
        to set beside what was measured.
        """
        if self._stand_in is None or self._stand_in.num_compared:
            return
        measured = [item for item in self._report.trials if item.measurements]
        made = {}
        for trial in thinned(measured, MOST_COMPARED):
            self._on_probe(trial.changed)
            candidate = dict(trial.candidate)
            record = self._predict(candidate, trial.digest)
            rate = record.tokens_per_s
            made[trial.digest] = screened.Screened(
                digest=trial.digest,
                candidate=candidate,
                outcome=record.outcome,
                peak_bytes=record.peak_bytes,
                values={} if rate is None else {"tokens_per_s": rate.median},
            )
        self._stand_in = corrected(self._stand_in, self._report, made)
        self.num_made = 0  # these say nothing new

    def neighbours(self, explanation: Explanation) -> Explanation:
        """Return the explanation with predictions of settings that the run knows nothing of."""
        trial, space = explanation.trial, self._plan.space
        known = {
            (name, item.changes[name]) for item in explanation.settings for name in item.changes
        }
        found = list(explanation.settings)
        wanted = [
            (knob.name, value)
            for knob in space.knobs
            for value in space.values()[knob.name]
            if knob.name in trial.candidate
            and value != trial.candidate[knob.name]
            and (knob.name, value) not in known
        ]
        for name, value in _in_turns(wanted):
            candidate = with_changes(space, trial.candidate, {name: value})
            if candidate is not None and self._has_left:
                found += self._told(trial, candidate, {name: value}, "setting")
        order = list(trial.candidate)
        found.sort(key=lambda item: order.index(next(iter(item.changes))))
        return replace(
            explanation,
            settings=tuple(found),
            unknown=unknown_settings(self._report, trial, found),
            num_predicted=self.num_made,
            notes=(*explanation.notes, *self._notes()),
        )

    def fitting(self, explanation: Explanation) -> Explanation:
        """Return the explanation with the fewest changes that are predicted to fit.

        Single changes toward less memory come first, each knob's leanest value and then, where
        that fits, its milder ones; then values that nothing is known of. If none fits, pairs of
        those that saved most; then the leanest values of all.
        """
        trial, space = explanation.trial, self._plan.space
        found: list[Neighbour] = []
        saved: dict[tuple[str, Value], int] = {}
        leaner = {knob.name: self._leaner(knob, trial.candidate) for knob in space.knobs}
        for name, values in leaner.items():
            for place, value in enumerate(values):
                told = self._try(trial, {name: value})
                found += told
                self._note_saving(saved, (name, value), told, trial)
                if place == 0 and not any(item.fits for item in told):
                    break  # a milder value of it fits still less
        for name, value in _in_turns(self._unordered(trial.candidate)):
            if self.num_made < self._most - MOST_PAIRS:
                told = self._try(trial, {name: value})
                found += told
                self._note_saving(saved, (name, value), told, trial)
        if not any(item.fits for item in found):
            pairs = [
                (first, second)
                for first, second in itertools.combinations(saved, 2)
                if first[0] != second[0] and saved[first] > 0 and saved[second] > 0
            ]
            pairs.sort(key=lambda pair: -saved[pair[0]] - saved[pair[1]])
            for pair in pairs:
                if self.num_made < self._most - 2:  # of which the leanest candidate takes some
                    found += self._try(trial, dict(pair))
        if not any(item.fits for item in found):
            leanest = space.leanest
            differing = {
                name: value
                for name, value in leanest.items()
                if trial.candidate.get(name) != value
            }
            found += self._told(trial, dict(leanest), differing, "change")
        fit = [item for item in found if item.fits]
        fit.sort(key=lambda item: (len(item.changes), -(item.tokens_per_s or 0.0)))
        near = [] if fit else [item for item in found if item.peak_bytes]
        near.sort(key=lambda item: (item.peak_bytes or 0, len(item.changes)))
        sizes = [item.peak_bytes for item in found if item.peak_bytes]
        if explanation.least_bytes is not None:
            sizes.append(explanation.least_bytes)
        least = min(sizes, default=None)
        return replace(
            explanation,
            fitting=tuple(fit),
            closest=tuple(near[:MOST_CLOSEST]),
            num_predicted=self.num_made,
            notes=(*explanation.notes, *self._notes()),
            least_bytes=least,
            card="" if fit or least is None else larger_card(least, self._report),
        )

    def _notes(self) -> list[str]:
        return [] if self._stand_in is None else [self._stand_in.note(self._report)]

    def _note_saving(
        self,
        saved: dict[tuple[str, Value], int],
        change: tuple[str, Value],
        told: Sequence[Neighbour],
        trial: Trial,
    ) -> None:
        """Note how much less memory a change takes, if that is known."""
        if not told:
            return
        if told[0].memory_bytes is not None:
            saved[change] = -told[0].memory_bytes
        elif self._stand_in is not None and told[0].peak_bytes is not None:
            # The trial was measured or ran out; what compares with predictions is one of its own.
            if self._own_peak is None and self._has_left:
                self._own_peak = self._predict(dict(trial.candidate), trial.digest).peak_bytes
            if self._own_peak is not None:
                saved[change] = self._own_peak - told[0].peak_bytes

    @property
    def _has_left(self) -> bool:
        return self.num_made < self._most

    def _leaner(self, knob: Knob, candidate: Mapping[str, Any]) -> list[Value]:
        """Return a knob's values that need less memory than the candidate's, the leanest first."""
        if knob.name not in candidate:
            return []
        own = candidate[knob.name]
        values = [item for item in self._plan.space.values()[knob.name] if item != own]
        if knob.leanest == LEAST:
            numbers = [item for item in values if isinstance(item, int | float)]
            less = (item for item in numbers if isinstance(own, int | float) and item < own)
            return [*sorted(less)]
        order = [item for item in knob.leanest if item in values or item == own]
        found = order[: order.index(own)] if own in order else order
        rule, context = knob.memory_at_least, self._plan.context
        if rule is not None:
            found += [
                item
                for item in values
                if item not in order and rule(own, item, candidate, context)
            ]
        return found

    def _unordered(self, candidate: Mapping[str, Any]) -> list[tuple[str, Value]]:
        """Return other values of knobs of which no order says what they need."""
        context, found = self._plan.context, []
        for knob in self._plan.space.knobs:
            if knob.name not in candidate or knob.leanest:
                continue
            own, rule = candidate[knob.name], knob.memory_at_least
            for value in self._plan.space.values()[knob.name]:
                either = rule is not None and (
                    rule(own, value, candidate, context) or rule(value, own, candidate, context)
                )
                if value != own and not either:
                    found.append((knob.name, value))
        return found

    def _try(self, trial: Trial, changes: Mapping[str, Value]) -> list[Neighbour]:
        candidate = with_changes(self._plan.space, trial.candidate, changes)
        return [] if candidate is None else self._told(trial, candidate, changes, "change")

    def _told(
        self, trial: Trial, candidate: Candidate, changes: Mapping[str, Value], direction: Any
    ) -> list[Neighbour]:
        """Return what a candidate would trade; nothing if it is not known and none may be made."""
        digest = self._plan.space.digest(candidate)
        if digest not in self._known:
            known = next((item for item in self._report.trials if item.digest == digest), None)
            if known is not None and (known.measurements or known.needed_bytes):
                self._known[digest] = known, True
            elif self._has_left:
                self._on_probe(changes)
                self._known[digest] = self._predict(candidate, digest), False
            else:
                return []
        other, is_own = self._known[digest]
        told = against(self._report, trial, other, direction, is_own=is_own)
        # What follows from a change, as a rank does from adapters, is not named beside it.
        return [
            replace(
                told,
                changes=dict(changes),
                instead_of={name: trial.candidate.get(name) for name in changes},
            )
        ]

    def _predict(self, candidate: Candidate, digest: str) -> Trial:
        """Return a candidate's prediction as a trial that belongs to no run."""
        plan, space, budget = self._plan, self._plan.space, self._plan.budget_bytes
        result = self._probe(candidate, is_limited=False)
        coverage = space.coverage(candidate)
        trial = Trial(
            number=-1,
            candidate=candidate,
            changed=changed(candidate, space.baseline),
            config=plan.config(candidate),
            coverage=coverage,
            outcome=result.outcome,
            results=(result,),
            source="predicted",
            digest=digest,
        )
        peak = trial.peak_bytes
        if peak is None or result.outcome is not Outcome.OK:
            return trial
        is_near = self._stand_in is None and budget < peak <= budget * NEAR_RATIO
        if is_near and self._has_left:
            again = self._probe(candidate, is_limited=True)
            if again.outcome is Outcome.OK:
                trial = replace(trial, results=(again,))
                peak = trial.peak_bytes or peak
        over = {
            "memory_budget": peak / budget - 1.0,
            "coverage": plan.request.least_coverage - coverage,
        }
        return replace(trial, violations=over, feasible=all(item <= 0 for item in over.values()))

    def _probe(self, candidate: Candidate, *, is_limited: bool) -> ProbeResult:
        number, stand_in = f"{next(self._numbers):04d}", self._stand_in
        self.num_made += 1
        if stand_in is None:
            spec = probe_spec(self._plan, self._folder, number, candidate)
            return self._executor.submit(replace(spec, beyond_device=not is_limited)).result()
        folder = self._folder.probe_folder(number)
        spec = standin_probes.spec_for(self._plan, candidate, stand_in.device, folder)
        result = self._executor.submit(spec).result()
        return stand_in.measured(result, self._plan.context.device.kind)


@contextlib.contextmanager
def opened(
    request: Request,
    run: RunFolder,
    report: Report,
    *,
    on_probe: Callable[[Mapping[str, Value]], None] = lambda changes: None,
) -> Iterator[Predictor]:
    """Make a run's plan anew, beside its folder, and lend what predicts by it.

    Args:
        request: What the run was asked for.
        run: Its folder, in which nothing is written.
        report: Its report.
        on_probe: Called with the changes before each prediction.

    Raises:
        StudyMismatchError: If model, data or settings are no longer those of the run.
        AutotuneError: If model or data cannot be used any more, or nothing stands for the device.
    """
    with temporary_folder("autotune-explain-") as path:
        folder = RunFolder(path)
        folder.work.mkdir(exist_ok=True)
        with contextlib.ExitStack() as executors:
            executor = executors.enter_context(_executor(request.device, request, folder))
            budget = run.read_run().get("budget_bytes")
            plan = make_plan(request, folder, executor, budget_bytes=budget)
            known = run.read_run().get("identity") or {}
            asked = {name: known[name] for name in ("objectives",) if name in known}
            run.check_identity({**plan.identity(), **asked})
            stand_in = None
            if not plan.context.device.is_virtual:
                stand_in = stand_in_of(plan, folder, run, report, executor)
                executor = executors.enter_context(_executor(stand_in.device, request, folder))
            predictor = Predictor(
                plan, folder, executor, report, on_probe=on_probe, stand_in=stand_in
            )
            predictor.compare_own()
            yield predictor


@contextlib.contextmanager
def _executor(device: str, request: Request, folder: RunFolder) -> Iterator[Executor]:
    with ending(
        SubprocessExecutor(
            devices=(device,),
            timeout_s=request.probe_timeout_s,
            log_folder=folder.work,
            trainer=request.trainer,
        )
    ) as executor:
        yield executor


def with_changes(
    space: ResolvedSpace, candidate: Mapping[str, Any], changes: Mapping[str, Value]
) -> Candidate | None:
    """Return a candidate with other values of some knobs; None if the space has none such.

    A knob that applies only then takes its baseline, or what comes nearest. Any other knob that
    could not keep its value would be a change that was not asked for.
    """
    knobs = {knob.name: knob for knob in space.knobs}

    def suggest(parameter: str, legal: Sequence[Value], ordered: bool) -> Value:
        name = parameter.partition("@")[0]
        wanted = changes.get(name, candidate.get(name))
        return wanted if wanted in legal else nearest(knobs[name], legal)

    found = space.draw(suggest)
    for name, value in found.items():
        if value != changes.get(name, candidate.get(name, value)):
            return None
    return found if changes.keys() <= found.keys() else None


def larger_card(num_bytes: int, report: Report) -> str:
    """Return the smallest card of the catalogue that holds so many bytes, larger than a run's.

    It is of the same vendor and has bfloat16 if the run's has, or nothing would be comparable.
    Empty if there is none, or the run's card would do with another budget.
    """
    if not report.is_predicted:
        return ""
    own = cards.find(str(report.device.get("name", "")).removeprefix("virtual:"))
    if own.memory_bytes >= num_bytes:
        return ""
    able = [
        card
        for card in cards.catalogue().values()
        if card.vendor == own.vendor
        and card.supports_bf16 >= own.supports_bf16
        and membudget.decide(None, cards.device_info(card, f"virtual:{card.id}"), None)[0]
        >= num_bytes
    ]
    found = min(able, key=lambda card: card.memory_bytes, default=None)
    return "" if found is None else found.name


def _in_turns(pairs: Sequence[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """Yield the first value of each knob, then the second of each, and so on."""
    groups = [list(items) for _, items in itertools.groupby(pairs, key=lambda pair: pair[0])]
    for row in itertools.zip_longest(*groups):
        yield from (pair for pair in row if pair is not None)
