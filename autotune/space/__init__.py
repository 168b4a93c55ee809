"""Value sets, knobs, search spaces, and what they know of the machine."""

from autotune.space.context import Context, DataProfile, DeviceInfo, ModelFacts
from autotune.space.domains import Choice, Domain, FloatRange, IntRange, PowerOfTwo, Quantiles
from autotune.space.knob import Candidate, Knob
from autotune.space.resolve import ResolvedSpace
from autotune.space.space import SearchSpace

__all__ = [
    "Candidate",
    "Choice",
    "Context",
    "DataProfile",
    "DeviceInfo",
    "Domain",
    "FloatRange",
    "IntRange",
    "Knob",
    "ModelFacts",
    "PowerOfTwo",
    "Quantiles",
    "ResolvedSpace",
    "SearchSpace",
]
