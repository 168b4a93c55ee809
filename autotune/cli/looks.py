"""``autotune lengths``, ``spaces`` and ``doctor``: look before a search."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import common, options
from autotune.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from autotune.space.knob import Knob
    from autotune.space.space import SearchSpace


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    common.command(app, lengths, imports=("autotune.tuner", "autotune.report.lengths"))
    common.command(app, spaces, imports=("autotune.space.space",))
    common.command(app, doctor, imports=("autotune.doctor",))


def lengths(
    model: options.Model,
    dataset: options.Dataset,
    trainer: options.Trainer = "sft",
    space: Annotated[
        str | None,
        typer.Option(help="Space whose lengths and fixed keys apply.  [default: TRAINER]"),
    ] = None,
    min_coverage: options.MinCoverage = None,
    split: options.Split = None,
    dataset_config: options.DatasetConfig = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also write the histogram as .png or .svg.")
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Every max_length, not only those worth choosing between."),
    ] = False,
    as_json: options.Json = False,
) -> int:
    """Show how long the rows are in tokens, and what each max_length would cut, lose and pad."""
    from autotune.report import lengths as view
    from autotune.report import pictures
    from autotune.tuner import Tuner

    if plot is not None:
        common.check_file(plot, "--plot")
        pictures.check_plot(plot)
    tuner = Tuner(
        model,
        dataset,
        trainer=trainer,
        space=space or trainer,
        device="cpu",
        split=split,
        dataset_config=dataset_config,
        revision=revision,
        trust_remote_code=trust_remote_code,
        min_coverage=min_coverage,
    )
    profile, offered = tuner.lengths()
    if plot is not None:
        common.say(f"wrote {view.plot(profile, plot)}")
    if as_json:
        common.show_json(view.to_json(profile, offered))
    else:
        width = common.stdout_console().width
        least = tuner.request.least_coverage
        text = view.render_text(profile, offered, least, width=width, every=every)
        print(text, end="")
    return 0


def spaces(
    name: Annotated[str | None, typer.Argument(help="Show this space, or YAML file.")] = None,
    as_json: options.Json = False,
) -> int:
    """List the search spaces, or show one with its knobs."""
    from autotune.space.space import SearchSpace

    names = [name] if name is not None else list(SearchSpace.available())
    found = [SearchSpace.load(item) for item in names]
    for space in found:
        _check_fixed(space)
    if as_json:
        common.show_json({"spaces": [_space_facts(space) for space in found]})
        return 0
    width = min(common.stdout_console().width, 100)
    for space in found:
        print(f"{space.name} ({space.trainer}): {space.description}")
        for line in _whole(space, width) if name is not None else _short(space, width):
            print(line)
    return 0


def _check_fixed(space: SearchSpace) -> None:
    """Refuse what TRL does not take under ``fixed``; a search would find out much later."""
    from autotune.space.trl_keys import known_keys, refuse_value

    known = known_keys(space.trainer) if space.fixed else frozenset()
    for key, value in space.fixed.items():
        place = space.places.get(key, f"the space {space.name}, fixed")
        if known and key not in known:
            raise UnknownNameError("TRL key", key, known, where=place)
        reason = refuse_value(space.trainer, key, value)
        if reason is not None:
            raise UsageError(f"{place}: {reason}.", hint="TRL refuses it, so no trial could run.")


def _whole(space: SearchSpace, width: int) -> list[str]:
    lines = []
    for knob in space.knobs:
        lines.append(_wrap(f"{knob.name}: {_values(knob)}", width, indent=2, hang=4))
        lines.append(_wrap(knob.help, width, indent=6))
    return [*lines, *_fixed(space, width)]


def _short(space: SearchSpace, width: int) -> list[str]:
    knobs = ", ".join(knob.name for knob in space.knobs)
    return [_wrap(f"knobs: {knobs}", width, indent=2, hang=2), *_fixed(space, width)]


def _fixed(space: SearchSpace, width: int) -> list[str]:
    from autotune.probe import trl_yaml

    if not space.fixed:
        return []
    text = f"fixed in every candidate: {trl_yaml.settings(space.fixed)}"
    return [_wrap(text, width, indent=2, hang=2)]


def _values(knob: Knob) -> str:
    """Return what a knob is searched over, in words."""
    if knob.domain is None:
        return "from the data"
    shares = knob.domain.to_json().get("quantiles")
    if shares is not None:
        listed = ", ".join(f"{100 * share:g} %" for share in shares)
        return f"from the data: lengths that {listed} of the rows do not exceed"
    return knob.domain.describe()


def _wrap(text: str, width: int, *, indent: int, hang: int = 0) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _space_facts(space: SearchSpace) -> dict[str, Any]:
    return {
        "name": space.name,
        "trainer": space.trainer,
        "description": space.description,
        "digest": space.digest,
        "knobs": [
            {
                "name": knob.name,
                "values": _values(knob),
                "domain": None if knob.domain is None else knob.domain.to_json(),
                "changes": knob.changes if isinstance(knob.changes, str) else dict(knob.changes),
                "help": knob.help,
            }
            for knob in space.knobs
        ],
        "fixed": dict(space.fixed),
    }


def doctor(
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> int:
    """Check packages, device and worker, and say what is missing."""
    from autotune.doctor import LEGEND, examine

    findings = examine(device)
    if as_json:
        common.show_json({"findings": [finding.to_dict() for finding in findings]})
    else:
        for finding in findings:
            print(finding.line())
        print(LEGEND)
    return 0 if all(finding.passed for finding in findings) else 2
