"""Which columns each trainer takes, so that data of another kind gets a helpful word."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.errors import UsageError

TAKES: dict[str, tuple[tuple[str, ...], ...]] = {
    "sft": (
        ("messages",),
        ("conversations",),
        ("prompt", "completion"),
        ("text",),
        ("input_ids",),
    ),
    "dpo": (("chosen", "rejected"),),
    "reward": (("chosen", "rejected"),),
    "kto": (("prompt", "completion", "label"), ("chosen", "rejected")),
    "grpo": (("prompt",),),
    "rloo": (("prompt",),),
    "online_dpo": (("prompt",),),
    "distillation": (("prompt",),),
}
"""Trainer to the sets of columns that it reads, each enough by itself."""


def require(
    trainer: str,
    columns: Sequence[str],
    takes: Sequence[Sequence[str]] | None = None,
    *,
    otherwise: str = "Rename the columns, or convert the data.",
) -> None:
    """Check that data with ``columns`` is for ``trainer``.

    Args:
        trainer: Its name.
        columns: Of the data.
        takes: Sets of columns, each enough by itself; those in :data:`TAKES` if None.
        otherwise: The hint where no other trainer takes this data.

    Raises:
        UsageError: If it is not; names the columns it needs and the trainers that take this data.
    """
    wanted = TAKES[trainer] if takes is None else takes
    if any(set(needed) <= set(columns) for needed in wanted):
        return
    needs = ", or ".join(" and ".join(repr(name) for name in needed) for needed in wanted)
    others = [
        name
        for name, sets in TAKES.items()
        if name != trainer and any(set(needed) <= set(columns) for needed in sets)
    ]
    hint = f"This data would do for: {', '.join(f'--trainer {name}' for name in others)}."
    raise UsageError(
        f"the data set has no columns that {trainer} can train on: it needs {needs}, and has"
        f" {', '.join(repr(name) for name in sorted(columns))}.",
        hint=hint if others else otherwise,
    )
