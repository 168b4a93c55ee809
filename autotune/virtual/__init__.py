"""The virtual accelerator: shapes and lifetimes of a training run, no data and no card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.virtual.api import accelerator as accelerator
    from autotune.virtual.fitting import Fit as Fit
    from autotune.virtual.fitting import fit as fit
    from autotune.virtual.trace import Trace as Trace

_HOMES = {
    "accelerator": "autotune.virtual.api",
    "Fit": "autotune.virtual.fitting",
    "fit": "autotune.virtual.fitting",
    "Trace": "autotune.virtual.trace",
}


def __getattr__(name: str) -> Any:
    # The search reads the catalogue of cards and must not import PyTorch for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
