"""``autotune gpus`` and ``estimate``: cards that are not here, and what a run would take there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import common, options
from autotune.errors import AutotuneError, UnknownNameError, UsageError
from autotune.probe.result import Outcome

if TYPE_CHECKING:
    from autotune.estimate import Prediction
    from autotune.probe.trl_file import TrlFile
    from autotune.virtual.cards import Card

NOTHING_FITS = 3
MOST_ASSUMED = 1 << 24
"""Rows are made up token by token; no context is near as long."""
UNITS = {
    "memory_bytes": "bytes",
    "driver_memory_mib": "MiB",
    "context_bytes": "bytes",
    "bandwidth_bytes_per_s": "bytes/s",
    "link_bytes_per_s": "bytes/s",
    "l2_bytes": "bytes",
    "cublas_workspace_bytes": "bytes",
    "tflops": "10^12/s",
}
RATES = ("bf16", "fp16", "fp32")


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    common.command(app, gpus, imports=("autotune.virtual.cards",))
    common.command(app, estimate, imports=("autotune.estimate", "autotune.report.estimated_text"))


def gpus(
    card: Annotated[
        str | None,
        typer.Argument(help="Show this card: a name, a size as 24GiB, or a TOML file."),
    ] = None,
    as_json: options.Json = False,
) -> int:
    """List the cards that --device virtual:CARD can name, or show one with its sources."""
    from autotune.virtual import cards

    found = [cards.find(_bare(card))] if card is not None else list(cards.catalogue().values())
    if as_json:
        common.show_json({"cards": [_card_facts(item) for item in found]})
    elif card is not None:
        _show_card(found[0])
    else:
        _show_cards(found)
    return 0


def estimate(
    file: Annotated[
        Path, typer.Argument(help="Configuration for trl: a YAML file, or an exported script.")
    ],
    device: Annotated[
        str, typer.Option(help="virtual:CARD, or several with commas; autotune gpus lists them.")
    ],
    assume_length: Annotated[
        int | None,
        typer.Option(
            help="Do without the data: all rows have so many tokens.", min=2, max=MOST_ASSUMED
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw memory over the run, as .png or .svg; for a single card."),
    ] = None,
    trainer: options.FileTrainer = None,
    probe_timeout: Annotated[str, typer.Option(help="Limit of one card, as 300 or 5m.")] = "30m",
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> int:
    """Predict what one configuration takes on a card that is not here, and if it fits.

    Of several cards, one that it fits on is enough for the exit code 0; 3 if it fits on none, 2 if
    none of them runs it.
    """
    from autotune.estimate import Estimator
    from autotune.probe import trl_file
    from autotune.report import estimated_text, makeup, pictures

    limit_s = common.duration_s(probe_timeout, "--probe-timeout")
    assert limit_s is not None  # the option has a default
    devices = [part for part in device.split(",") if part.strip()]
    if plot is not None:
        common.check_file(plot, "--plot")
        pictures.check_plot(plot)
        if len(devices) > 1:
            raise UsageError("--plot draws one card.", hint="Give --device a single one.")
    read = trl_file.read(file, trainer)
    estimator = Estimator(
        read,
        devices,
        assume_length=assume_length,
        timeout_s=limit_s,
        trust_remote_code=trust_remote_code,
        on_card=lambda label: common.say(f"predicting on {label} ..."),
    )
    _check_keys(read)
    common.say("starting the worker and reading model and data ...")
    found = estimator.run()
    makeup_of = found.cards[0].makeup
    if plot is not None and makeup_of is not None:
        budget = found.cards[0].budget_bytes - found.cards[0].context_bytes
        common.say(f"wrote {makeup.save_timeline(makeup_of, plot, budget)}")
    if as_json:
        common.show_json(found.to_dict())
    else:
        console = common.stdout_console()
        text = estimated_text.render(found, console.width)
        common.show_text(text, console)
    for card in found.cards:
        if card.hint:
            # Not on standard output, where other programs read the verdicts.
            common.say(f"  hint for {card.label}: {card.hint}")
    return _exit_code(found)


def _exit_code(found: Prediction) -> int:
    """Return what the verdicts on all cards come to."""
    outcomes = {card.outcome for card in found.cards}
    if any(card.fits for card in found.cards):
        return 0
    if outcomes & {Outcome.OK, Outcome.DEVICE_OOM}:
        return NOTHING_FITS
    return UsageError.exit_code if outcomes == {Outcome.UNSUPPORTED} else AutotuneError.exit_code


def _check_keys(file: TrlFile) -> None:
    """Refuse all keys that TRL does not know; a probe would find the first, and much later."""
    from autotune.probe.trl_config import LAUNCH_KEYS
    from autotune.space.trl_keys import known_keys

    known = known_keys(file.trainer)
    wrong = [
        UnknownNameError("TRL key", key, known, where=file.place(key))
        for key in file.config
        if known and key not in known | LAUNCH_KEYS
    ]
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        told = "".join(f"\n  {error.message} {error.hint}" for error in wrong)
        raise UsageError(f"{file.path} has {len(wrong)} keys that TRL does not know:{told}")


def _bare(card: str) -> str:
    return card.strip().removeprefix("virtual:")


def _card_facts(card: Card) -> dict[str, Any]:
    return {**asdict(card), "units": UNITS}


def _show_cards(found: list[Card]) -> None:
    rows = [_row(card) for card in found]
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    for row in [{name: name for name in sizes}, *rows]:
        cells = [
            f"{row[name]:<{size}}" if name == "card" else f"{row[name]:>{size}}"
            for name, size in sizes.items()
        ]
        print("  ".join(cells).rstrip())
    print(
        "GiB: usable, context included. driver: what its tool shows. GB/s: bandwidth of the"
        " memory; link: to the host, one way. T/s: 10^12 operations per second, dense. All"
        " theoretical.\n`autotune gpus CARD` shows every figure with its source."
    )


def _row(card: Card) -> dict[str, str]:
    return {
        "card": card.id,
        "GiB": f"{card.memory_bytes / (1 << 30):.2f}",
        "driver MiB": str(card.driver_memory_mib),
        "capability": card.compute_capability,
        "GB/s": f"{card.bandwidth_bytes_per_s / 1e9:,.0f}",
        **{
            f"{name} T/s": f"{card.tflops[name]:g}" if name in card.tflops else "-"
            for name in RATES
        },
        "link GB/s": f"{card.link_bytes_per_s / 1e9:.1f}",
    }


def _show_card(card: Card) -> None:
    from autotune.virtual.cards import SOURCE_OF

    console = common.stdout_console()
    print(f"{card.name} ({card.id})")
    if card.aliases:
        print(f"  also called: {', '.join(card.aliases)}")
    print(f"  vendor: {card.vendor}, architecture: {card.architecture}")
    for name, source in SOURCE_OF.items():
        print(f"  {name}: {_value(card, name)}")
        text = card.sources.get(source, "not stated")
        common.print_wrapped(f"source: {text}", console.width, indent=6)


def _value(card: Card, name: str) -> str:
    value = getattr(card, name)
    if name == "tflops":
        rates = ", ".join(f"{kind} {rate:g}" for kind, rate in value.items())
        return f"{rates} ({UNITS[name]}, dense)"
    if name not in UNITS:
        return str(value)
    text = f"{value:,.0f} {UNITS[name]}"
    if UNITS[name] == "bytes":
        text += f" ({value / (1 << 30):.2f} GiB)" if value >= 1 << 30 else ""
        text += f" ({value / (1 << 20):.1f} MiB)" if value < 1 << 30 else ""
    return text + (f" ({value / 1e9:,.1f} GB/s)" if UNITS[name] == "bytes/s" else "")
