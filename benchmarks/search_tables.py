"""Measures every candidate of three search spaces on this CPU, for search_efficiency.py.

    taskset -c 1 python benchmarks/search_tables.py --folder FOLDER [--tables gemma3,gpt_neox]

Each table is the run of an ordinary search that walks its whole space, without a memory budget.
It takes about an hour and a quarter on one core of an EPYC, goes on where it was stopped, and is
of no use on a core that does other work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from search_table_inputs import TABLES, Inputs, make

from autotune import Budget, SearchSpace, Tuner
from autotune.report.model import Report

DATA = Path(__file__).resolve().parent / "data" / "search_tables"


def tuner(inputs: Inputs, folder: Path) -> Tuner:
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
        run_dir=run,
        resume=(run / "run.json").exists(),
    )


def measure(inputs: Inputs, folder: Path) -> Report:
    """Measure all candidates of a table; return the report."""
    return tuner(inputs, folder).search(Budget(trials=None))


def main() -> None:
    """Measure the tables that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of models, data and runs")
    parser.add_argument("--tables", default=",".join(item.name for item in TABLES))
    options = parser.parse_args()
    for inputs in TABLES:
        if inputs.name in options.tables.split(","):
            report = measure(inputs, options.folder)
            print(f"{inputs.name}: {report.outcomes()}, {report.probe_work_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
