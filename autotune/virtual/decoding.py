"""Generations: hundreds of steps that differ in one length, of which a few are run.

A step of a generation runs the model on one token per sequence and makes its cache of keys and
values one position longer. Two steps do the same operators on the same sizes, but for those that
grow with the cache. So the first steps and the last one are run, and of those between it is
written into the trace what they would have done: every storage, its size and its work, taken from
steps that were tried at other lengths of the cache and taken back. Sizes must lie on a line where
they are read off one; where they do not, as with kernels that split long sequences, shorter
stretches are tried.

Left out of the trace is what a step takes and gives back itself in pieces of up to 1 MiB of one
size: the allocator keeps those in a pool of their own, which the steps that were run have filled.
The sampling between two steps runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autotune.virtual.likeness import is_of_libraries
from autotune.virtual.steps import Step, Stretch
from autotune.virtual.trace import Trace

_FEWEST = 32
"""Steps of a generation that is worth it."""


class Decoding:
    """Spares a model the steps of its generations that the trace can tell.

    Args:
        trace: Of the device that the model runs on.

    Attributes:
        num_spared: Steps that were not run.
    """

    def __init__(self, trace: Trace) -> None:
        self.num_spared = 0
        self._trace = trace
        self._known: list[tuple[Step, tuple[int, bytes], list[Stretch]]] = []

    def install(self, model: torch.nn.Module) -> None:
        """Let ``model`` generate with few steps, if it is one whose code is a library's."""
        # Imported where something generates: a second of start-up for all others.
        from transformers import GenerationMixin

        found = [module for module in model.modules() if isinstance(module, GenerationMixin)]
        if len(found) == 1 and all(is_of_libraries(module) for module in found[0].modules()):
            found[0].generate = self._around(found[0], found[0].generate)

    def _around(self, model: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
        from autotune.virtual.generation import Generation

        def spared(*args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("generation_config") or model.generation_config
            num_new = kwargs.get("max_new_tokens") or config.max_new_tokens
            if num_new is None or num_new - 1 < _FEWEST:
                return generate(*args, **kwargs)
            own = model.__dict__.get("forward")
            run = Generation(self, self._trace, model.forward, num_new - 1)
            model.forward = run
            try:
                return generate(*args, **kwargs)
            finally:
                run.end()
                if own is None:
                    del model.forward
                else:
                    model.forward = own

        return spared

    def known(self, step: Step, like: tuple[int, bytes]) -> list[Stretch] | None:
        """Return the stretches of a generation that was the same at this step.

        Args:
            step: What was done.
            like: Steps that are left, and the mask.
        """
        for other, others, stretches in self._known:
            if (
                others == like
                and other.length == step.length
                and other.sizes == step.sizes
                and other.is_like(step)
                and math.isclose(other.seconds(), step.seconds(), rel_tol=1e-6)
            ):
                return stretches
        return None

    def learn(self, step: Step, like: tuple[int, bytes], stretches: list[Stretch]) -> None:
        """Keep the stretches of a generation from this step on."""
        self._known.append((step, like, stretches))
