"""A search by the Python API, on a tiny model and a small chat data set that are made first.

    python examples/search_api.py [--trials 6] [--folder .demo]

Needs neither a network nor an accelerator. Prints a line per trial, the Pareto set with what to
know about the figures, and writes the balanced configuration to FOLDER/best.yaml, for
`trl sft --config FOLDER/best.yaml`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from autotune import (
    Budget,
    NoFeasibleConfigError,
    Report,
    Silent,
    SubprocessExecutor,
    Trial,
    Tuner,
    objectives,
)


class Progress(Silent):
    """Hears of the search while it runs; methods that are left out do nothing."""

    def on_trial(self, trial: Trial, report: Report) -> None:
        """Print how a trial ended; ``report`` holds all trials so far."""
        rate = "" if trial.tokens_per_s is None else f", {trial.tokens_per_s.median:,.0f} tokens/s"
        print(f"trial {trial.number}: {trial.outcome}{rate}", flush=True)


def search(folder: Path, num_trials: int) -> Report:
    """Search the space `quick` for the demo's model and data, both made in ``folder``."""
    # On a card: devices=("cuda:0",); with devices=(0, 1) two probes run at once, one on each.
    executor = SubprocessExecutor(devices=("cpu",), timeout_s=300)
    try:
        # With a model and a data set of your own, leave this line out and name them below.
        made = executor.run_task("demo", {"folder": str(folder.resolve())}, timeout_s=300)
        tuner = Tuner(
            made["model"],
            made["dataset"],
            space="quick",
            objectives=(objectives.peak_memory(), objectives.tokens_per_s()),
            constraints=(objectives.memory_headroom(at_least=0.10),),
            executor=executor,
            global_batch=4,
            # A run folder is never overwritten, so each search gets one of its own.
            run_dir=folder / time.strftime("run-%Y%m%d-%H%M%S"),
            listener=Progress(),
        )
        report = tuner.search(Budget(trials=num_trials))
        print(f"run folder: {tuner.folder.path}")
        return report
    finally:
        executor.shutdown()


def show(report: Report) -> None:
    """Print the Pareto set, leanest first, and what to know about its figures."""
    for trial in report.pareto:
        rate, peak_bytes, gain = trial.tokens_per_s, trial.peak_bytes, report.gain(trial)
        assert rate is not None  # every member of the set has been measured
        assert peak_bytes is not None
        settings = ", ".join(f"{name}={value}" for name, value in trial.changed.items())
        print(
            f"trial {trial.number}: {rate.median:,.0f} tokens/s "
            f"({rate.low:,.0f} to {rate.high:,.0f}), peak {peak_bytes / 1024**3:.3f} GiB, "
            f"trains on {trial.coverage:.1%} of the loss tokens"
        )
        print(f"    {settings or 'nothing changed (baseline)'}")
        if gain is not None:
            noise = " (within the noise)" if gain.rate_is_tied else ""
            print(f"    {gain.rate_ratio:.2f}x rate{noise}, {gain.memory_ratio:.2f}x memory")
    # Without these a gain may be taken for more than it is: noisy rates, too few steps, ...
    for text in (*report.warnings, *report.notices):
        print(f"note: {text}")


def main() -> None:
    """Search, show what was found and export one configuration."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=6, help="candidates to probe")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="for all that is made")
    arguments = parser.parse_args()
    report = search(arguments.folder, arguments.trials)
    show(report)
    try:
        best = report.pick("balanced")  # also "fastest", "leanest", or a trial's number
    except NoFeasibleConfigError as error:
        # Not a failure of the search: every candidate reached a verdict, and none fits.
        print(error)
        return
    path = best.export(arguments.folder / "best.yaml")
    print(f"train with: trl sft --config {path}")


if __name__ == "__main__":
    main()
