"""The ``autotune`` command: its subcommands and its exit codes.

0: a recommendation was written; 1: the search broke; 2: wrong request or set-up; 3: nothing fits;
130: interrupted. Results go to standard output, progress and warnings to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from autotune.cli import common

app = typer.Typer(
    name="autotune",
    help="Find the memory configuration that a TRL fine-tuning run should use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"trl-autotune {installed('trl-autotune')}")
        raise typer.Exit


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(main(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from autotune.cli import looks, results, search

    if not app.registered_commands:
        for module in (search, results, looks):
            module.register(app)
    return common.guarded(app, arguments)
