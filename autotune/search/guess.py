"""What is guessed of candidates before they are probed: the inputs of the learned sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What was predicted for one candidate.

    Attributes:
        candidate: Knob name to value.
        values: One value per objective of the study, in its unit; None where it is not known.
        load: Predicted peak memory over the memory budget; above 1 does not fit. None if not
            known.
    """

    candidate: Mapping[str, Any]
    values: tuple[float | None, ...]
    load: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """How far a prediction was off in an earlier run, for one candidate.

    Attributes:
        candidate: Knob name to value.
        ratios: Measured over predicted, one per objective; None where one of them is not known.
        load_ratio: The same of the peak memory; None if not known.
    """

    candidate: Mapping[str, Any]
    ratios: tuple[float | None, ...]
    load_ratio: float | None = None
