"""Optuna's samplers by the names of ``--sampler``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import optuna

from autotune.errors import PrerequisiteError, UnknownNameError


class _Grid(optuna.samplers.BruteForceSampler):
    """Walks the space; that it is used up is noticed by the search, which stops itself."""

    def after_trial(self, *args: Any) -> None:
        """Do nothing: Optuna's own calls ``Study.stop``, which ask-and-tell does not allow."""


_BUILDERS: dict[str, Callable[[int | None, int], optuna.samplers.BaseSampler]] = {
    "tpe": lambda seed, startup: optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=startup, multivariate=True, group=True
    ),
    "nsgaii": lambda seed, startup: optuna.samplers.NSGAIISampler(
        seed=seed, population_size=max(startup, 4)
    ),
    "gp": lambda seed, startup: optuna.samplers.GPSampler(
        seed=seed, n_startup_trials=startup, warn_independent_sampling=False
    ),
    "random": lambda seed, startup: optuna.samplers.RandomSampler(seed=seed),
    # GridSampler wants one flat grid; BruteForceSampler walks conditional spaces as well.
    "grid": lambda seed, startup: _Grid(seed=seed, avoid_premature_stop=True),
}
_NEEDED = {"gp": ("scipy", "torch")}

LEARNED = "learned"
"""Our own, see ``learned.py``."""

NAMES = ("auto", LEARNED, *_BUILDERS)


def resolve(name: str, *, num_trials: int | None, space_size: int) -> str:
    """Return the sampler that ``auto`` stands for; other names as they are.

    ``auto`` walks the whole space if the budget covers it, and learns otherwise.

    Raises:
        UnknownNameError: If there is no such sampler.
        PrerequisiteError: If it needs a package that is not installed.
    """
    if name not in NAMES:
        raise UnknownNameError("sampler", name, NAMES)
    missing = [package for package in _NEEDED.get(name, ()) if find_spec(package) is None]
    if missing:
        raise PrerequisiteError(
            f"the sampler {name!r} needs {' and '.join(missing)}, which is not installed.",
            hint=f"pip install {' '.join(missing)}, or choose another --sampler.",
        )
    if name != "auto":
        return name
    return "grid" if num_trials is not None and num_trials >= space_size else LEARNED


def build(name: str, *, seed: int, num_trials: int | None) -> optuna.samplers.BaseSampler:
    """Return Optuna's sampler, with a generator of its own seeded by ``seed``.

    A third of the trials, at most ten, are drawn at random before a model is trusted.
    """
    startup = 10 if num_trials is None else max(3, min(10, num_trials // 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _BUILDERS[name](seed, startup)
