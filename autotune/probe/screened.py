"""The records of ``predictions.jsonl``: what was predicted before it was probed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import JournalError
from autotune.probe import journal, typed
from autotune.probe.result import Outcome

FILE_NAME = "predictions.jsonl"

_PREDICTION = "prediction"
_STAND_IN = "stand_in"
_HINT = (
    "Delete that line, or the whole file to do without the predictions: nothing measured is in it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """What was predicted of one candidate on the card that stands for the real device.

    Attributes:
        digest: The candidate's.
        candidate: Knob name to value.
        outcome: How the virtual probe ended; another than ``ok`` says nothing of the real device.
        values: Value per objective, by its name and in its unit, as far as known.
        peak_bytes: Peak of the memory that decides the fit; None without a prediction.
        time_s: Wall time that the virtual probe took.
        time_shares: Share (0 to 1) of each kind of work in the predicted time.
        memory_shares: Share (0 to 1) of each kind of memory in the predicted peak.
    """

    digest: str
    candidate: Mapping[str, Any]
    outcome: Outcome
    values: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    time_s: float | None = None
    time_shares: Mapping[str, float] = field(default_factory=dict)
    memory_shares: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "outcome": self.outcome.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Screened:
        """Return the record that :meth:`to_dict` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is no such record.
        """
        names = cls.__dataclass_fields__
        values = {key: value for key, value in data.items() if key in names}
        values["outcome"] = Outcome(values["outcome"])
        record = cls(**values)
        typed.check(record)
        typed.check_scalars(record.candidate, "candidate")
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """All that a run folder holds of predictions.

    Attributes:
        stand_in: The figures of the card that they are for; None if there are none.
        predictions: By the candidates' digests; the last one of a candidate counts.
    """

    stand_in: Mapping[str, Any] | None = None
    predictions: Mapping[str, Screened] = field(default_factory=dict)


def append(path: Path, prediction: Screened) -> None:
    """Add one prediction.

    Raises:
        JournalError: If it cannot be written, such as on a full disk.
    """
    journal.append(path, _PREDICTION, {"prediction": prediction.to_dict()})


def append_stand_in(path: Path, card: Mapping[str, Any]) -> None:
    """Note the figures of the card that the predictions after it are for.

    Raises:
        JournalError: If they cannot be written.
    """
    journal.append(path, _STAND_IN, {"card": dict(card)})


def read(path: Path) -> Records:
    """Return what ``path`` holds; nothing if there is no such file.

    Raises:
        JournalError: If it cannot be read, or a line other than a last one that was cut off is
            damaged.
    """
    try:
        lines = journal.read_numbered(path)
    except JournalError as error:
        hint = _HINT if "damaged" in error.message else error.hint
        raise JournalError(error.message, hint=hint) from error
    stand_in: Mapping[str, Any] | None = None
    found: dict[str, Screened] = {}
    for number, record in lines:
        try:
            if record["kind"] == _STAND_IN:
                stand_in = dict(record["card"])
            elif record["kind"] == _PREDICTION:
                prediction = Screened.from_dict(record["prediction"])
                found[prediction.digest] = prediction
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            message = f"{path}, line {number} is damaged: {reason}."
            raise JournalError(message, hint=_HINT) from error
    return Records(stand_in=stand_in, predictions=found)
