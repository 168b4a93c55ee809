"""What stands for the real device of a finished run, and how far its predictions are off there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autotune import standin, standin_probes
from autotune.errors import UsageError
from autotune.executors.base import Executor
from autotune.plan import Plan
from autotune.probe import prediction, screened
from autotune.probe.result import ProbeResult
from autotune.report.model import Report
from autotune.runfolder import RunFolder
from autotune.units import counted
from autotune.virtual.cards import Card


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """What stands for a run's real device.

    Attributes:
        card: Its figures.
        device: Its name as a device.
        memory_ratio: Measured over predicted peak memory, the median of the run's own trials.
        rate_ratio: The same of rates.
        num_compared: Trials that were both measured and predicted.
    """

    card: Card
    device: str
    memory_ratio: float = 1.0
    rate_ratio: float = 1.0
    num_compared: int = 0

    def note(self, report: Report) -> str:
        """Return whose predictions they are and how they were corrected, in a whole sentence."""
        own = report.device.get("label") or "the run's device"
        spread = prediction.rate_error(self.card.name)
        if not self.num_compared:
            return (
                f"Predictions are of a card that stands for {own}; no trial of the run could be"
                f" compared with one, so that they may be far off (rates: {spread})."
            )
        trials = counted(self.num_compared, "trial")
        return (
            f"Predictions are of a card that stands for {own}, corrected by {trials} of the run"
            f" (memory times {self.memory_ratio:.2f}, rate times {self.rate_ratio:.2f})."
            f" Rates: {spread}."
        )

    def measured(self, result: ProbeResult, device_kind: str) -> ProbeResult:
        """Return a prediction as the run's device would most likely have measured it."""
        if result.measurement is None:
            return result
        found = standin.as_measured(device_kind, result.measurement, self.card)
        like_it = standin.corrected(
            found, memory_ratio=self.memory_ratio, time_ratio=1.0 / self.rate_ratio
        )
        return replace(result, measurement=like_it)


def stand_in_of(
    plan: Plan, folder: RunFolder, run: RunFolder, report: Report, executor: Executor
) -> StandIn:
    """Return what stands for a run's device, the card that the run predicted for if it did.

    Raises:
        UsageError: If nothing does.
    """
    reason = standin_probes.not_screened(plan)
    file = run.path / screened.FILE_NAME
    known = screened.read(file)
    card: Card | None = None
    if known.stand_in is not None:
        card = standin.card_of(known.stand_in, file)
    elif not reason:
        card = standin_probes.card_for(plan, executor, report.baseline)
    if reason or card is None:
        raise UsageError(
            "nothing can be predicted for the run's device,"
            f" {report.device.get('label') or 'not named'}:"
            f" {reason or 'nothing is known of a card with so little memory'}.",
            hint="Search on a virtual card (--device virtual:CARD) for predictions.",
        )
    device = standin_probes.write_card(card, folder.work / "stand-in.toml")
    return corrected(StandIn(card=card, device=device), report, known.predictions)


def corrected(
    stand_in: StandIn, report: Report, predictions: Mapping[str, screened.Screened]
) -> StandIn:
    """Return a stand-in with the ratios of what was measured to what was predicted.

    Args:
        stand_in: Without any.
        report: Has the measured trials.
        predictions: By the candidates' digests.
    """
    pairs = [
        (trial, predictions[trial.digest])
        for trial in report.trials
        if trial.measurements and trial.digest in predictions
    ]
    memory = [
        (trial.peak_bytes or 0) / item.peak_bytes for trial, item in pairs if item.peak_bytes
    ]
    rates = [
        trial.tokens_per_s.median / item.values["tokens_per_s"]
        for trial, item in pairs
        if trial.tokens_per_s is not None and item.values.get("tokens_per_s")
    ]
    return replace(
        stand_in,
        memory_ratio=statistics.median(memory) if memory else 1.0,
        rate_ratio=statistics.median(rates) if rates else 1.0,
        num_compared=max(len(memory), len(rates)),
    )
