"""One trial's figures as short texts, and the line that is printed when its probe has ended."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from autotune.objectives import Objective
from autotune.probe import prediction, trl_yaml
from autotune.probe.result import Interval, Outcome, phase_name
from autotune.report.compare import Gain, gain_of
from autotune.report.figures import figures_of
from autotune.report.trial import Trial
from autotune.units import format_duration, format_gib, format_rate

UNKNOWN = "-"
MAX_DETAIL = 160
_TRIED = re.compile(r"[Tt]ried to allocate (\d[\d.]*) ([KMG]iB|bytes)")
"""PyTorch's words on every device, in messages of up to 500 characters."""


def gib(num_bytes: int | float | None) -> str:
    """Return bytes as GiB without the unit; ``-`` if unknown."""
    return format_gib(num_bytes).removesuffix(" GiB")


def rate(trial: Trial) -> str:
    """Return the median rate with its unit and its spread: ``1,234 tokens/s (IQR 2.1%)``.

    A prediction has no spread, but an error: ``1,234 tokens/s ±25%``.
    """
    interval = trial.tokens_per_s
    if interval is None:
        return f"{UNKNOWN} tokens/s"
    if trial.source == prediction.SOURCE:
        return f"{format_rate(interval.median)} tokens/s ±{prediction.RATE_ERROR:.0%}"
    known = spread(interval)
    aside = "" if known == UNKNOWN else f" (IQR {known})"
    return f"{format_rate(interval.median)} tokens/s{aside}"


def spread(interval: Interval | None) -> str:
    """Return the interquartile range as a share of the median; ``-`` if it is not known.

    This is the one measure of spread: in tables, in lines and in warnings.
    """
    if interval is None or interval.low == interval.high:
        return UNKNOWN  # a single step has no spread
    return f"{interval.spread_ratio:.1%}"


def percent(share: float | None) -> str:
    """Return a share (0 to 1) in per cent, never rounded to none or all; ``-`` if unknown."""
    if share is None:
        return UNKNOWN
    text = f"{share:.1%}"
    if text == "100.0%":
        return ">99.9%" if share < 1 else "100%"
    if text == "0.0%":
        return "<0.1%" if share > 0 else "0%"
    return text


def ratio(value: float | None, *, is_tied: bool = False) -> str:
    """Return a ratio such as ``1.43x``, with ``~`` before it where it lies within the noise."""
    if value is None:
        return UNKNOWN
    return f"{'~' if is_tied else ''}{value:.2f}x"


def settings(changed: Mapping[str, Any]) -> str:
    """Return changed knobs as ``name=value, ...``; for none, that this is the baseline."""
    if not changed:
        return "nothing changed (baseline)"
    return trl_yaml.settings(changed)


def table_row(trial: Trial, gain: Gain | None) -> dict[str, str]:
    """Return a trial's figures by column title."""
    found = figures_of(trial, gain)
    return {
        "trial": str(trial.number),
        "source": found.source,
        "GiB": gib(found.used_peak_bytes),
        "tokens/s": format_rate(found.tokens_per_s),
        "IQR": spread(found.spread),
        "samples/s": format_rate(found.samples_per_s),
        "epoch": format_duration(found.epoch_s),
        "padding": percent(found.padding_share),
        "trained": percent(found.trained_share),
        "rate": ratio(gain.rate_ratio, is_tied=gain.rate_is_tied) if gain else UNKNOWN,
        "memory": ratio(gain.memory_ratio, is_tied=gain.memory_is_tied) if gain else UNKNOWN,
        "training": found.training,
    }


def objective_cell(trial: Trial, objective: Objective) -> str:
    """Return a trial's median of an objective with its unit, such as ``1 h 23 min``."""
    try:
        median = trial.interval(objective).median
    except ValueError:
        return UNKNOWN
    if objective.unit == "bytes":
        return format_gib(median)
    if objective.unit == "s":
        return format_duration(median)
    return f"{format_rate(median)} {objective.unit}".rstrip()


def probe_line(trial: Trial, baseline: Trial | None = None) -> str:
    """Return one plain line about a trial: knobs, outcome, rate, peak, gain over the baseline."""
    parts = [f"trial {trial.number}", settings(trial.changed)]
    repeats = [f"after {repeated(trial)}"] if trial.repeated else []
    if trial.skipped_because is not None:
        return "  ".join([*parts, f"{trial.outcome.value} (not run: {trial.skipped_because})"])
    if trial.outcome is not Outcome.OK:
        return "  ".join([*parts, ending(trial), *repeats])
    over = [name for name, value in trial.violations.items() if value > 0]
    parts.append(f"ok, over {', '.join(over)}" if over else "ok")
    aside = "" if trial.source == "measured" else f" ({trial.source})"
    parts.append(f"{rate(trial)}{aside}")
    edge = ", on the edge" if trial.on_the_edge else ""
    parts.append(f"{format_gib(trial.peak_bytes)} ({trial.source}{edge})")
    gain = gain_of(trial, baseline)
    if gain is not None and baseline is not None and trial.number != baseline.number:
        parts.append(
            f"{ratio(gain.rate_ratio, is_tied=gain.rate_is_tied)} rate,"
            f" {ratio(gain.memory_ratio, is_tied=gain.memory_is_tied)} memory"
        )
    return "  ".join([*parts, *repeats])


def repeated(trial: Trial) -> str:
    """Return which probes of a trial had to be repeated, such as ``2 probes that were lost``."""
    counts = Counter(item.outcome for item in trial.repeated)
    words = {Outcome.CRASHED: "crashed", Outcome.LOST: "was lost"}
    return " and ".join(
        f"{'a probe' if count == 1 else f'{count} probes'} that"
        f" {words[outcome] if count == 1 else words[outcome].replace('was', 'were')}"
        for outcome, count in counts.items()
    )


def ending(trial: Trial) -> str:
    """Return how a trial that is not ``ok`` ended: outcome, phase and one short line of detail.

    The whole of it is in ``result.json``, and in a verbose report.
    """
    if not trial.results:
        return trial.outcome.value
    last = trial.results[-1]
    phase = f" in {phase_name(last.phase)}" if last.phase else ""
    asked = asked_for(last.detail)
    if asked and trial.outcome in (Outcome.DEVICE_OOM, Outcome.HOST_OOM):
        return f"{trial.outcome.value}: tried to allocate {asked}{phase}"
    detail = fact(last.detail)
    return f"{trial.outcome.value}{phase}{f': {detail}' if detail else ''}"


def asked_for(detail: str) -> str:
    """Return what an out-of-memory message says was asked for, such as ``2.00 GiB``; or empty."""
    found = _TRIED.search(detail)
    if found is None:
        return ""
    number, unit = found.groups()
    return format_gib(int(number)) if unit == "bytes" else f"{number} {unit}"


def fact(detail: str) -> str:
    """Return the first line of a message, cut where it is longer than a line of people's text."""
    lines = detail.splitlines()
    return textwrap.shorten(lines[0], MAX_DETAIL, placeholder=" ...") if lines else ""
