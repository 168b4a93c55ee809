"""Predicted memory and rate beside what a real card measures, configuration by configuration.

    python benchmarks/gpu/predicted_vs_measured.py [--minutes 8] [--out FILE]

Twenty configurations of a model of 1.2 billion random weights run on cuda:0, each through the
project's own executor and SFT adapter as in a search. The same configurations are predicted for a
virtual card that stands for the real one, with the short schedule that a search predicts with, and
once more with the steps that were measured. One JSON file takes everything; it is written after
each configuration. The last line is one JSON object with the totals.

    --measure-on virtual:a100-80gb   a dry run without a GPU: both sides are predicted
    --measured FILE                  predict anew for what an earlier run measured, without a GPU

No network is used: model, tokenizer and rows are made here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_comparison as comparison
from gpu_comparison import Configuration
from gpu_inputs import MODELS, SEED, make_model, make_rows

from autotune.errors import AutotuneError
from autotune.executors.subprocess import SubprocessExecutor
from autotune.plan import (
    MEASURED_FIRST_WORST,
    MEASURED_ROWS,
    PREDICTED_FIRST_WORST,
    PREDICTED_ROWS,
    Plan,
    Request,
    make_plan,
    predicted_steps,
)
from autotune.probe.result import Outcome, ProbeResult
from autotune.probe.spec import ProbeSpec
from autotune.runfolder import RunFolder
from autotune.space.space import SearchSpace
from autotune.virtual import cards
from autotune.worker.tasks import write_json

SCHEMA = 1
RESULTS = Path(__file__).with_name("results")
GLOBAL_BATCH = 8
PROBE_LIMIT_S = 150.0
PREDICTION_SHARE = 0.2
"""Of the time, what is kept for the predictions at the end."""
MAX_SLOTS = 8
VIRTUAL = "virtual:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How many steps a probe runs, and of what; ``measured`` None for a prediction's own."""

    first_worst: int
    warmup: int
    measured: int | None
    rows_per_step: int
    representative: bool = False


LONG_PROBE = Steps(
    first_worst=MEASURED_FIRST_WORST, warmup=1, measured=5, rows_per_step=MEASURED_ROWS
)
SHORT_PROBE = Steps(
    first_worst=PREDICTED_FIRST_WORST,
    warmup=0,
    measured=None,
    rows_per_step=PREDICTED_ROWS,
    representative=True,
)


class Clock:
    """The time that is left.

    Args:
        minutes: From now on.
    """

    def __init__(self, minutes: float) -> None:
        self._total_s = minutes * 60.0
        self._started_s = time.monotonic()

    @property
    def left_s(self) -> float:
        """Return the seconds until the end."""
        return self._started_s + self._total_s - time.monotonic()

    @property
    def left_to_measure_s(self) -> float:
        """Return the seconds until the predictions must begin."""
        return self.left_s - PREDICTION_SHARE * self._total_s


