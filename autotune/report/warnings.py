"""What a reader must know before trusting the numbers: each with its figure and its remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from autotune.objectives import TIE_LIMIT
from autotune.probe import modelled
from autotune.probe.result import Measurement, Outcome, ProbeResult
from autotune.report.cells import fact
from autotune.report.trial import CPU_LIMIT, Trial
from autotune.units import MIB, counted, format_gib

SPREAD_LIMIT = 0.10
MIN_STEPS = 3
OTHERS_LIMIT_BYTES = 64 * MIB
"""Below this a display or a driver's own bookkeeping is as likely as another process."""

NUM_NAMED = 5


def collect(
    trials: Sequence[Trial], *, pareto: Collection[int] = (), resume_with: str = ""
) -> tuple[str, ...]:
    """Return the warnings about a search's measurements.

    Args:
        trials: All trials.
        pareto: Numbers of the recommended trials; named first, and checked for confirmation.
        resume_with: The command that goes on with the search, for who wants a second probe.
    """
    measured = [item for item in trials if item.source == "measured" and item.measurements]
    measured.sort(key=lambda item: (item.number not in pareto, item.number))
    found = [
        _spread(measured),
        _few_steps(measured),
        _others(measured),
        _busy_host(measured),
        *_environments(trials),
        _on_the_edge(sorted(trials, key=lambda item: (item.number not in pareto, item.number))),
        _repeated(trials),
        _modelled(trials),
        _unconfirmed(measured, pareto, resume_with),
    ]
    return tuple(text for text in found if text)


def _spread(trials: Sequence[Trial]) -> str:
    wide = {}
    for trial in trials:
        rate = trial.tokens_per_s
        if rate is not None and rate.spread_ratio > SPREAD_LIMIT:
            wide[trial.number] = rate.spread_ratio
    if not wide:
        return ""
    worst = max(wide, key=lambda number: wide[number])
    unranked = [item.number for item in trials if item.is_unranked]
    doubt = (
        f" In {_names(unranked)} it is too wide to rank: no more than {TIE_LIMIT:.0%} to each side"
        " of the median counts as a tie, and the median itself may be far off."
    )
    return (
        f"The interquartile range of the rate is above {SPREAD_LIMIT:.0%} of the median in"
        f" {_names(wide)} (most in trial {worst}: {wide[worst]:.0%})."
        f"{doubt if unranked else ''} Measure more steps"
        " (--measured-steps), and keep other work off the machine."
    )


def _few_steps(trials: Sequence[Trial]) -> str:
    few = {item.number: _num_steps(item) for item in trials if _num_steps(item) < MIN_STEPS}
    if not few:
        return ""
    return (
        f"Fewer than {MIN_STEPS} steps were measured in {_names(few)} (as few as"
        f" {min(few.values())}), so that their spread says little. Measure"
        " more steps (--measured-steps)."
    )


def _busy_host(trials: Sequence[Trial]) -> str:
    taken = {}
    for trial in trials:
        pooled = trial.measurement
        share = pooled.cpu_taken_by_others_ratio if pooled is not None else None
        if share is not None and share >= CPU_LIMIT:
            taken[trial.number] = share
    if not taken:
        return ""
    return (
        f"Other work took up to {max(taken.values()):.0%} of the processor time during the"
        f" measured steps of {_names(taken)}, so their rates are too low, on the CPU by far more"
        " than that share. Probe again on a quiet machine; peaks are not affected."
    )


def _others(trials: Sequence[Trial]) -> str:
    held = {
        item.number: _greatest(item, lambda value: value.device_used_by_others_bytes or 0)
        for item in trials
    }
    held = {number: value for number, value in held.items() if value >= OTHERS_LIMIT_BYTES}
    if not held:
        return ""
    return (
        f"Another process held up to {format_gib(max(held.values()))} of the device during"
        f" {_names(held)}, which may have slowed the probes. Stop it and search again."
    )


def _environments(trials: Sequence[Trial]) -> list[str]:
    finished = [
        (trial.number, result)
        for trial in trials
        for result in trial.results
        if result.outcome is Outcome.OK
    ]
    if not finished:
        return []
    _, first = min(finished, key=lambda pair: pair[0])
    other = [(number, item) for number, item in finished if item.environment != first.environment]
    if not other:
        return []
    keys = sorted({key for _, item in other for key in _differing(first, item)})
    return [
        f"The environment ({', '.join(keys)}) of {_names(dict(other))} differs from that of trial"
        f" {min(finished, key=lambda pair: pair[0])[0]}: their numbers are not compared. Search"
        " again in one environment."
    ]


def _on_the_edge(trials: Sequence[Trial]) -> str:
    edge = {
        item.number: _greatest(item, lambda value: value.num_alloc_retries)
        for item in trials
        if item.on_the_edge
    }
    if not edge:
        return ""
    times = counted(max(edge.values()), "time")
    return (
        f"On the edge: the allocator had to free its cache, up to {times}, in"
        f" {_names(edge)}. A little more memory need would not fit; leave more headroom."
    )


def _repeated(trials: Sequence[Trial]) -> str:
    found = {item.number: item.repeated for item in trials if item.repeated}
    if not found:
        return ""
    all_of_them = [result for results in found.values() for result in results]
    last = all_of_them[-1]
    detail = fact(last.detail)
    what = "A probe" if len(all_of_them) == 1 else f"{len(all_of_them)} probes"
    return (
        f"{what} crashed or vanished and had to be repeated, in {_names(found)} (the last one"
        f" {last.outcome.value}{f': {detail}' if detail else ''}). Their figures are from the"
        f" repeats; see probes/{last.probe_id}/stderr.log, and look for what ends processes here."
    )


def _modelled(trials: Sequence[Trial]) -> str:
    found = {}
    for trial in trials:
        pooled = trial.measurement
        engine = modelled.engine_of(pooled.makeup if pooled is not None else None)
        if engine is not None:
            found[trial.number] = engine
    return modelled.note_on_engines(list(found.values()), where=_names(found)) if found else ""


def _unconfirmed(trials: Sequence[Trial], pareto: Collection[int], resume_with: str) -> str:
    once = {item.number: 1 for item in trials if item.number in pareto and not item.confirmed}
    if not once:
        return ""
    command = f"with: {resume_with}" if resume_with else "with the same command and --resume."
    return (
        f"Recommended on a single probe: {_names(once)}. A search confirms at its end; if it was"
        f" ended before that, confirm {command}"
    )


def _num_steps(trial: Trial) -> int:
    return sum(len(item.steps) for item in trial.measurements)


def _greatest(trial: Trial, read: Callable[[Measurement], int]) -> int:
    return max((read(item) for item in trial.measurements), default=0)


def _differing(a: ProbeResult, b: ProbeResult) -> set[str]:
    keys = {*a.environment, *b.environment}
    return {key for key in keys if a.environment.get(key) != b.environment.get(key)}


def _names(numbers: Collection[Any]) -> str:
    listed = list(numbers)
    # Of many the first are named, the recommended ones among them, but in order.
    shown = ", ".join(str(number) for number in sorted(listed[:NUM_NAMED]))
    more = f" and {len(listed) - NUM_NAMED} more" if len(listed) > NUM_NAMED else ""
    return f"trial{'s' if len(listed) > 1 else ''} {shown}{more}"
