"""An explanation as text for people: plain sentences, each with its figures."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from autotune.probe import prediction, trl_yaml
from autotune.probe.result import Outcome
from autotune.report import pareto
from autotune.report.cells import ending, objective_cell, percent, rate, ratio, settings
from autotune.report.explain import Explanation, Neighbour, Reason, WhyNot
from autotune.report.model import Report
from autotune.report.trial import Trial, memory_name
from autotune.units import counted, format_gib, format_gib_apart

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_NAMES = {
    "peak_memory": "peak",
    "host_memory": "peak on the host",
    "tokens_per_s": "rate",
    "samples_per_s": "rate",
    "epoch_time": "an epoch",
}
_LIMITS = {"memory_budget": "the budget", "coverage": "--min-coverage"}


def render(explanation: Explanation, width: int) -> Text:
    """Return an explanation in lines of at most ``width`` columns, where its words allow it."""
    report, trial = explanation.report, explanation.trial
    names = f" [{', '.join(explanation.picked_as)}]" if explanation.picked_as else ""
    parts = [_section(f"Trial {trial.number}{names}", _what(explanation), width)]
    if explanation.reasons:
        told = [_reason(report, trial, item) for item in explanation.reasons]
        parts.append(_section("Why it was picked", told, width))
    if explanation.why_not is not None:
        told = [_why_not(report, trial, explanation.why_not)]
        parts.append(_section("Why it is not of the Pareto set", told, width))
    if explanation.steps:
        told = [_step(item, trial) for item in explanation.steps]
        parts.append(_section("What its neighbours on the Pareto set trade", told, width))
    changes = [_setting(report, item, trial) for item in explanation.settings]
    if explanation.unknown:
        listed = ", ".join(explanation.unknown)
        changes.append(f"Not known, since no trial differs in it alone: {listed}.")
    if changes:
        parts.append(_section("What one other setting would change", changes, width))
    if explanation.nothing_fits:
        parts.append(_section("Nothing fits", _nothing_fits(explanation), width, "bold red"))
    if explanation.notes:
        parts.append(_section("Notes", explanation.notes, width))
    return Text("\n\n").join(parts)


def _section(title: str, lines: Sequence[str], width: int, style: str = "bold") -> Text:
    text = Text().append(title, style=style)
    for line in lines:
        filled = textwrap.fill(
            line,
            max(width, 24),
            initial_indent="- " if len(lines) > 1 else "  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        text.append("\n" + filled)
    return text


def _what(explanation: Explanation) -> list[str]:
    report, trial = explanation.report, explanation.trial
    is_baseline = trial.number == report.baseline_number
    lines = ["It is the baseline: nothing is changed."]
    if not is_baseline:
        lines = [f"Changed against the baseline: {settings(trial.changed)}."]
    if not report.finished:
        state = "was interrupted" if report.interrupted else "has not finished"
        lines.append(f"The run {state}; this is what its {_trials(report)} tell so far.")
    if trial.measurement is None or trial.outcome is not Outcome.OK:
        return lines
    kind = memory_name(str(report.device.get("kind", "")))
    probes = (
        f" in {counted(len(trial.measurements), 'probe')}" if trial.source != "predicted" else ""
    )
    lines.append(
        f"{rate(trial)} and a peak of {format_gib(trial.peak_bytes)} of {kind},"
        f" {trial.source}{probes}{_budget_share(report, trial)}."
    )
    if not is_baseline:
        lines.append(_gain(report, trial))
    others = [item for item in report.known_objectives if item.name not in _SHOWN]
    if others:
        figures = ", ".join(
            f"{item.name.replace('_', ' ')} {objective_cell(trial, item)}" for item in others
        )
        lines.append(f"Also optimised: {figures}, {trial.source}.")
    if trial.coverage < 1.0 or trial.changes:
        differs = ""
        if trial.changes:
            differs = (
                f"; against the baseline's, its training differs in: {' and '.join(trial.changes)}"
            )
        lines.append(f"It trains on {percent(trial.coverage)} of the data's loss tokens{differs}.")
    place = explanation.place
    if place is not None and place.num_members == 1:
        lines.append("It is the only one of the Pareto set.")
    elif place is not None:
        lines.append(
            f"It is of the Pareto set of {place.num_members}: {_ordinal(place.by_memory)} by"
            f" memory (leanest first), {_ordinal(place.by_speed)} by speed (fastest first)."
        )
    if explanation.nothing_fits and trial.feasible is False:
        lines.append("It is not within every limit; see below.")
    return lines


_SHOWN = ("tokens_per_s", "peak_memory")


def _budget_share(report: Report, trial: Trial) -> str:
    peak, budget = trial.peak_bytes, report.budget_bytes
    if peak is None or not budget:
        return ""
    shown = format_gib_apart(peak, budget)
    return f"; that is {percent(peak / budget)} of the budget of {shown[-1]}"


def _gain(report: Report, trial: Trial) -> str:
    gain = report.gain(trial)
    if gain is None:
        return "No gain over the baseline can be stated: there is no figure of it to compare with."
    return (
        f"Against the baseline: {ratio(gain.rate_ratio, is_tied=gain.rate_is_tied)} its rate,"
        f" {ratio(gain.memory_ratio, is_tied=gain.memory_is_tied)} its memory"
        f"{'; ~ is within the noise' if gain.rate_is_tied or gain.memory_is_tied else ''}."
    )


def _reason(report: Report, trial: Trial, reason: Reason) -> str:
    own, other = reason.own, reason.other or {}
    name, second = f"[{reason.pick}]", f"trial {reason.runner_up}"
    if reason.pick == "balanced":
        text = (
            f"{name} gives up least by (1 - rate / best rate) + (peak / budget)^4 / 2:"
            f" {_cost(own)}."
        )
        return f"{text} Next comes {second}: {_cost(other)}." if other else text
    if reason.pick == "highest-fidelity":
        return _faithful(reason, second)
    if reason.pick == "leanest":
        text = f"{name} has the lowest peak of the Pareto set, {format_gib(own['peak_bytes'])}."
        if not other:
            return text
        return f"{text} Next comes {second} with {format_gib(other['peak_bytes'])}."
    own_cell = objective_cell(trial, report.speed)
    if trial.number not in report.pareto_numbers:
        return (
            f"{name} is the baseline, since no member of the Pareto set has a higher median; it"
            f" has {own_cell}."
        )
    text = f"{name} is the fastest of the Pareto set, with {own_cell}."
    if not other or reason.runner_up is None:
        return text
    other_cell = objective_cell(report.pick(reason.runner_up), report.speed)
    return f"{text} Next comes {second} with {other_cell}."


def _cost(own: Mapping[str, Any]) -> str:
    lost = own["lost_rate_share"]
    return (
        f"{own['cost']:.3f}, of which {lost:.3f} for the {percent(lost)} of the best rate that it"
        f" lacks and {own['memory_cost']:.3f} for the {percent(own['budget_share'])} of the budget"
        " that it takes"
    )


def _faithful(reason: Reason, second: str) -> str:
    own, other = reason.own, reason.other or {}
    text = (
        f"[{reason.pick}] keeps {percent(own['trained_share'])} of the data's loss tokens"
        f"{_with(own['settings'])}, which no feasible trial exceeds."
    )
    if not other:
        return text
    if own["is_as_faithful"]:
        return (
            f"{text} Next comes {second}, which is as faithful and slower, or as fast and larger."
        )
    shares = percent(other["trained_share"])
    return f"{text} Next comes {second}: {shares} of the loss tokens{_with(other['settings'])}."


def _with(values: Mapping[str, Any]) -> str:
    return f" with {trl_yaml.settings(values)}" if values else ""


def _why_not(report: Report, trial: Trial, found: WhyNot) -> str:
    other, budget = found.other, report.budget_bytes
    if found.kind == "out_of_memory":
        why = trial.skipped_because or ending(trial)
        text = f"It runs out of memory ({why})."
        if trial.needed_bytes is None:
            return text
        more = (
            "" if found.excess_bytes is None else f", {format_gib(found.excess_bytes)} more than"
        )
        limit = "" if budget is None or not more else f" the budget of {format_gib(budget)}"
        needs = f"The whole run would need {format_gib(trial.needed_bytes)}{more}{limit}"
        return f"{text} {needs}, predicted."
    if found.kind == "failed":
        return f"It did not run to its end ({trial.skipped_because or ending(trial)})."
    if found.kind == "over_limit":
        texts = [
            f"{_LIMITS.get(name, name)} by {value:.1%}"
            for name, value in (found.over or {}).items()
        ]
        more = "" if found.excess_bytes is None else f", which is {format_gib(found.excess_bytes)}"
        return f"It ran, but is over {' and '.join(texts) or 'a limit'}{more}."
    if found.kind == "predicted":
        return "It is predicted, and where measured trials fit, only these are compared."
    if found.kind == "no_value":
        reasons = [f"{name} ({reason})" for name, reason in (found.missing or {}).items()]
        return f"It has no value of {' and '.join(reasons)}, so that it cannot be compared."
    if other is None:
        return "Others dominate it by way of a third one, within the noise of each comparison."
    if found.kind == "tied":
        return (
            f"It differs from trial {other.number} in nothing but noise, and of tied trials the"
            f" leanest is kept: {_compared(report, trial, other)}."
        )
    return f"Trial {other.number} dominates it: {_compared(report, trial, other)}."


def _compared(report: Report, trial: Trial, other: Trial) -> str:
    texts = []
    for item in report.known_objectives:
        name = _NAMES.get(item.name, item.name.replace("_", " "))
        own, its = trial.interval(item).median, other.interval(item).median
        is_tie = pareto.tied(trial, other, (item,))
        noise = ", within the noise" if is_tie and its != own else ""
        more = "more" if its > own else "less"
        share = f" ({abs(its / own - 1):.1%} {more}{noise})" if own else ""
        shown = [objective_cell(other, item), objective_cell(trial, item)]
        if item.unit == "bytes":
            shown = [*format_gib_apart(its, own)] * (2 if its == own else 1)
        texts.append(f"{name} {shown[0]} against {shown[1]}{share}")
    return f"{', '.join(texts)}, {trial.source}"


def _step(item: Neighbour, trial: Trial) -> str:
    return (
        f"Next {item.direction}, trial {item.trial}: {_trade(item)}, {item.source}, with"
        f" {_changes(item)}{_tokens(item, trial)}."
    )


def _setting(report: Report, item: Neighbour, trial: Trial) -> str:
    where = item.source if item.trial is None else f"trial {item.trial}, {item.source}"
    lead = f"With {_changes(item)}: "
    if item.outcome in (Outcome.DEVICE_OOM, Outcome.HOST_OOM):
        if item.why:
            return f"{lead}runs out of memory, not run ({item.why}; trial {item.trial})."
        needs = "" if item.peak_bytes is None else f"; it would need {format_gib(item.peak_bytes)}"
        return f"{lead}runs out of memory{needs} ({where})."
    if item.outcome is not Outcome.OK:
        return f"{lead}does not run, {item.outcome.value} ({where})."
    return f"{lead}{_trade(item)}{_fit(report, item)}{_tokens(item, trial)} ({where})."


def _changes(item: Neighbour) -> str:
    texts = []
    for name, value in item.changes.items():
        before = item.instead_of.get(name)
        if value is None:
            texts.append(f"no {name} ({before} here)")
        elif before is None:
            texts.append(trl_yaml.settings({name: value}))
        else:
            own = trl_yaml.settings({name: before}).partition("=")[2]
            texts.append(f"{trl_yaml.settings({name: value})} instead of {own}")
    return ", ".join(texts)


def _trade(item: Neighbour) -> str:
    if item.memory_bytes is None:
        memory = "" if item.peak_bytes is None else f"a peak of {format_gib(item.peak_bytes)}"
    elif item.memory_is_tied:
        memory = "the same memory within the noise"
    else:
        more = "more" if item.memory_bytes > 0 else "less"
        memory = f"{format_gib(abs(item.memory_bytes))} {more}"
    if item.rate_ratio is None:
        speed = "" if item.tokens_per_s is None else f"{item.tokens_per_s:,.0f} tokens/s"
    elif item.rate_is_tied:
        speed = "as fast within the noise"
    else:
        faster = "faster" if item.rate_ratio > 1 else "slower"
        speed = f"{abs(item.rate_ratio - 1):.0%} {faster}"
    return ", ".join(text for text in (memory, speed) if text) or "no figures"


def _fit(report: Report, item: Neighbour) -> str:
    if item.fits:
        return ""
    peak, budget = item.peak_bytes, report.budget_bytes
    if "memory_budget" in (item.over or {}) and peak is not None and budget is not None:
        return f", does not fit the budget of {format_gib(budget)}"
    over = [_LIMITS.get(name, name) for name in item.over or {}]
    return f", does not keep to {' and '.join(over) or 'a limit'}"


def _tokens(item: Neighbour, trial: Trial) -> str:
    return (
        ""
        if round(item.trained_share - trial.coverage, 4) == 0
        else f", trains on {percent(item.trained_share)} of the loss tokens"
    )


def _nothing_fits(explanation: Explanation) -> list[str]:
    report, trial = explanation.report, explanation.trial
    lines = list(explanation.nothing_fits)
    num = explanation.num_predicted
    if explanation.fitting:
        lines.append(
            f"Predicted to fit, with the fewest changes of trial {explanation.trial.number} first"
            f" ({counted(num, 'prediction')} made; {prediction.rate_error(_card(report))}):"
        )
        lines += [
            f"{_changes(item)}: {format_gib(item.peak_bytes)}, {_speed(item)}"
            f"{_tokens(item, trial)}, {item.source}"
            + ("." if item.trial is None else f" (trial {item.trial}).")
            for item in explanation.fitting
        ]
    elif num:
        lines.append(
            f"No one or two changes of trial {explanation.trial.number} are predicted to fit, nor"
            f" the leanest values of all ({counted(num, 'prediction')} made)."
        )
        if explanation.closest:
            lines.append("What came closest of them:")
        lines += [
            f"{_changes(item)}: {format_gib(item.peak_bytes)}"
            f"{_excess(report, item)}{_tokens(item, trial)}, {item.source}."
            for item in explanation.closest
        ]
    if explanation.card and explanation.least_bytes is not None:
        lines.append(
            f"The least peak known is {format_gib(explanation.least_bytes)}, predicted. The"
            f" smallest card of `autotune gpus` that holds it is {explanation.card}."
        )
    return lines


def _excess(report: Report, item: Neighbour) -> str:
    peak, budget = item.peak_bytes, report.budget_bytes
    if peak is None or budget is None or peak <= budget:
        return ""
    return f", {format_gib(peak - budget)} over the budget"


def _card(report: Report) -> str:
    return str(report.device.get("label", ""))


def _speed(item: Neighbour) -> str:
    return "rate not known" if item.tokens_per_s is None else f"{item.tokens_per_s:,.0f} tokens/s"


def _trials(report: Report) -> str:
    return counted(len(report.trials), "trial")


def _ordinal(rank: int) -> str:
    return _ORDINALS[rank - 1] if rank <= len(_ORDINALS) else f"number {rank}"
