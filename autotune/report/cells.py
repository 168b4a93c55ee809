"""One trial's figures as short texts, and the line that is printed when its probe has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from autotune.probe import trl_yaml
from autotune.probe.result import Interval, Outcome
from autotune.report.compare import Gain, gain_of
from autotune.report.trial import Trial
from autotune.units import format_duration, format_gib, format_rate

UNKNOWN = "-"


def gib(num_bytes: int | float | None) -> str:
    """Return bytes as GiB without the unit; ``-`` if unknown."""
    return format_gib(num_bytes).removesuffix(" GiB")


def rate(interval: Interval | None) -> str:
    """Return the median rate with its unit and its spread: ``1,234 tokens/s (IQR 2.1%)``."""
    if interval is None:
        return f"{UNKNOWN} tokens/s"
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


def training(trial: Trial) -> str:
    """Return ``same`` if it trains as the baseline does, else what differs."""
    return "+".join(trial.changes) or "same"


def epoch_time_s(trial: Trial) -> float | None:
    """Return the time of one pass over the data at the median rate, in seconds."""
    pooled = trial.measurement
    return pooled.epoch_time_s if pooled is not None and pooled.steps else None


def padding_share(trial: Trial) -> float | None:
    """Return padding over all positions of the measured steps (0 to 1)."""
    pooled = trial.measurement
    if pooled is None or not any(step.num_positions for step in pooled.steps):
        return None
    return pooled.padding_share


def table_row(trial: Trial, gain: Gain | None) -> dict[str, str]:
    """Return a trial's figures by column title."""
    return {
        "trial": str(trial.number),
        "source": trial.source,
        "GiB": gib(trial.peak_bytes),
        "tokens/s": format_rate(trial.tokens_per_s.median if trial.tokens_per_s else None),
        "IQR": spread(trial.tokens_per_s),
        "samples/s": format_rate(trial.samples_per_s.median if trial.samples_per_s else None),
        "epoch": format_duration(epoch_time_s(trial)),
        "padding": percent(padding_share(trial)),
        "trained": percent(trial.coverage),
        "rate": ratio(gain.rate_ratio, is_tied=gain.rate_is_tied) if gain else UNKNOWN,
        "memory": ratio(gain.memory_ratio, is_tied=gain.memory_is_tied) if gain else UNKNOWN,
        "training": training(trial),
    }


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
    parts.append(f"{rate(trial.tokens_per_s)}{aside}")
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
    """Return how a trial that is not ``ok`` ended: outcome, phase and one line of detail."""
    if not trial.results:
        return trial.outcome.value
    last = trial.results[-1]
    phase = f" in {last.phase}" if last.phase else ""
    lines = last.detail.splitlines()
    detail = f": {lines[0]}" if lines else ""
    return f"{trial.outcome.value}{phase}{detail}"
