"""Whether every exported configuration runs under the real `trl`, on the embedded default.

    python benchmarks/exports.py [--trials 12] [--steps 3]

Searches the full SFT space on the demo's model and data, exports every trial that fitted - not
only the Pareto set - and runs each for a few steps with `trl sft --config FILE` in a fresh
process. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from autotune import Budget, SubprocessExecutor, Tuner
from autotune.verify import verify_files


def main() -> None:
    """Search, export, run, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--space", default="sft")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="autotune-exports-"))
    executor = SubprocessExecutor(devices=("cpu",))
    try:
        made = executor.run_task("demo", {"folder": str(folder)}, timeout_s=300)
        report = Tuner(
            made["model"],
            made["dataset"],
            space=options.space,
            device="cpu",
            global_batch=4,
            sampler="random",
            run_dir=folder / "run",
            executor=executor,
        ).search(Budget(trials=options.trials))
        files = [
            report.pick(trial.number).export(folder / f"trial-{trial.number}.yaml")
            for trial in report.trials
            if trial.feasible
        ]
        checks = []
        for check in verify_files(files, num_steps=options.steps):
            print(check.line(), flush=True)
            checks.append(check)
    finally:
        executor.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"exported": len(checks), "ran": sum(check.passed for check in checks)}))


if __name__ == "__main__":
    main()
