"""The typer application: the command's name, its help, its subcommands."""

from __future__ import annotations

import typer

from autotune.cli import compare, explain, looks, predict, results, search

app = typer.Typer(
    name="autotune",
    help="Find the memory configuration that a TRL fine-tuning run should use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    suggest_commands=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in (search, predict, results, explain, compare, looks):
    _module.register(app)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from importlib.metadata import version as installed

        print(f"trl-autotune {installed('trl-autotune')}")
        raise typer.Exit
