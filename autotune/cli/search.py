"""``autotune search`` and ``autotune demo``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import cards, common, interrupts, options, requested
from autotune.errors import UnknownNameError, UsageError
from autotune.masking import MASK

if TYPE_CHECKING:
    from autotune.listener import Budget
    from autotune.objectives import Objective
    from autotune.report.model import Report

DEFAULT_MIN_GAIN = 0.001
"""The same as in ``listener.py``, which takes too long to import for a help text."""

MinGain = Annotated[
    float,
    typer.Option(
        help="End once no candidate is expected to add such a share to what the Pareto set"
        " dominates; 0 uses the budget up.",
        min=0.0,
    ),
]
Pin = Annotated[list[str] | None, typer.Option("--pin", metavar="KNOB=VALUE", help="Fix a knob.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    imports = ("autotune.tuner", "autotune.cli.progress", "autotune.report.terminal")
    common.command(app, search, imports=imports)
    common.command(app, demo, imports=imports)


def search(
    model: options.Model,
    dataset: options.Dataset,
    trainer: options.Trainer = "sft",
    space: options.Space = None,
    reward: options.Reward = None,
    device: Annotated[
        str,
        typer.Option(
            help="auto, cpu, cuda[:N], mps, xpu, or virtual:CARD (autotune gpus); several of the"
            " last, with commas, are compared."
        ),
    ] = "auto",
    memory_budget: options.MemoryBudget = None,
    trials: Annotated[
        int | None,
        typer.Option(
            help="Candidates to probe; with several cards, on each.  [default: 40]", min=1
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(
            help="Time after which no probe starts, as 30m; with several cards, for each."
        ),
    ] = None,
    price: options.Price = None,
    prices: options.Prices = None,
    probe_timeout: Annotated[str, typer.Option(help="Limit of one probe, as 300 or 5m.")] = "300",
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Rows per optimizer step, kept for all.  [default: 8]", min=1, max=options.MOST
        ),
    ] = None,
    pin: Pin = None,
    min_coverage: options.MinCoverage = None,
    split: options.Split = None,
    dataset_config: options.DatasetConfig = None,
    revision: options.Revision = None,
    weights: Annotated[str, typer.Option(help="random (no download) or real.")] = "random",
    trust_remote_code: options.TrustRemoteCode = False,
    measured_steps: Annotated[
        int, typer.Option(help="Optimizer steps that give the rate.", min=1, max=options.MOST)
    ] = 5,
    phases: Annotated[
        str, typer.Option(help="Further phases to measure: eval,save.", metavar="eval,save")
    ] = "",
    processes: Annotated[
        int | None,
        typer.Option(help="Processes of one training run, a device each.  [default: 1]", min=1),
    ] = None,
    accelerate_config: Annotated[
        Path | None,
        typer.Option(help="File for accelerate launch; decides on processes and sharding."),
    ] = None,
    objective: options.Objectives = None,
    min_gain: MinGain = DEFAULT_MIN_GAIN,
    sampler: Annotated[
        str, typer.Option(help="auto, learned, tpe, nsgaii, gp, random or grid.")
    ] = "auto",
    seed: options.Seed = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run.  [default: runs/MODEL-TIME]")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in RUN_DIR.")] = False,
    screen: Annotated[
        bool,
        typer.Option(
            "--screen/--no-screen", help="Predict candidates for the real device before probing."
        ),
    ] = True,
    learn_from: Annotated[
        list[Path] | None,
        typer.Option(
            "--learn-from", metavar="RUN", help="Earlier run to learn from; can be repeated."
        ),
    ] = None,
    learn_anyway: Annotated[
        bool,
        typer.Option(
            "--learn-anyway", help="Learn from it though device, versions or trainer differ."
        ),
    ] = False,
    study: Annotated[
        str | None, typer.Option(help="Optuna storage URL, to share a search between hosts.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be searched, probe nothing.")
    ] = False,
    as_json: options.Json = False,
) -> int:
    """Search for the best memory configurations by short, real training runs."""
    given = locals()
    _check_trainer(trainer, space)
    settings: dict[str, Any] = {
        **requested.settings_of(given),
        "objectives": _objectives(objective),
        "sampler": sampler,
        "run_dir": run_dir,
        "resume": resume,
        "learn_from": tuple(learn_from or ()),
        "learn_anyway": learn_anyway,
        "screen": screen,
        "study": study,
    }
    budget = _budget(trials, common.duration_s(time_budget, "--time-budget"), min_gain)
    if resume and run_dir is None:
        raise UsageError("--resume needs --run-dir, the folder of the run to continue.")
    settings["device"], several = cards.given(device, price, prices)
    if several is not None:
        asked = cards.Asked(model, dataset, settings, several, budget, _command_line())
        return cards.dry_run(asked, as_json) if dry_run else cards.search(asked, as_json)
    if dry_run:
        return _dry_run(model, dataset, settings, budget, as_json=as_json)
    return _search(model, dataset, settings, budget, as_json=as_json)


def _budget(trials: int | None, limit_s: float | None, min_gain: float) -> Budget:
    """Return the budget, with the default number of trials where nothing else limits it."""
    from autotune.listener import DEFAULT_TRIALS, Budget

    if trials is None and limit_s is None:
        trials = DEFAULT_TRIALS
    return Budget(trials, limit_s, min_gain)


def _objectives(names: list[str] | None) -> tuple[Objective, ...]:
    """Return what is to be optimised; nothing for the default."""
    from autotune import objectives

    return objectives.named(names or ())


def demo(
    folder: Annotated[Path, typer.Option(help="Folder of model, data and run.")] = Path(".demo"),
    trials: Annotated[int, typer.Option(help="Candidates to probe.", min=1)] = 20,
    memory_budget: options.MemoryBudget = None,
    objective: options.Objectives = None,
    min_gain: MinGain = DEFAULT_MIN_GAIN,
    seed: options.Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the demo's run.")] = False,
    as_json: options.Json = False,
) -> int:
    """Search a tiny model on a small chat data set, both made here: no network, no GPU."""
    from autotune.devices import host
    from autotune.executors.subprocess import SubprocessExecutor
    from autotune.runfolder import RunFolder

    budget_bytes = common.size(memory_budget, "--memory-budget")
    chosen = _objectives(objective)
    common.make_folder(folder, "--folder")
    RunFolder(folder / "run").check(resume=resume)  # before the minutes that the worker takes
    common.say(f"making a tiny model and a small chat data set in {folder}")
    executor = SubprocessExecutor(devices=("cpu",))
    try:
        request = {"folder": str(folder.resolve()), "process_env": host.process_env("cpu")}
        made = executor.run_task("demo", request, timeout_s=300)
        settings = {
            **requested.DEMO,
            "memory_budget_bytes": budget_bytes,
            "objectives": chosen,
            "seed": seed,
            "run_dir": folder / "run",
            "resume": resume,
            # The same worker server goes on with the search.
            "executor": executor,
        }
        budget = _budget(trials, None, min_gain)
        return _search(made["model"], made["dataset"], settings, budget, as_json=as_json)
    finally:
        executor.shutdown()


def _search(
    model: str,
    dataset: str,
    settings: dict[str, Any],
    budget: Budget,
    *,
    as_json: bool,
) -> int:
    from autotune.cli.progress import Progress
    from autotune.report import terminal
    from autotune.tuner import Tuner

    interrupts.end_in_order("\ninterrupted: ending the running probe; once more to leave at once")
    progress = Progress(common.stderr_console())
    tuner = Tuner(model, dataset, listener=progress, command=_command_line(), **settings)
    with progress:
        report = tuner.search(budget)
    if as_json:
        common.show_json(report.to_dict())
    else:
        terminal.render(report, common.stdout_console())
    if report.interrupted:
        common.say(f"interrupted; continue with: {tuner.resume_command}")
        if MASK in tuner.resume_command:
            common.say(f"  with the password of --study in place of {MASK}")
        return common.INTERRUPTED
    report.pick("balanced")  # NoFeasibleConfigError says what came closest
    common.say(f"run folder: {tuner.folder.path}")
    common.say(f"look at it: {_page_command(tuner.folder.path)}")
    common.say(f"train with: {_train_with(report, tuner.folder.configs)}")
    _say_of_weights(report.pick("balanced").config)
    if report.is_predicted:
        folder = shlex.quote(str(tuner.folder.path))
        trust = " --trust-remote-code" if settings.get("trust_remote_code") else ""
        confirm = f"{shlex.quote(common.program('autotune'))} verify {folder}{trust}"
        common.say(f"all figures are predicted; confirm them on the card: {confirm}")
    return 0


def _page_command(folder: Path) -> str:
    """Return the command that shows the run in a browser."""
    page = str(folder / "report.html")
    return shlex.join([common.program("autotune"), "report", str(folder), "--html", page])


def _train_with(report: Report, folder: Path) -> str:
    """Return the command that trains with the balanced configuration."""
    from autotune.probe import accelerate_config

    best = folder / f"best{report.pick('balanced').suffix}"
    own = accelerate_config.beside(best) if report.pick("balanced").accelerate else None
    if best.suffix == ".py" and own is not None:
        command = [common.program("accelerate"), "launch", "--config_file", str(own), str(best)]
    elif best.suffix == ".py":
        command = [sys.executable, str(best)]
    else:
        command = [common.program("trl"), report.trainer, "--config", str(best)]
        # With `=` between them trl would not know the option.
        command += [] if own is None else ["--accelerate_config", str(own)]
    return shlex.join(command)


def _say_of_weights(config: Mapping[str, Any]) -> None:
    """Say what the command above it needs first, if it cannot run as it stands."""
    from autotune.probe import sources

    name = str(config.get("model_name_or_path", ""))
    if not sources.may_hold_weights(name):
        common.say(f"  but first: {sources.no_weights(name)} Put them there; trl needs them.")


def _dry_run(
    model: str,
    dataset: str,
    settings: dict[str, Any],
    budget: Budget,
    *,
    as_json: bool,
) -> int:
    from autotune.cli.planned import planned, print_planned
    from autotune.tuner import Tuner

    plan = Tuner(model, dataset, **settings).plan(check=True)
    facts = planned(plan, budget)
    if as_json:
        common.show_json(facts)
    else:
        print_planned(facts, common.stdout_console())
    return 0


def _command_line() -> str:
    """Return the command line as it can be typed again; ``python -m autotune`` by its name."""
    return shlex.join([common.program("autotune"), *sys.argv[1:]])


def _check_trainer(name: str, given_space: str | None) -> None:
    """Refuse a trainer that no search space is for.

    ``module:class`` names one of the user's, which needs a space of the user's as well.
    """
    from autotune.space.space import SearchSpace

    known = {SearchSpace.load(space).trainer for space in SearchSpace.available()}
    if name not in known and (":" not in name or given_space is None):
        raise UnknownNameError("trainer", name, known)
