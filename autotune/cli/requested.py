"""What a command line asks for, as a search takes it: one given now, and a recorded one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from autotune.cli import common
from autotune.errors import UsageError

if TYPE_CHECKING:
    from autotune.plan import Request
    from autotune.report.model import Report

_AS_GIVEN = (
    "trainer",
    "device",
    "global_batch",
    "split",
    "dataset_config",
    "revision",
    "weights",
    "trust_remote_code",
    "measured_steps",
    "processes",
    "seed",
)
"""Options of ``autotune search`` that are fields of a request as they stand."""

DEMO: Mapping[str, Any] = MappingProxyType(
    {
        "space": "demo",
        "device": "cpu",
        # Small enough for a laptop's CPU; the search itself is the real one.
        "global_batch": 4,
        "measured_steps": 4,
        # Cutting rows short is always faster and leaner; this keeps it from winning by that.
        "min_coverage": 0.97,
    }
)
"""What `autotune demo` asks for."""


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, with the name of the space or the space itself.

    Args:
        given: Values of the options of ``autotune search``, by name.

    Raises:
        AutotuneError: If one cannot be read.
    """
    reward, space = given["reward"], given["space"]
    accelerate_config, min_coverage = given["accelerate_config"], given["min_coverage"]
    name = given["trainer"] if space is None else space
    found = {key: given[key] for key in _AS_GIVEN} | {
        "space": name if reward is None else scored_by(reward, name),
        "memory_budget_bytes": common.size(given["memory_budget"], "--memory-budget"),
        "pins": common.pins(given["pin"] or ()),
        "phases": tuple(part.strip() for part in given["phases"].split(",") if part.strip()),
        "probe_timeout_s": common.duration_s(given["probe_timeout"], "--probe-timeout"),
        "accelerate_config": None if accelerate_config is None else str(accelerate_config),
    }
    return found if min_coverage is None else {**found, "min_coverage": min_coverage}


def scored_by(reward: str, space: str) -> Any:
    """Return a search space with another reward."""
    from autotune.space.space import SearchSpace

    return SearchSpace.load(space).with_reward(reward)


def recorded(command: str, report: Report, *, is_trusted: bool) -> Request:
    """Return what the run of a command line was asked for.

    A run folder may come from others: what in it has code run is not taken from it alone.

    Args:
        command: The command line in the run's record.
        report: The run's.
        is_trusted: Whether the user has said that code may run.

    Raises:
        UsageError: If code would run that the user of this command has not said to trust.
        UsageError: If there is no such command line, as for a search from Python.
        AutotuneError: If it asks for what is no longer there.
    """
    from autotune.plan import Request
    from autotune.space.space import SearchSpace

    name, given = _options(command)
    if name == "demo":
        asked = {
            **DEMO,
            "memory_budget_bytes": common.size(given["memory_budget"], "--memory-budget"),
            "seed": given["seed"],
        }
        model, dataset = report.model, report.dataset
    else:
        _check_trusted(given, is_trusted=is_trusted)
        model, dataset = given["model"], given["dataset"]
        # A command for several cards has a run for each.
        asked = settings_of({**given, "device": report.device.get("name") or given["device"]})
    space = asked.pop("space")
    space = SearchSpace.load(space) if isinstance(space, str) else space
    return Request(model=model, dataset=dataset, space=space, **asked)


def _check_trusted(given: Mapping[str, Any], *, is_trusted: bool) -> None:
    codes = [
        ("the model's own code (--trust-remote-code)", given["trust_remote_code"]),
        (f"the reward {given['reward']}", ":" in (given["reward"] or "")),
        (f"the trainer {given['trainer']}", ":" in given["trainer"]),
    ]
    found = [what for what, is_asked in codes if is_asked]
    if found and not is_trusted:
        raise UsageError(
            f"the run's command line has code run: {' and '.join(found)}.",
            hint="Give --trust-remote-code if you trust it.",
        )


def _options(command: str) -> tuple[str, dict[str, Any]]:
    """Return the command of a recorded line and its options, as typer reads them."""
    from autotune.cli.app import app

    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    name = words[1] if len(words) > 1 else ""
    if name not in ("search", "demo"):
        raise UsageError(
            "the run was not started by `autotune search`, so that its settings cannot be read"
            " from its record.",
            hint="Its trials are explained all the same, without predictions.",
        )
    group: Any = typer.main.get_command(app)
    try:
        with group.make_context("autotune", words[1:]) as parent:
            found = group.get_command(parent, name)
            return name, dict(found.make_context(name, words[2:], parent=parent).params)
    except (typer.Exit, typer.Abort, SystemExit) as error:
        raise UsageError("the run's command line asks for nothing.") from error
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        raise UsageError(
            f"the run's command line cannot be read any more: {message()}",
            hint="Use the version of autotune that the run was made with.",
        ) from error
