"""Measures every candidate of three search spaces on this CPU, for search_efficiency.py.

    python benchmarks/search_tables.py --folder FOLDER [--tables gemma3,gpt_neox]

Each table is the run of an ordinary search that walks its whole space, without a memory budget,
and the predictions that a search makes of the same candidates beforehand. Of many equal candidates
the fastest is the one that was measured at a lucky moment: those within 20 % of the rate of the
front are therefore probed twice more, in two further passes, and the medians count. What was
measured and predicted is written to benchmarks/data/search_tables, with device and all versions.
It takes two hours on two cores of an EPYC, goes on where it was stopped, and is of no use on a
machine that does other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from search_table_inputs import TABLES, Inputs, make

from autotune import Budget, SearchSpace, SubprocessExecutor, Tuner, objectives
from autotune.composing import now, versions
from autotune.devices import host
from autotune.plan import Plan, make_plan
from autotune.probe import trl_yaml
from autotune.probe_specs import probe_spec
from autotune.report.trial import Trial
from autotune.runfolder import RunFolder
from autotune.screen import Screening
from autotune.search.guess import Guess
from autotune.tuner import load_trials

DATA = Path(__file__).resolve().parent / "data" / "search_tables"
PASSES = 3
"""Probes of a candidate near the front."""

RATE_SLACK = 0.2
MEMORY_SLACK = 0.02
"""What a single probe may be off by."""

DISTURBED = 0.05
"""Share of the CPU's time that others took, from which a probe does not count."""

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


def near_front(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that may be of the true front under a budget of the median peak."""
    points = [(trial, *point(trial)) for trial in trials]
    budget = statistics.median(peak for _, peak, _ in points) * (1.0 + MEMORY_SLACK)
    return [
        trial
        for trial, peak, rate in points
        if peak <= budget
        and not any(
            other <= peak * (1.0 - MEMORY_SLACK) and faster >= rate * (1.0 + RATE_SLACK)
            for _, other, faster in points
        )
    ]


def point(trial: Trial) -> tuple[float, float]:
    """Return the median peak in bytes and the median rate in tokens/s of all probes."""
    peak, rate = trial.peak_interval, trial.tokens_per_s
    if peak is None or rate is None:
        raise SystemExit(f"trial {trial.number} is {trial.outcome.value}; mend the space")
    return peak.median, rate.median


def undisturbed(trial: Trial) -> Trial:
    """Return a trial without the probes during which other work had a good part of the CPU."""
    kept = [
        result
        for result in trial.results
        if result.measurement is not None
        and (result.measurement.cpu_taken_by_others_ratio or 0.0) < DISTURBED
    ]
    return replace(trial, results=tuple(kept))


def probe_again(plan: Plan, run: RunFolder, executor: SubprocessExecutor) -> list[Trial]:
    """Probe what is near the front until it has been probed ``PASSES`` times; return all trials.

    The first pass repeats what was disturbed.
    """
    trials = {trial.number: undisturbed(trial) for trial in load_trials(run)}
    for number in range(1, PASSES + 1):
        chosen = list(trials.values()) if number == 1 else near_front(list(trials.values()))
        for trial in chosen:
            if trial.num_probes >= number:
                continue
            spec = probe_spec(plan, run, f"{trial.number:04d}-pass-{number}", trial.candidate)
            result = executor.submit(spec).result()
            again = replace(trial, results=(*trial.results, result))
            run.append("trial", {"trial": again.to_dict()})
            trials[trial.number] = again
    return [trials[number] for number in sorted(trials)]


def table(plan: Plan, trials: Sequence[Trial], guesses: list[Guess]) -> dict[str, Any]:
    """Return a table as JSON values: all that a replay needs, with where it comes from."""
    guessed = {plan.space.digest(item.candidate): item for item in guesses}
    context = plan.context
    rows = []
    for trial in trials:
        rate, guess = trial.tokens_per_s, guessed.get(trial.digest)
        assert rate is not None  # as point() has seen
        rows.append(
            {
                "candidate": dict(trial.candidate),
                "probes": trial.num_probes,
                "peak": round(point(trial)[0]),
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
            trials = probe_again(plan, search.folder, executor)
            text = json.dumps(table(plan, trials, guesses)).replace(
                '{"candidate"', '\n{"candidate"'
            )
            trl_yaml.write_text(DATA / f"{inputs.name}.json", text + "\n")
            work_s = report.probe_work_s
            print(f"{inputs.name}: {report.outcomes()}, {work_s:.0f} s of probes", flush=True)
    finally:
        executor.shutdown()


if __name__ == "__main__":
    main()
