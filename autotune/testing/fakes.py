"""An executor without processes: a synthetic memory wall, so that searches take milliseconds."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from autotune.errors import AutotuneError, ExecutorError
from autotune.probe.result import (
    Measurement,
    MemoryPeak,
    Outcome,
    ProbeResult,
    StepRecord,
    Timeline,
)
from autotune.probe.spec import ProbeSpec
from autotune.units import format_gib

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWall:
    """How much memory and time a configuration takes on a machine that does not exist.

    Memory grows with the tokens in a micro-batch until it hits the wall. The knobs pull in the
    directions they pull in reality: checkpointing trades time for memory, LoRA and leaner
    optimizers save state, longer micro-batches are more efficient.

    Attributes:
        capacity_bytes: What the device has; a spec's lower budget goes first.
        weights_bytes: Weights, and as much again for the gradients of all of them.
        bytes_per_token: Activations of one token, without checkpointing.
        micro_batch_overhead_s: Time of a micro-batch without tokens.
        token_time_s: Time per token.
        mean_row_tokens: Tokens of a typical row before truncation.
        noise_ratio: Spread of the step times around their mean; the draw depends on the spec.
    """

    capacity_bytes: int = 8 * GIB
    weights_bytes: int = 1 * GIB
    bytes_per_token: int = 1 << 20
    micro_batch_overhead_s: float = 0.05
    token_time_s: float = 1e-4
    mean_row_tokens: int = 512
    noise_ratio: float = 0.01

    def load_bytes(self, config: Mapping[str, Any]) -> int:
        """Return what loading a configuration's weights takes, in bytes."""
        share = 0.5 if config.get("dtype") in ("bfloat16", "float16") else 1.0
        return int(self.weights_bytes * (0.3 if config.get("load_in_4bit") else share))

    def peak_bytes(self, config: Mapping[str, Any]) -> int:
        """Return the peak memory of a configuration, in bytes."""
        share = 0.02 if config.get("use_peft") else 1.0
        weights = self.weights_bytes * (0.3 if config.get("load_in_4bit") else 1.0)
        optimizer = str(config.get("optim", "adamw_torch_fused"))
        states = 0.5 if "8bit" in optimizer else 0.1 if "adafactor" in optimizer else 2.0
        kept = 0.2 if config.get("gradient_checkpointing") else 1.0
        activations = self.bytes_per_token * self._positions(config) * kept
        return int(weights + self.weights_bytes * share * (1.0 + states) + activations)

    def step(self, config: Mapping[str, Any], accumulation_steps: int, noise: float) -> StepRecord:
        """Return one optimizer step; ``noise`` is about 1."""
        positions = self._positions(config)
        slowdown = 1.3 if config.get("gradient_checkpointing") else 1.0
        micro_time_s = self.micro_batch_overhead_s + self.token_time_s * positions * slowdown
        tokens = self._rows(config) * min(self._length(config), self.mean_row_tokens)
        return StepRecord(
            micro_times_s=(micro_time_s * noise,) * accumulation_steps,
            optimizer_time_s=0.01 * noise,
            num_tokens=tokens * accumulation_steps,
            num_positions=positions * accumulation_steps,
            num_loss_tokens=tokens * accumulation_steps // 2,
            num_rows=self._rows(config) * accumulation_steps,
        )

    def _rows(self, config: Mapping[str, Any]) -> int:
        return int(config.get("per_device_train_batch_size", 8))

    def _length(self, config: Mapping[str, Any]) -> int:
        return int(config.get("max_length") or 1024)

    def _positions(self, config: Mapping[str, Any]) -> int:
        return self._rows(config) * self._length(config)


Fault = Outcome | AutotuneError | None


