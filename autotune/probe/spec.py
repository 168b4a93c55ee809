"""What one probe is to run. Crosses the process border as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """One short training run, complete.

    Attributes:
        probe_id: Name of the probe's folder, such as ``0007`` or ``0007-again``.
        folder: Absolute path of the folder for ``spec.json``, ``result.json`` and logs.
        trainer: Trainer adapter to use.
        config: The mapping that ``export`` writes, key for key as the ``trl`` CLI reads it.
        overlay: Probe-only keys laid over ``config`` (step count, no saving, no reporting).
        device: Resolved device name, such as ``cpu`` or ``cuda:0``.
        data_folder: Tokenised rows that the prepare task wrote; None to load the data anew.
        weights: ``random`` (built from the model's config) or ``real``.
        memory_budget_bytes: Enforced cap; None for no cap but the device's own.
        beyond_device: Whether not even the device's own memory is a cap, to see what a run needs
            that does not fit; on a virtual card alone.
        timeline_points: The most points of a predicted timeline of memory in use.
        warmup_steps: Typical optimizer steps kept apart before the measured ones.
        measured_steps: Optimizer steps that give the rate.
        first_worst_steps: Steps at the start that end with the largest batch: 2 hold it before and
            after the optimizer states exist.
        rows_per_step: Rows of differing length that a step holds at least, if a full one does.
        representative: Whether typical micro-batches are chosen to stand for all, where they are
            too few to average.
        accumulation_steps: Micro-batches per optimizer step in the exported configuration. The
            overlay may shorten them for the probe; the rate is composed from the raw times.
        phases: Extra phases to run, of ``eval`` and ``save``.
        process_env: Environment variables that must be set before torch is imported.
        timeout_s: Wall-clock limit.
        seed: Seed of the probe.
        trust_remote_code: Whether the model's own code may run.
        processes: Processes that train together, each on a device of its own.
        accelerate: The configuration that ``accelerate launch`` starts several with, as it is
            exported; empty for one process.
    """

    probe_id: str
    folder: str
    trainer: str
    config: Mapping[str, Any]
    device: str
    overlay: Mapping[str, Any] = field(default_factory=dict)
    data_folder: str | None = None
    weights: str = "random"
    memory_budget_bytes: int | None = None
    beyond_device: bool = False
    timeline_points: int = 60
    warmup_steps: int = 1
    measured_steps: int = 5
    rows_per_step: int = 8
    representative: bool = False
    first_worst_steps: int = 2
    accumulation_steps: int = 1
    phases: tuple[str, ...] = ()
    process_env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    seed: int = 0
    trust_remote_code: bool = False
    processes: int = 1
    accelerate: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with the schema number."""
        data = {"schema": SCHEMA, **asdict(self)}
        if self.processes == 1:
            del data["processes"], data["accelerate"]  # as in specs from before there were several
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeSpec:
        """Return the record that :meth:`to_dict` wrote."""
        values = {key: value for key, value in data.items() if key != "schema"}
        values["phases"] = tuple(values.get("phases", ()))
        return cls(**values)