class Bench:
    """One run of the benchmark.

    Args:
        args: Of the command line.
        folder: Takes everything but the result.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.clock = Clock(args.minutes)
        self._args = args
        self._folder = folder
        self.out: Path | None = args.out
        self._earlier = json.loads(args.measured.read_text()) if args.measured else None
        self._hidden = {
            str(folder): "FOLDER",
            str(Path(__file__).resolve().parents[2]): "CHECKOUT",
            sys.prefix: "PREFIX",
        }
        chosen = comparison.choose(args.configs)
        self._rows: dict[str, dict[str, Any]] = {
            item.name: {"name": item.name, "knobs": item.knobs, "budget_bytes": item.budget_bytes}
            for item in chosen
        }
        self._snapshots: list[dict[str, Any]] = []
        self._record: dict[str, Any] = {"schema": SCHEMA}
        self._number = 0
        if self._earlier is not None:
            self._take_over(self._earlier)
        self._chosen = tuple(item for item in chosen if item.name in self._rows)

    def run(self) -> dict[str, Any]:
        """Measure and predict; return the record.

        Raises:
            AutotuneError: If the device, the model or the data cannot be used.
        """
        place = self._predict_on() if self._earlier is not None else self._args.measure_on
        executor = SubprocessExecutor((place,), timeout_s=600, log_folder=self._logs("measure"))
        try:
            plan = self._plan(executor, place)
            facts = self._facts(executor, plan)
            predict_on = self._describe(plan, facts)
            configs = self._configs(plan)
            if self._earlier is None:
                self._measure(executor, plan, configs)
        finally:
            executor.shutdown()
        self._predict(plan, configs, predict_on)
        self._write()
        return self._record

    def _take_over(self, earlier: Mapping[str, Any]) -> None:
        measured = {row["name"]: row for row in earlier["configurations"]}
        for name in [name for name in self._rows if name not in measured]:
            del self._rows[name]
        for name, row in self._rows.items():
            old = measured[name]
            row.update(
                knobs=old["knobs"], budget_bytes=old["budget_bytes"], measured=old.get("measured")
            )
        self._snapshots = list(earlier.get("snapshots", ()))
        self._args.model = earlier["model"]["name"]

    def _predict_on(self) -> str:
        assert self._earlier is not None
        earlier_card = self._earlier["card"]
        facts = earlier_card.get("facts")
        if facts is None:
            return str(earlier_card["measured_on"])
        return comparison.predicted_device(facts, self._folder)[0]

    def _logs(self, name: str) -> Path:
        path = self._folder / f"logs-{name}"
        path.mkdir()
        return path

    def _plan(self, executor: SubprocessExecutor, device: str) -> Plan:
        """Return the plan of a search of the SFT space with the model and rows made here."""
        made = executor.run_task("demo", {"folder": str(self._folder / "demo")}, timeout_s=300)
        model = make_model(self._folder / "model", Path(made["model"]), MODELS[self._args.model])
        request = Request(
            model=str(model),
            dataset=str(make_rows(self._folder / "rows.jsonl")),
            space=SearchSpace.load("sft"),
            device=device,
            global_batch=GLOBAL_BATCH,
            min_coverage=0.0,
        )
        run = RunFolder(self._folder / "run")
        run.work.mkdir(parents=True)
        return make_plan(request, run, executor)

    def _facts(self, executor: SubprocessExecutor, plan: Plan) -> dict[str, Any] | None:
        """Return what PyTorch tells of the real card; None if there is none."""
        if self._earlier is not None:
            return self._earlier["card"].get("facts")
        if plan.context.device.is_virtual:
            return None
        return executor.run_task("gpu_tasks:card_facts", {}, timeout_s=120)

    def _describe(self, plan: Plan, facts: Mapping[str, Any] | None) -> str:
        """Fill in what is known before the first probe; return the device to predict on."""
        info = plan.context.device
        if facts is None:
            device, how = info.name, "both sides are predicted"
        else:
            device, how = comparison.predicted_device(facts, self._folder)
        card = cards.find(device.removeprefix(VIRTUAL))
        environment = {k: v for k, v in plan.environment.items() if k != "host"}
        self._record |= {
            "is_measurement": facts is not None,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "card": {
                "name": facts["name"] if facts else card.name,
                "measured_on": self._args.measure_on,
                "facts": facts,
                "driver": info.driver,
                "free_bytes": info.free_bytes,
                "predicted_as": {
                    "id": card.id,
                    "name": card.name,
                    "how": how,
                    "memory_bytes": card.memory_bytes,
                    "context_bytes": card.context_bytes,
                    "bandwidth_bytes_per_s": card.bandwidth_bytes_per_s,
                    "tflops": dict(card.tflops),
                },
            },
            "environment": environment,
            "optional_packages": dict(plan.context.packages),
            "model": {
                "name": self._args.model,
                "num_parameters": plan.context.model.num_parameters,
                **MODELS[self._args.model],
            },
            "data": {
                "num_rows": plan.context.data.num_rows,
                "num_tokens": plan.context.data.num_tokens,
                "longest": plan.context.data.longest,
            },
            "global_batch": GLOBAL_BATCH,
        }
        if self._earlier is not None:
            earlier = self._earlier
            self._record["predicted_with"] = environment
            for key in ("is_measurement", "environment", "optional_packages"):
                self._record[key] = earlier[key]
            self._record["measured_date"] = earlier.get("measured_date", earlier["date"])
            for key in ("driver", "free_bytes", "measured_on"):
                self._record["card"][key] = earlier["card"][key]
        if self.out is None:
            self.out = self._args.folder / result_name(self._record)
        return device

    def _configs(self, plan: Plan) -> dict[str, dict[str, Any]]:
        """Return the TRL keys of each configuration that is possible here; skip the others."""
        found = {}
        for item in self._chosen:
            row = self._rows[item.name]
            if self._earlier is not None and row["measured"] is None:
                row["skipped"] = "it was not measured"
                continue
            pins = {name: str(value) for name, value in row["knobs"].items()}
            try:
                space = plan.request.space.resolve(plan.context, pins)
            except AutotuneError as error:
                row["skipped"] = error.message
                continue
            found[item.name] = replace(plan, space=space).config(space.baseline)
        return found

    def _measure(
        self,
        executor: SubprocessExecutor,
        plan: Plan,
        configs: Mapping[str, dict[str, Any]],
    ) -> None:
        device = plan.context.device.name
        for item in self._chosen:
            if item.name not in configs:
                continue
            left = self.clock.left_to_measure_s
            row = self._rows[item.name]
            if left <= 0:
                row["skipped"] = "no time was left to measure it"
                continue
            spec = self._spec(plan, item, configs[item.name], device, LONG_PROBE, limit_s=left)
            started = time.monotonic()
            try:
                result = executor.submit(spec).result(timeout=spec.timeout_s + 60)
            except (AutotuneError, FutureTimeoutError) as error:
                row["skipped"] = f"it could not be run: {type(error).__name__}"
                continue
            if was_cut_short(result, spec):
                row["skipped"] = "no time was left to measure it"
                continue
            row["measured"] = comparison.side(result, hidden=self._hidden)
            print(f"{item.name}: {told(result)}, {time.monotonic() - started:.1f} s", flush=True)
            self._write()
            if item.snapshot:
                self._snapshot(executor, plan, item, configs[item.name], device)
                self._write()

    def _snapshot(
        self,
        executor: SubprocessExecutor,
        plan: Plan,
        item: Configuration,
        config: dict[str, Any],
        device: str,
    ) -> None:
        """Record the allocator's history of one configuration and replay it."""
        row: dict[str, Any] = {"name": item.name}
        self._snapshots.append(row)
        left = self.clock.left_to_measure_s
        if not device.startswith("cuda"):
            row["skipped"] = "only CUDA's allocator keeps a history"
        elif left <= 0:
            row["skipped"] = "no time was left"
        if "skipped" in row:
            return
        spec = self._spec(plan, item, config, device, LONG_PROBE, limit_s=left)
        request = {
            "spec": spec.to_dict(),
            "settings": spec.process_env.get("PYTORCH_ALLOC_CONF", ""),
            "process_env": dict(spec.process_env),
        }
        try:
            answer = executor.run_task("gpu_tasks:record_probe", request, timeout_s=spec.timeout_s)
        except AutotuneError as error:
            row["skipped"] = comparison.shown(error.message, self._hidden)[-300:]
            return
        result = ProbeResult.from_dict(answer["result"])
        peak = result.measurement.peak_of("reserved_bytes") if result.measurement else None
        row |= {"outcome": result.outcome.value, "reserved_bytes": peak, **answer["replay"]}
        print(f"{item.name}: replayed, reserved off by {row['reserved_error_pct']} %", flush=True)

    def _predict(self, plan: Plan, configs: Mapping[str, dict[str, Any]], device: str) -> None:
        """Predict every configuration that was measured, several at a time."""
        wanted = [
            i for i in self._chosen if i.name in configs and "skipped" not in self._rows[i.name]
        ]
        slots = self._args.slots or min(MAX_SLOTS, len(os.sched_getaffinity(0)))
        executor = SubprocessExecutor(
            (device,) * slots, timeout_s=600, log_folder=self._logs("predict")
        )
        try:
            jobs: list[tuple[str, str, ProbeSpec, Future[ProbeResult]]] = []
            for key, steps in (("predicted", SHORT_PROBE), ("predicted_same_steps", LONG_PROBE)):
                for item in wanted:
                    limit_s = max(self.clock.left_s, 1.0)
                    spec = self._spec(
                        plan, item, configs[item.name], device, steps, limit_s=limit_s
                    )
                    jobs.append((item.name, key, spec, executor.submit(spec)))
            for name, key, spec, job in jobs:
                with contextlib.suppress(AutotuneError, FutureTimeoutError):
                    result = job.result(timeout=max(self.clock.left_s, 0.1))
                    if not was_cut_short(result, spec):
                        self._rows[name][key] = comparison.side(result, hidden=self._hidden)
        finally:
            executor.shutdown()

    def _spec(
        self,
        plan: Plan,
        item: Configuration,
        config: Mapping[str, Any],
        device: str,
        steps: Steps,
        *,
        limit_s: float,
    ) -> ProbeSpec:
        self._number += 1
        folder = self._folder / "probes" / f"{self._number:04d}"
        folder.mkdir(parents=True)
        accumulation = int(config.get("gradient_accumulation_steps", 1))
        return ProbeSpec(
            probe_id=folder.name,
            folder=str(folder),
            trainer="sft",
            config=config,
            device=device,
            data_folder=plan.data_folder,
            memory_budget_bytes=self._rows[item.name]["budget_bytes"],
            warmup_steps=steps.warmup,
            measured_steps=predicted_steps(accumulation)
            if steps.measured is None
            else steps.measured,
            first_worst_steps=steps.first_worst,
            rows_per_step=steps.rows_per_step,
            representative=steps.representative,
            accumulation_steps=accumulation,
            process_env={key: str(value) for key, value in config.get("env", {}).items()},
            timeout_s=max(min(PROBE_LIMIT_S, limit_s), 1.0),
            seed=SEED,
        )

    def _write(self) -> None:
        rows = [comparison.with_errors(row) for row in self._rows.values()]
        self._record["card"]["context_bytes"] = comparison.measured_context_bytes(rows)
        self._record |= {
            "configurations": rows,
            "snapshots": self._snapshots,
            "totals": comparison.totals(rows, self._snapshots),
        }
        assert self.out is not None
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.out, self._record)


