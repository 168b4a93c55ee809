"""Options that several commands have; each is declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MOST = 2**31
"""Of rows or steps: what TRL and PyTorch count in 32 bits somewhere."""

Model = Annotated[str, typer.Argument(help="Hub id or local folder.")]
Dataset = Annotated[str, typer.Argument(help="Hub id, data file or folder.")]
Run = Annotated[Path, typer.Argument(help="Run folder, or its report.json.")]

Trainer = Annotated[str, typer.Option(help="TRL trainer.")]
FileTrainer = Annotated[
    str | None,
    typer.Option("--trainer", help="What FILE is for.  [default: what it says, or its keys tell]"),
]
Space = Annotated[
    str | None, typer.Option(help="Search space: a name or a YAML file.  [default: TRAINER]")
]
Reward = Annotated[
    str | None,
    typer.Option(
        help="What scores completions: module:function, one of TRL's names, a hub id or folder."
    ),
]
Split = Annotated[str | None, typer.Option(help="Split to train on.  [default: train]")]
DatasetConfig = Annotated[str | None, typer.Option(help="Data set configuration.")]
Revision = Annotated[str | None, typer.Option(help="Model revision on the hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the model repository's own code.")
]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda[:N], mps, xpu, or virtual:CARD (autotune gpus).")
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(help="Peak memory to stay within, as 22GiB.  [default: free less 10 %]"),
]
MinCoverage = Annotated[
    float | None,
    typer.Option(
        help="Least share of loss tokens to train on.  [default: 0.95; 0 for a pinned length]",
        min=0.0,
        max=1.0,
    ),
]
Objectives = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="What to optimise, once per quantity: peak-memory, tokens-per-s, samples-per-s,"
        " epoch-time, host-memory.  [default: peak-memory, tokens-per-s]",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the search.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Price = Annotated[
    list[str] | None,
    typer.Option(
        "--price", metavar="CARD=PER_HOUR", help="What a compared card costs, in any currency."
    ),
]
Prices = Annotated[Path | None, typer.Option(help="TOML or YAML file of prices per hour by card.")]
