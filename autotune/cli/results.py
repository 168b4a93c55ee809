"""``autotune report``, ``export`` and ``verify``: what to do with a finished search."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from autotune.cli import cards, common, options, streams
from autotune.errors import AutotuneError, UsageError

if TYPE_CHECKING:
    from autotune.report.model import Report
    from autotune.report.trial import Trial


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    common.command(app, report, imports=("autotune.report.terminal",))
    common.command(app, export, imports=("autotune.report.model",))
    common.command(app, verify, imports=("autotune.verify",))


def report(
    run: options.Run,
    as_json: options.Json = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Add what was not searched, and a predicted timeline."),
    ] = False,
    price: options.Price = None,
    prices: options.Prices = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page for a browser as well, which works offline."),
    ] = None,
) -> int:
    """Show the Pareto set of a run, also of one that is under way or was interrupted.

    Of a search on several cards, show what was found on each.
    """
    from autotune.cards_folder import is_cards
    from autotune.report import terminal

    if html is not None:
        cards.check_single(run)
    if is_cards(run):
        return cards.report(run, as_json, price=price, prices=prices)
    cards.check_no_prices(price, prices)
    if html is not None:
        from autotune.report.html import page

        common.check_file(html, "--html")
        if html.exists() and html.stat().st_size and not page.is_page(html):
            raise UsageError(
                f"--html: {html} is there already, and is no page of a report.",
                hint="Give another name.",
            )
        page.check()
    with reading(run):
        found = load_report(run)
        if as_json:
            common.show_json(found.to_dict())
        else:
            terminal.render(found, common.stdout_console(), verbose=verbose)
        if html is not None:
            common.say(f"wrote {_write_page(found, run, html)}")
    return 0


def _write_page(report: Report, run: Path, target: Path) -> Path:
    """Write a report as a page, with the predictions that lie beside it."""
    from autotune.report.html import page, predictions

    points = predictions.read_predictions(_report_file(run).parent, report)
    return page.write(report, target, points)


def export(
    run: options.Run,
    card: Annotated[
        str | None, typer.Option(help="Which card's, if the run is a search on several.")
    ] = None,
    pick: Annotated[
        str,
        typer.Option(help="fastest, leanest, balanced, highest-fidelity, or a trial's number."),
    ] = "balanced",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write.  [default: stdout]")
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Overwrite FILE whatever it holds, not only this run's own."),
    ] = False,
) -> int:
    """Write one configuration as the YAML that `trl` reads.

    For a trainer that `trl` has no command for, it is a Python script; a FILE that ends in .yaml
    holds the configuration alone.
    """
    from autotune.probe import accelerate_config

    if output is not None:
        common.check_file(output, "--output")
    run = cards.folder_of(run, card)
    with reading(run):
        found = load_report(run)
        trial = found.pick(pick)
        if output is not None and not force:
            _check_own(output, found)
        if not trial.feasible:
            common.say(
                f"warning: trial {trial.number} ended {trial.outcome.value} or over a limit"
            )
        text = trial.rendered(f"config{trial.suffix}")
    if output is None:
        _check_encoding(text, trial.suffix)
        print(text, end="")
        if trial.accelerate:
            common.say("to train in several processes, write it to a file: -o writes theirs, too")
        return 0
    trial.export(output)
    common.say(f"wrote {output}")
    if trial.accelerate:
        common.say(f"wrote {accelerate_config.beside(output)}")
    return 0


def _check_own(output: Path, report: Report) -> None:
    """Refuse to overwrite a file unless it holds what this run exported, unchanged.

    Raises:
        UsageError: If it holds anything else: a configuration that was edited, or of another run.
    """
    from autotune.probe import trl_file, trl_yaml

    if not output.exists():
        return
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, AutotuneError):
        text = output.read_text(encoding="utf-8")
        content = trl_file.read(output, report.trainer).config
        if text.startswith(trl_yaml.MARK) and any(
            content == trial.config for trial in report.trials
        ):
            return
    raise UsageError(
        f"{output} is there already, and is not as this run exports it.",
        hint="Give another name, or --force to overwrite it.",
    )


def _check_encoding(text: str, suffix: str) -> None:
    """Refuse to write a configuration in which other characters stand for some of its own."""
    from autotune.probe import trl_script

    read = trl_script.config_of if suffix == trl_script.SUFFIX else yaml.safe_load
    written = streams.encodable(text, sys.stdout.encoding)
    if written != text and read(written) != read(text):
        raise streams.OutputError(
            f"standard output's encoding, {sys.stdout.encoding}, lacks characters of the"
            " configuration.",
            hint="Write it to a file with -o, or set PYTHONIOENCODING=utf-8.",
        )


def verify(
    source: Annotated[
        Path, typer.Argument(help="Run folder, a YAML file for trl, or an exported script.")
    ],
    steps: Annotated[
        int, typer.Option(help="Optimizer steps to run.", min=1, max=options.MOST)
    ] = 3,
    timeout: Annotated[str, typer.Option(help="Limit of one run, as 10m.")] = "10m",
    model: Annotated[
        str | None, typer.Option(help="Where the model lies on this machine, if elsewhere.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Where the data lies on this machine, if elsewhere.")
    ] = None,
    trainer: options.FileTrainer = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> int:
    """Run exported configurations for a few steps under the real `trl`, each in a new process.

    They run what the file says, its environment variables included: look at one from elsewhere
    first.
    """
    from autotune.verify import check_card, check_code, verify_files

    files = _files(source)
    check_code(files, trusted=trust_remote_code, trainer=trainer)
    limit_s = common.duration_s(timeout, "--timeout")
    assert limit_s is not None  # the option has a default
    trials = _trials(files)
    note = check_card(files, trainer)
    if note:
        common.say(f"note: {note}")
    checks = []
    for check in verify_files(
        files,
        num_steps=steps,
        timeout_s=limit_s,
        trials=trials,
        model=model,
        dataset=dataset,
        trainer=trainer,
    ):
        checks.append(check)
        common.say(check.line())
    if as_json:
        common.show_json({"checks": [check.to_dict() for check in checks]})
    else:
        passed = sum(check.passed for check in checks)
        print(f"{passed} of {len(checks)} configurations ran {steps} steps under trl")
        compared = [item for check in checks for item in check.comparisons if item.has_spread]
        outside = sum(item.is_outside for item in compared)
        if compared:
            print(f"{outside} of {len(compared)} figures are outside the report's spread")
        if outside:
            print(
                "A few steps are on other rows than the probes' and need not meet the worst batch:"
                " --steps 20 tells more."
            )
    return 0 if all(check.passed for check in checks) else 1


def _trials(files: Sequence[Path]) -> dict[Path, Trial]:
    """Return the trials that files in a run folder were exported from, where they still match."""
    from autotune.probe import trl_file

    found: dict[Path, Trial] = {}
    reports: dict[Path, Report | None] = {}
    for file in files:
        run = file.resolve().parent.parent
        if run not in reports:
            try:
                reports[run] = load_report(run)
            except AutotuneError:
                reports[run] = None
                common.say(_no_figures(file, run))
        report = reports[run]
        number = re.fullmatch(r"trial-(\d+)", file.stem)
        which = int(number.group(1)) if number else "balanced"
        if report is None or not (number or file.stem == "best"):
            continue
        try:
            with reading(run):
                trial, content = report.pick(which), trl_file.read(file, report.trainer).config
        except (AutotuneError, OSError, ValueError, yaml.YAMLError):
            continue  # verifying it says what is wrong
        if content == trial.config:
            found[file] = trial
        else:
            common.say(f"{file.name} differs from trial {trial.number}, so it is not compared")
    return found


def _no_figures(file: Path, run: Path) -> str:
    """Return why the run of a file is set against no figures."""
    if file.resolve().parent.name == "configs":
        return f"note: {run} has no report that can be read, so nothing is compared"
    return f"note: {file} is in no run folder, so it is run, and compared with nothing"


@contextlib.contextmanager
def reading(run: Path) -> Iterator[None]:
    """Say that a report is damaged where what it says breaks a calculation.

    Its fields have the right types then, but no probe measured what is in them.
    """
    from autotune.report.model import damaged

    try:
        yield
    except AutotuneError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"what it says cannot be shown ({type(error).__name__}: {str(error)[:100]})"
        raise damaged(_report_file(run), reason) from error


def _report_file(run: Path) -> Path:
    return run / "report.json" if run.is_dir() else run


def load_report(run: Path) -> Report:
    """Return the report of a run folder.

    Raises:
        UsageError: If there is no run.
        JournalError: If it cannot be read.
    """
    from autotune.report.model import Report

    cards.check_single(run)
    path = _report_file(run)
    if not path.exists():
        hint = "Give the folder that `autotune search` named at its end, such as runs/...."
        if (run / "run.json").exists():
            hint = "The search has not finished a probe yet; it can go on with --resume."
        raise UsageError(f"there is no report in {run}.", hint=hint)
    return Report.load(path)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        if source.suffix.lower() not in (".yaml", ".yml", ".py"):
            raise UsageError(
                f"{source} is neither a YAML file nor a script.",
                hint="Give a run folder or a YAML file.",
            )
        return [source]
    cards.check_single(source)
    folder = source / "configs"
    files = sorted((*folder.glob("trial-*.yaml"), *folder.glob("trial-*.py")))
    if not files:
        raise UsageError(
            f"there is no configuration to verify in {source}.",
            hint="Give a run folder whose search found one, or a YAML file.",
        )
    return files