def was_cut_short(result: ProbeResult, spec: ProbeSpec) -> bool:
    """Return whether it was the end of the benchmark that ended a probe."""
    return result.outcome is Outcome.TIMEOUT and spec.timeout_s < PROBE_LIMIT_S


def told(result: ProbeResult) -> str:
    """Return a probe's result in a few words."""
    if result.measurement is None:
        return str(result.outcome)
    return f"{result.outcome}, {result.measurement.tokens_per_s.median:,.0f} tokens/s"


def result_name(record: Mapping[str, Any]) -> str:
    """Return the name of a result's file: the card and the day."""
    card = re.sub(r"[^a-z0-9]+", "-", str(record["card"]["name"]).lower()).strip("-")
    kind = "" if record["is_measurement"] else "dry-run-"
    again = "-predicted-anew" if "measured_date" in record else ""
    return f"{kind}{card}-{record['date'][:10]}{again}.json"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description="Predicted memory and rate beside what a real card measures."
    )
    parser.add_argument("--measure-on", default="cuda:0", metavar="DEVICE")
    parser.add_argument("--measured", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--configs", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--model", choices=sorted(MODELS), default="1b")
    parser.add_argument("--slots", type=int, default=0, help="predictions at once")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument(
        "--folder", type=Path, default=RESULTS, help="takes a result without --out, named by card"
    )
    args = parser.parse_args(argv)
    try:
        comparison.choose(args.configs)
    except ValueError as error:
        parser.error(str(error))
    if not args.measure_on.startswith((VIRTUAL, "cuda")):
        parser.error("--measure-on is cuda:N or virtual:CARD")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, predict, print both, and end with one line of JSON."""
    args = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="autotune-gpu-"))
    try:
        bench = Bench(args, folder)
        record = bench.run()
    except AutotuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    word = "measured" if record["is_measurement"] else "pretend"
    print(comparison.table(record["configurations"], measured_word=word))
    for item in record["snapshots"]:
        said = item.get("skipped") or f"reserved off by {item['reserved_error_pct']} %"
        print(f"snapshot of {item['name']}: {said}")
    figures = {
        "card": record["card"]["name"],
        "is_measurement": record["is_measurement"],
        "file": bench.out.name if bench.out else None,
        **record["totals"],
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