class FakeExecutor:
    """Resolves every probe at once, from a :class:`MemoryWall` and nothing else.

    Args:
        wall: The machine.
        walls: Machines by device name, for a search on several; ``wall`` is all others.
        slots: Probes that may run at once, as far as the search is told.
        fault: Asked before every probe; returns an outcome to end it with, an error to raise from
            its future, or None to let the wall decide.
        answers: Answers of other tasks, by name: plain JSON, or a function of the request.

    Attributes:
        submitted: All specs, in the order they came.
        tasks: All other requests, as name and request.
        is_shut_down: Whether ``shutdown`` was called.
    """

    def __init__(
        self,
        *,
        wall: MemoryWall | None = None,
        walls: Mapping[str, MemoryWall] | None = None,
        slots: int = 1,
        fault: Callable[[ProbeSpec], Fault] | None = None,
        answers: Mapping[str, Any] | None = None,
    ) -> None:
        self.wall = wall or MemoryWall()
        self.walls = walls or {}
        self.submitted: list[ProbeSpec] = []
        self.tasks: list[tuple[str, Mapping[str, Any]]] = []
        self.is_shut_down = False
        self._slots = slots
        self._fault = fault
        self._answers = answers or {}

    @property
    def slots(self) -> int:
        """Probes that may run at once."""
        return self._slots

    def submit(self, spec: ProbeSpec) -> Future[ProbeResult]:
        """Return a future that is done.

        Raises:
            ExecutorError: If the executor was shut down.
        """
        if self.is_shut_down:
            raise ExecutorError("The executor was shut down.")
        # The spec crosses as JSON, as it does to a real probe.
        spec = ProbeSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
        self.submitted.append(spec)
        future: Future[ProbeResult] = Future()
        fault = self._fault(spec) if self._fault is not None else None
        if isinstance(fault, AutotuneError):
            future.set_exception(fault)
        else:
            result = self._failed(spec, fault) if fault is not None else self._probe(spec)
            future.set_result(ProbeResult.from_dict(json.loads(json.dumps(result.to_dict()))))
        return future

    def run_task(
        self, name: str, request: Mapping[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """Return the answer given for the task.

        Raises:
            ExecutorError: If none was given.
        """
        self.tasks.append((name, request))
        if name not in self._answers:
            raise ExecutorError(f"The fake has no answer for the task {name!r}.")
        answer = self._answers[name]
        return answer(request) if callable(answer) else dict(answer)

    def shutdown(self) -> None:
        """Accept no more probes; safe to call twice."""
        self.is_shut_down = True

    def _probe(self, spec: ProbeSpec) -> ProbeResult:
        config = {**spec.config, **spec.overlay}
        wall = self.walls.get(spec.device, self.wall)
        peak = wall.peak_bytes(config)
        limit = min(wall.capacity_bytes, spec.memory_budget_bytes or wall.capacity_bytes)
        if peak > limit and not spec.beyond_device:
            detail = f"{format_gib(peak)} are needed of {format_gib(limit)}"
            phase = "load" if wall.load_bytes(config) > limit else "first_step"
            return self._failed(spec, Outcome.DEVICE_OOM, detail=detail, phase=phase)
        digest = hashlib.sha256(json.dumps(spec.to_dict(), sort_keys=True).encode()).digest()
        draw = random.Random(digest)
        steps = tuple(
            wall.step(config, spec.accumulation_steps, draw.uniform(1, 1 + wall.noise_ratio))
            for _ in range(max(spec.measured_steps, 1))  # a prediction may have none of its own
        )
        load_peak, step_peak = (
            MemoryPeak(allocated_bytes=n, reserved_bytes=n, used_bytes=n, resident_bytes=n)
            for n in (wall.weights_bytes, peak)
        )
        is_virtual = spec.device.startswith("virtual:")
        measurement = Measurement(
            source="predicted" if is_virtual else "measured",
            makeup=_makeup(wall.weights_bytes, peak) if is_virtual else None,
            device_kind=spec.device.partition(":")[0],
            accumulation_steps=spec.accumulation_steps,
            steps=steps,
            phases={"load": load_peak, "first_step": step_peak, "later_steps": step_peak},
            worst_batch=(
                int(config.get("per_device_train_batch_size", 8)),
                int(config.get("max_length") or 1024),
            ),
            rows_per_epoch=1000.0,
        )
        steps_s = sum(step.time_s(spec.accumulation_steps) for step in steps)
        return ProbeResult(
            probe_id=spec.probe_id,
            outcome=Outcome.OK,
            measurement=measurement,
            timeline=Timeline(start_s=0.0, load_s=1.0, steps_s=steps_s, total_s=1.0 + steps_s),
            environment={"device": "fake", "packages": {}},
        )

    def _failed(
        self,
        spec: ProbeSpec,
        outcome: Outcome,
        detail: str = "as the fake was told",
        phase: str = "first_step",
    ) -> ProbeResult:
        return ProbeResult(
            probe_id=spec.probe_id,
            outcome=outcome,
            detail=detail,
            phase=phase,
            timeline=Timeline(start_s=0.0, load_s=1.0, total_s=1.0),
            environment={"device": "fake", "packages": {}},
        )


def _makeup(weights_bytes: int, peak_bytes: int) -> dict[str, Any]:
    """Return what a predicted peak is made of: weights, and activations at its end."""
    rest = peak_bytes - weights_bytes
    return {
        "peak_bytes": peak_bytes,
        "peak_event": {"index": 1, "op": "mm", "module": "model", "phase": "forward", "mark": ""},
        "at_peak": {"parameters": weights_bytes, "activations": rest},
        "largest": [],
        "timeline": {
            "num_events": 2,
            "kinds": ["parameters", "activations"],
            "points": [[0, weights_bytes, 0], [1, weights_bytes, rest]],
            "phases": ["load", "forward"],
            "marks": [[0, "load"]],
        },
        "host_peak_bytes": 0,
    }
