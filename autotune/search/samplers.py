"""Optuna's samplers by the names of ``--sampler``."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import optuna

from autotune.errors import UnknownNameError

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
    "grid": lambda seed, startup: optuna.samplers.BruteForceSampler(
        seed=seed, avoid_premature_stop=True
    ),
}

NAMES = ("auto", *_BUILDERS)


def resolve(name: str, *, num_trials: int | None, space_size: int) -> str:
    """Return the sampler that ``auto`` stands for; other names as they are.

    ``auto`` walks the whole space if the budget covers it, and models it (TPE) otherwise.

    Raises:
        UnknownNameError: If there is no such sampler.
    """
    if name not in NAMES:
        raise UnknownNameError("sampler", name, NAMES)
    if name != "auto":
        return name
    return "grid" if num_trials is not None and num_trials >= space_size else "tpe"


def build(name: str, *, seed: int, num_trials: int | None) -> optuna.samplers.BaseSampler:
    """Return Optuna's sampler, with a generator of its own seeded by ``seed``.

    A third of the trials, at most ten, are drawn at random before a model is trusted.
    """
    startup = 10 if num_trials is None else max(3, min(10, num_trials // 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _BUILDERS[name](seed, startup)
