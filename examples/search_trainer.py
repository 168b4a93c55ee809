"""A search for DPO, KTO, a reward model, GRPO, RLOO or online DPO; model and data are made first.

    python examples/search_trainer.py dpo [--trials 6] [--device cpu] [--folder .demo]

Needs neither a network nor an accelerator; `--device virtual:rtx-4090` predicts for a card. Prints
the Pareto set and writes the balanced configuration to FOLDER/TRAINER.yaml, for
`trl TRAINER --config FOLDER/TRAINER.yaml`; for online DPO it is a script, `python FILE`.
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
)

DATA = {
    "dpo": "preference",
    "grpo": "prompts",
    "kto": "unpaired",
    "online_dpo": "prompts",
    "reward": "preference",
    "rloo": "prompts",
}
"""Trainer to the kind of data that it is trained on; see examples/data/."""

SHORT: dict[str, dict[str, int]] = {
    "grpo": {"max_completion_length": 16, "num_generations": 2},
    "online_dpo": {"max_new_tokens": 16},
    "rloo": {"max_completion_length": 16, "num_generations": 2},
}
"""Pins of those that generate: a few tokens take seconds on a CPU; TRL's defaults are hundreds."""


class Progress(Silent):
    """Says how each trial ended, half a minute after the other on a CPU."""

    def on_trial(self, trial: Trial, report: Report) -> None:
        """Print a line."""
        print(f"trial {trial.number}: {trial.outcome}", flush=True)


def search(trainer: str, folder: Path, device: str, num_trials: int) -> Report:
    """Search the space that is called like the trainer."""
    executor = SubprocessExecutor(devices=(device,), timeout_s=300)
    try:
        request = {"folder": str(folder.resolve()), "data": DATA[trainer]}
        made = executor.run_task("demo", request, timeout_s=300)
        tuner = Tuner(
            made["model"],
            made["dataset"],
            trainer=trainer,
            space=trainer,
            device=device,
            executor=executor,
            global_batch=4,
            pins=SHORT.get(trainer, {}),
            run_dir=folder / time.strftime(f"{trainer}-%Y%m%d-%H%M%S"),
            listener=Progress(),
        )
        report = tuner.search(Budget(trials=num_trials))
        print(f"run folder: {tuner.folder.path}")
        return report
    finally:
        executor.shutdown()


def main() -> None:
    """Search, print the Pareto set and export one configuration."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trainer", choices=sorted(DATA))
    parser.add_argument("--trials", type=int, default=6, help="candidates to probe")
    parser.add_argument("--device", default="cpu", help="where to probe")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="for all that is made")
    arguments = parser.parse_args()
    report = search(arguments.trainer, arguments.folder, arguments.device, arguments.trials)
    for trial in report.pareto:
        rate, peak_bytes = trial.tokens_per_s, trial.peak_bytes
        assert rate is not None  # every member of the set has been probed to its end
        assert peak_bytes is not None
        settings = ", ".join(f"{name}={value}" for name, value in trial.changed.items())
        print(
            f"trial {trial.number}, {trial.source}: {rate.median:,.0f} tokens/s, peak"
            f" {peak_bytes / 1024**3:.3f} GiB: {settings or 'nothing changed (baseline)'}"
        )
    try:
        best = report.pick("balanced")
    except NoFeasibleConfigError as error:
        print(error)
        return
    path = best.export(arguments.folder / f"{arguments.trainer}{best.suffix}")
    is_script = path.suffix == ".py"
    command = f"python {path}" if is_script else f"trl {arguments.trainer} --config {path}"
    print(f"train with: {command}")


if __name__ == "__main__":
    main()
