"""Measures every candidate of three search spaces on this CPU, for search_efficiency.py.

    taskset -c 1 python benchmarks/search_tables.py --folder FOLDER [--tables gemma3,gpt_neox]

Each table is the run of an ordinary search that walks its whole space, without a memory budget,
and the predictions that a search makes of the same candidates beforehand. What was measured and
predicted is written to benchmarks/data/search_tables, with the device and all versions. It takes
about an hour on one core of an EPYC, goes on where it was stopped, and is of no use on a machine
that does other work.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from search_table_inputs import TABLES, Inputs, make

from autotune import Budget, SearchSpace, SubprocessExecutor, Tuner, objectives
from autotune.composing import now, versions
from autotune.devices import host
from autotune.plan import Plan, make_plan
from autotune.probe import trl_yaml
from autotune.report.model import Report
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.screen import Screening
from autotune.search.guess import Guess

DATA = Path(__file__).resolve().parent / "data" / "search_tables"
UNLIMITED = 1000.0
"""Share of the time of the probes that predictions may take: here, as much as they take."""


def tuner(inputs: Inputs, folder: Path, executor: SubprocessExecutor) -> Tuner:
    """Return the search that walks a table's whole space."""
    model, data = make(inputs, folder)
    run = folder / f"run-{inputs.name}"
    return Tuner(
        model,
        data,
        space=SearchSpace.load(DATA / f"{inputs.name}.yaml"),
        device="cpu",
        global_batch=inputs.global_batch,
        measured_steps=inputs.measured_steps,
        warmup_steps=0,  # the steps with the largest batch come first, and warm up as well
        min_coverage=0.0,  # the space's lengths are what the table is to tell apart
        sampler="grid",
        executor=executor,
        run_dir=run,
        resume=(run / "run.json").exists(),
    )


def predict(
    plan: Plan, folder: Path, executor: SubprocessExecutor, baseline: Trial
) -> list[Guess]:
    """Return what a search would have predicted of all candidates before probing any."""
    run = RunFolder(folder)
    run.work.mkdir(parents=True, exist_ok=True)
    asked = (objectives.peak_memory(), objectives.tokens_per_s())
    screening = Screening(plan, run, asked, share=UNLIMITED)
    screening.run(executor, [baseline], None, None)
    for notice in screening.notices:
        print(notice)
    return screening.guesses()


def table(plan: Plan, report: Report, guesses: list[Guess]) -> dict[str, Any]:
    """Return a table as JSON values: all that a replay needs, with where it comes from."""
    guessed = {plan.space.digest(item.candidate): item for item in guesses}
    context = plan.context
    rows = []
    for trial in report.trials:
        rate, guess = trial.tokens_per_s, guessed.get(trial.digest)
        if rate is None:
            raise SystemExit(f"trial {trial.number} is {trial.outcome.value}; mend the space")
        rows.append(
            {
                "candidate": dict(trial.candidate),
                "peak": trial.peak_bytes,
                "rate": round(rate.median, 2),
                "rate_low": round(rate.low, 2),
                "rate_high": round(rate.high, 2),
                "predicted_peak": guess and guess.values[0] and round(guess.values[0]),
                "predicted_rate": guess and guess.values[1] and round(guess.values[1], 2),
                "time_shares": _rounded(guess.time_shares if guess else {}),
                "memory_shares": _rounded(guess.memory_shares if guess else {}),
            }
        )
    return {
        "measured_at": now(),
        "device": context.device.label,
        "threads": host.num_threads(),
        "versions": versions(plan.environment),
        "units": {"peak": "bytes", "rate": "tokens/s"},
        "context": {
            "trainer": context.trainer,
            "device": context.device.to_dict(),
            "model": context.model.to_dict(),
            "data": context.data.to_dict(),
            "packages": dict(context.packages),
            "global_batch": context.global_batch,
            "budget_bytes": context.budget_bytes,
            "refusals": {name: dict(item) for name, item in context.refusals.items()},
        },
        "rows": rows,
    }


def _rounded(shares: Any) -> dict[str, float]:
    return {name: round(value, 4) for name, value in shares.items() if value}


def main() -> None:
    """Measure and predict the tables that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of models, data and runs")
    parser.add_argument("--tables", default=",".join(item.name for item in TABLES))
    options = parser.parse_args()
    executor = SubprocessExecutor(devices=("cpu",))
    try:
        for inputs in TABLES:
            if inputs.name not in options.tables.split(","):
                continue
            search = tuner(inputs, options.folder, executor)
            report = search.search(Budget(trials=None))
            run = RunFolder(options.folder / f"predicted-{inputs.name}")
            run.work.mkdir(parents=True, exist_ok=True)
            plan = make_plan(search.request, run, executor)
            assert report.baseline is not None
            guesses = predict(plan, run.path, executor, report.baseline)
            text = json.dumps(table(plan, report, guesses)).replace(
                '{"candidate"', '\n{"candidate"'
            )
            trl_yaml.write_text(DATA / f"{inputs.name}.json", text + "\n")
            work_s = report.probe_work_s
            print(f"{inputs.name}: {report.outcomes()}, {work_s:.0f} s of probes", flush=True)
    finally:
        executor.shutdown()


if __name__ == "__main__":
    main()
