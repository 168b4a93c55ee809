"""``autotune lengths``, ``spaces`` and ``doctor``: look before a search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli import common


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    common.command(app, lengths, imports=("autotune.tuner", "autotune.report.lengths"))
    common.command(app, spaces, imports=("autotune.space.space",))
    common.command(app, doctor, imports=("autotune.doctor",))


def lengths(
    model: Annotated[str, typer.Argument(help="Hub id or local folder; its tokenizer is used.")],
    dataset: Annotated[str, typer.Argument(help="Hub id, data file or folder.")],
    trainer: Annotated[str, typer.Option(help="TRL trainer.")] = "sft",
    space: Annotated[
        str | None, typer.Option(help="Space whose fixed keys apply.  [default: TRAINER]")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split.  [default: train]")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Data set configuration.")] = None,
    revision: Annotated[str | None, typer.Option(help="Model revision on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model repository's own code.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also write the histogram as .png or .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show how long the rows are in tokens, and what each max_length would cut, lose and pad."""
    from autotune.report import lengths as view
    from autotune.tuner import Tuner

    if plot is not None:
        common.check_file(plot, "--plot")
        view.check_plot(plot)
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
    )
    profile = tuner.profile()
    if plot is not None:
        common.say(f"wrote {view.plot(profile, plot)}")
    if as_json:
        common.show_json(view.to_json(profile))
    else:
        print(view.render_text(profile, width=common.stdout_console().width), end="")
    return 0


def spaces(
    name: Annotated[str | None, typer.Argument(help="Show this space, or YAML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """List the search spaces, or show one with its knobs."""
    from autotune.space.space import SearchSpace

    names = [name] if name is not None else list(SearchSpace.available())
    found = [_space_facts(SearchSpace.load(item)) for item in names]
    if as_json:
        common.show_json({"spaces": found})
        return 0
    for item in found:
        print(f"{item['name']} ({item['trainer']}): {item['description']}")
        for knob in item["knobs"]:
            if name is None:
                continue
            print(f"  {knob['name']} = {knob['values']}")
            print(f"      {knob['help']}")
        if name is None:
            print(f"  knobs: {', '.join(knob['name'] for knob in item['knobs'])}")
    return 0


def _space_facts(space: Any) -> dict[str, Any]:
    return {
        "name": space.name,
        "trainer": space.trainer,
        "description": space.description,
        "digest": space.digest,
        "knobs": [
            {
                "name": knob.name,
                "values": "from the data" if knob.domain is None else str(knob.domain.to_json()),
                "changes": knob.changes if isinstance(knob.changes, str) else dict(knob.changes),
                "help": knob.help,
            }
            for knob in space.knobs
        ],
        "fixed": dict(space.fixed),
    }


def doctor(
    device: Annotated[str, typer.Option(help="Device to look at.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Check packages, device and worker, and say what is missing."""
    from autotune.doctor import examine

    findings = examine(device)
    if as_json:
        common.show_json({"findings": [finding.to_dict() for finding in findings]})
    else:
        for finding in findings:
            print(finding.line())
    return 0 if all(finding.passed for finding in findings) else 2
