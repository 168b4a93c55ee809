"""What one configuration is predicted to take on one or more cards, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autotune.probe import prediction
from autotune.probe.result import Interval, Measurement, Outcome
from autotune.units import format_gib, format_gib_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class CardEstimate:
    """The prediction for one card.

    Attributes:
        device: ``virtual:`` and the card, as resolved.
        label: The card's name.
        memory_bytes: What a process can use of the card, context included.
        context_bytes: Of that, what the context takes.
        budget_bytes: What the run may use: the card's memory less a margin.
        outcome: How the run on the card ended.
        detail: Why, if it did not end well.
        is_refusal: Whether trainer or card refuse the configuration, so that it surely does not
            run there; otherwise it may be that it only cannot be predicted.
        measurement: What was predicted; of a run that does not fit, from a second one that may
            take more than the card has. None if it could not be told.
    """

    device: str
    label: str
    memory_bytes: int
    context_bytes: int
    budget_bytes: int
    outcome: Outcome
    detail: str = ""
    is_refusal: bool = False
    measurement: Measurement | None = None

    @property
    def used_bytes(self) -> int | None:
        """Return the peak of reserved memory and context together."""
        return None if self.measurement is None else self.measurement.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the run gets through and stays within the budget."""
        used = self.used_bytes
        return self.outcome is Outcome.OK and used is not None and used <= self.budget_bytes

    @property
    def is_known(self) -> bool:
        """Whether it can be said if it fits; what is refused on this card does not."""
        return self.is_refusal or self.outcome in (Outcome.OK, Outcome.DEVICE_OOM)

    @property
    def host_bytes(self) -> int | None:
        """Return the most that the host holds for the device: copies moved, paged states."""
        return None if self.measurement is None else self.measurement.peak_of("resident_bytes")

    @property
    def fragmentation(self) -> float | None:
        """Return the share (0 to 1) of the reserved memory that no tensor ever needs at once."""
        if self.measurement is None:
            return None
        allocated = self.measurement.peak_of("allocated_bytes")
        reserved = self.measurement.peak_of("reserved_bytes")
        return None if not reserved or allocated is None else 1.0 - allocated / reserved

    @property
    def tokens_per_s(self) -> Interval | None:
        """Return the rate with all that it may be off by."""
        pooled = self.measurement
        return None if pooled is None else prediction.rate_interval(pooled.tokens_per_s.median)

    @property
    def step_time_s(self) -> Interval | None:
        """Return the time of an optimizer step with all that it may be off by, in seconds."""
        pooled = self.measurement
        return None if pooled is None else prediction.rate_interval(pooled.step_time_s.median)

    @property
    def makeup(self) -> Mapping[str, Any] | None:
        """Return what the peak is made of, with the run's peaks for the allocator and the host."""
        if self.measurement is None or self.measurement.makeup is None:
            return None
        return {
            **self.measurement.makeup,
            "allocated_bytes": self.measurement.peak_of("allocated_bytes"),
            "host_peak_bytes": self.host_bytes or 0,
        }

    def verdict(self) -> str:
        """Return whether it fits, in words."""
        used, limit = format_gib(self.used_bytes), format_gib(self.budget_bytes)
        if self.used_bytes is not None:
            used, limit = format_gib_apart(self.used_bytes, self.budget_bytes)
        rule = f"the limit is {limit}: {format_gib(self.memory_bytes)} of memory less"
        rule += f" {prediction.MEMORY_MARGIN:.0%}"
        if self.fits:
            return f"FITS: a predicted {used} used; {rule}.{self.host_warning()}"
        if self.outcome is Outcome.OK:
            return f"TOO CLOSE: a predicted {used} used; {rule}.{self.host_warning()}"
        if self.outcome is Outcome.DEVICE_OOM:
            needed = f"it would need a predicted {used}" if self.measurement else self.detail
            return f"DOES NOT FIT: {needed}; {rule}."
        if self.is_refusal:
            return f"DOES NOT RUN: {self.reason}"
        return f"CANNOT BE TOLD ({self.outcome.value}): {self.detail}"

    @property
    def reason(self) -> str:
        """Return why it did not end well, without the name of a Python exception."""
        return re.sub(r"^\w+Error: ", "", self.detail)

    def host_warning(self) -> str:
        """Return a warning, after a space, if the host must hold more than many have."""
        held = self.host_bytes or 0
        if held < prediction.HOST_WARNED_BYTES:
            return ""
        return f" WARNING: it needs {format_gib(held)} of host memory."

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        found: dict[str, Any] = {
            "device": self.device,
            "label": self.label,
            "source": prediction.SOURCE,
            "fits": self.fits if self.is_known else None,
            "outcome": self.outcome.value,
            "detail": self.detail,
            "memory_bytes": self.memory_bytes,
            "context_bytes": self.context_bytes,
            "budget_bytes": self.budget_bytes,
        }
        pooled = self.measurement
        if pooled is None or self.tokens_per_s is None or self.step_time_s is None:
            return found
        return found | {
            "allocated_bytes": pooled.peak_of("allocated_bytes"),
            "reserved_bytes": pooled.peak_of("reserved_bytes"),
            "used_bytes": self.used_bytes,
            "peak_phase": pooled.peak_phase,
            "fragmentation": self.fragmentation,
            "host_bytes": self.host_bytes,
            "tokens_per_s": asdict(self.tokens_per_s),
            "step_time_s": asdict(self.step_time_s),
            "padding_share": pooled.padding_share,
            "worst_batch": pooled.worst_batch,
            "num_alloc_retries": pooled.num_alloc_retries,
            "makeup": self.makeup,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predictions for one configuration.

    Attributes:
        file: The configuration's file.
        trainer: The ``trl`` command it is for.
        cards: One prediction per card, in the order asked for.
        coverage: Share (0 to 1) of the data's loss tokens that it trains on; None if not known.
        data: What the rows are, in words.
        notes: What the prediction does otherwise than the file says.
    """

    file: str
    trainer: str
    cards: tuple[CardEstimate, ...]
    coverage: float | None = None
    data: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "file": self.file,
            "trainer": self.trainer,
            "source": prediction.SOURCE,
            "errors": {
                "allocated": prediction.ALLOCATED_ERROR,
                "memory_margin": prediction.MEMORY_MARGIN,
                "rate": prediction.RATE_ERROR,
            },
            "coverage": self.coverage,
            "data": self.data,
            "notes": list(self.notes),
            "cards": [card.to_dict() for card in self.cards],
        }
