"""Every trainer from a short search on the CPU to TRL's own command, on the embedded default.

    python benchmarks/trainers.py [--trials 8] [--steps 3] [--trainers dpo,kto]

Searches each trainer's space on the demo's model and data of its kind, exports every member of
the Pareto set and runs it for a few steps in a fresh process: with `trl TRAINER --config FILE`; a
script where trl has no such command. The last line is one JSON object: per trainer the seconds of
the search, the probes that ran to their end and the exported files that did and did not run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune import Budget, SearchSpace, SubprocessExecutor, Tuner
from autotune.probe.result import Outcome
from autotune.verify import verify_files

DATA = {
    "sft": "chat",
    "dpo": "preference",
    "reward": "preference",
    "kto": "unpaired",
    "grpo": "prompts",
    "rloo": "prompts",
    "online_dpo": "prompts",
    "distillation": "prompts",
}
"""Trainer to the kind of data that it is trained on."""

SHORT: dict[str, dict[str, int]] = {
    "grpo": {"max_completion_length": 16, "num_generations": 2},
    "rloo": {"max_completion_length": 16, "num_generations": 2},
    "online_dpo": {"max_new_tokens": 16},
    "distillation": {"max_completion_length": 16},
}
"""Pins of those that generate: TRL's defaults would take minutes per probe on a CPU."""


def space_of(trainer: str, model: str) -> SearchSpace:
    """Return the trainer's space, with the model as its own teacher where it takes one."""
    space = SearchSpace.load(trainer)
    taught = {"teacher_model_name_or_path": model} if trainer == "distillation" else {}
    return replace(space, fixed={**space.fixed, **taught})


def run(trainer: str, folder: Path, num_trials: int, num_steps: int) -> dict[str, Any]:
    """Search, export and run one trainer; return its figures."""
    executor = SubprocessExecutor(devices=("cpu",))
    try:
        request = {"folder": str(folder), "data": DATA[trainer]}
        made = executor.run_task("demo", request, timeout_s=300)
        tuner = Tuner(
            made["model"],
            made["dataset"],
            trainer=trainer,
            space=space_of(trainer, made["model"]),
            device="cpu",
            global_batch=4,
            pins=SHORT.get(trainer, {}),
            run_dir=folder / f"run-{trainer}",
            executor=executor,
        )
        start = time.monotonic()
        report = tuner.search(Budget(trials=num_trials))
        search_s = time.monotonic() - start
    finally:
        executor.shutdown()
    files = [
        trial.export(folder / f"{trainer}-{trial.number}{trial.suffix}") for trial in report.pareto
    ]
    checks = []
    for check in verify_files(files, num_steps=num_steps):
        print(f"{trainer}: {check.line()}", flush=True)
        checks.append(check)
    return {
        "search_s": round(search_s, 1),
        "ok_probes": sum(
            result.outcome is Outcome.OK for trial in report.trials for result in trial.results
        ),
        "exports_run": sum(check.passed for check in checks),
        "exports_failed": sum(not check.passed for check in checks),
    }


def main() -> None:
    """Go through the trainers, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trainers", default=",".join(DATA), help="names, with commas")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="autotune-trainers-"))
    found = {}
    try:
        for trainer in options.trainers.split(","):
            found[trainer] = run(trainer, folder, options.trials, options.steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"trainers": found}))


if __name__ == "__main__":
    main()
