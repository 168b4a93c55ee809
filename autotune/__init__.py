"""Find the memory configuration that a TRL fine-tuning run should use.

Nothing heavy is imported before it is used: ``import autotune`` takes milliseconds and never
loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.card_search import compare_cards
    from autotune.errors import (
        AutotuneError,
        BaselineError,
        ExecutorError,
        JournalError,
        NoFeasibleConfigError,
        PrerequisiteError,
        SpaceError,
        StudyMismatchError,
        UnknownNameError,
        UsageError,
    )
    from autotune.executors.inprocess import InProcessExecutor
    from autotune.executors.subprocess import SubprocessExecutor
    from autotune.listener import Budget, Listener, Silent
    from autotune.objectives import Constraint, Objective
    from autotune.probe.result import Measurement, Outcome, ProbeResult
    from autotune.probe.spec import ProbeSpec
    from autotune.report.cards import CardComparison, CardResult
    from autotune.report.model import Report
    from autotune.report.trial import Trial
    from autotune.space.domains import Choice, FloatRange, IntRange, PowerOfTwo
    from autotune.space.knob import Knob
    from autotune.space.space import SearchSpace
    from autotune.tuner import Tuner

_EXPORTS = {
    "AutotuneError": "errors",
    "BaselineError": "errors",
    "ExecutorError": "errors",
    "JournalError": "errors",
    "NoFeasibleConfigError": "errors",
    "PrerequisiteError": "errors",
    "SpaceError": "errors",
    "StudyMismatchError": "errors",
    "UnknownNameError": "errors",
    "UsageError": "errors",
    "InProcessExecutor": "executors.inprocess",
    "SubprocessExecutor": "executors.subprocess",
    "Constraint": "objectives",
    "Objective": "objectives",
    "Measurement": "probe.result",
    "Outcome": "probe.result",
    "ProbeResult": "probe.result",
    "ProbeSpec": "probe.spec",
    "CardComparison": "report.cards",
    "CardResult": "report.cards",
    "Report": "report.model",
    "Trial": "report.trial",
    "Choice": "space.domains",
    "FloatRange": "space.domains",
    "IntRange": "space.domains",
    "PowerOfTwo": "space.domains",
    "Knob": "space.knob",
    "SearchSpace": "space.space",
    "Budget": "listener",
    "Listener": "listener",
    "Silent": "listener",
    "Tuner": "tuner",
    "compare_cards": "card_search",
}

__all__ = [
    "AutotuneError",
    "BaselineError",
    "Budget",
    "CardComparison",
    "CardResult",
    "Choice",
    "Constraint",
    "ExecutorError",
    "FloatRange",
    "InProcessExecutor",
    "IntRange",
    "JournalError",
    "Knob",
    "Listener",
    "Measurement",
    "NoFeasibleConfigError",
    "Objective",
    "Outcome",
    "PowerOfTwo",
    "PrerequisiteError",
    "ProbeResult",
    "ProbeSpec",
    "Report",
    "SearchSpace",
    "Silent",
    "SpaceError",
    "StudyMismatchError",
    "SubprocessExecutor",
    "Trial",
    "Tuner",
    "UnknownNameError",
    "UsageError",
    "compare_cards",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    return getattr(import_module(f"autotune.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
