"""How much each candidate is expected to add to the front, from what is believed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.search.hypervolume import as_gains, front_of, hypervolume, improvements
from autotune.search.quantity import Belief
from autotune.search.residuals import Array

NUM_DRAWS = 64
MOST_WEIGHED = 1000
"""Candidates whose gain is worked out in full; of more, those that could gain most."""

FEW_DRAWS = 12
FEW_WEIGHED = 32
"""The same for three objectives and more, where each volume is worked out by itself."""

CAUTION = 2.0
"""How much more than it gains nothing a probe that runs out of memory costs: what a candidate is
expected to gain counts with this power of the chance that it fits, beside that chance itself."""

SIMPLE = 2
"""Objectives up to which the volumes of all candidates are worked out at once."""

NEVER = -1.0
HOPE = 1.5
"""Deviations to the better side, where it is asked what a candidate could gain at best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """What candidates are weighed by.

    Attributes:
        directions: ``minimize`` or ``maximize`` per objective.
        objectives: What is believed of each objective.
        load: What is believed of peak memory over the budget.
        linked: The objective that is the memory itself; None if there is none.
        measured: Values of candidates that fit, in the objectives' units. Shape (M, D).
        pending: Numbers of candidates that are being probed.
        budget: What the linked objective is at a load of 1, in its unit.
    """

    directions: Sequence[str]
    objectives: Sequence[Belief]
    load: Belief
    linked: int | None
    measured: Array
    pending: Sequence[int]
    budget: float | None

    def gains(self, rows: Sequence[int], chances: Array, random: np.random.Generator) -> Array:
        """Return the share of the front's hypervolume that each candidate is expected to add.

        Args:
            rows: Numbers of candidates. Shape (N,).
            chances: How likely each one is to run, memory aside. Shape (N,).
            random: Draws the deviates.

        Returns:
            Shape (N,); ``NEVER`` for those that are not worth weighing.
        """
        reference, scale = self._reference(rows)
        front = front_of(as_gains(self._known(), reference, self.directions, scale))
        draws, loads = self._draw(rows, random)
        fits = loads <= 1.0
        chance = fits.mean(axis=0)
        allowed = chance > 0.0
        weighed = self._worth_weighing(rows, allowed, reference, scale)
        points = as_gains(draws[:, weighed, :], reference, self.directions, scale)
        added = improvements(points.reshape(-1, points.shape[-1]), front)
        added = added.reshape(points.shape[:2]) * fits[:, weighed]
        found = np.full(len(rows), NEVER)
        volume = hypervolume(front)
        likely = chances[weighed] * chance[weighed] ** CAUTION
        found[weighed] = added.mean(axis=0) * likely / (volume if volume > 0 else 1.0)
        return found

    def _known(self) -> Array:
        """Return the values of what is measured, and the likeliest of what is being probed."""
        found = self.measured.reshape(-1, len(self.directions))
        if not self.pending:
            return found
        none = np.zeros((1, 1))
        waiting = [item.at(self.pending, none)[0] for item in self.objectives]
        return np.concatenate([found, np.stack(waiting, axis=-1)])

    def _reference(self, rows: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return, per objective, the worst value that counts and what a gain of 1 is.

        It is the budget for the memory and zero for what is to be great; for anything else the
        worst that is likely.
        """
        reference, scale = [], []
        for number, (direction, belief) in enumerate(
            zip(self.directions, self.objectives, strict=True)
        ):
            likely = np.concatenate(
                [belief.at(rows, np.zeros((1, 1)))[0], self.measured[:, number]]
            )
            low, high = float(likely.min()), float(likely.max())
            if direction == "maximize":
                worst = 0.0 if belief.is_log else low
                best = high
            else:
                is_memory = number == self.linked and self.budget is not None
                worst, best = (self.budget or high) if is_memory else high * 1.05, low
            reference.append(worst)
            scale.append(abs(best - worst) or 1.0)
        return reference, scale

    def _draw(self, rows: Sequence[int], random: np.random.Generator) -> tuple[Array, Array]:
        """Return values of objectives and loads. Shapes (S, N, D) and (S, N)."""
        num_draws = NUM_DRAWS if len(self.objectives) <= SIMPLE else FEW_DRAWS
        half = random.standard_normal((num_draws // 2, len(self.objectives) + 1))
        deviates = np.concatenate([half, -half])  # in pairs, so that their mean is exact
        if self.linked is not None:
            deviates[:, -1] = deviates[:, self.linked]
        values = [
            belief.at(rows, deviates[:, number : number + 1])
            for number, belief in enumerate(self.objectives)
        ]
        return np.stack(values, axis=-1), self.load.at(rows, deviates[:, -1:])

    def _worth_weighing(
        self,
        rows: Sequence[int],
        allowed: Array,
        reference: Sequence[float],
        scale: Sequence[float],
    ) -> list[int]:
        """Return places in ``rows``: all that may fit, or those that could gain most."""
        places = [place for place, is_allowed in enumerate(allowed) if is_allowed]
        most = MOST_WEIGHED if len(self.objectives) <= SIMPLE else FEW_WEIGHED
        if len(places) <= most:
            return places
        chosen = [rows[place] for place in places]
        hoped = [
            belief.at(chosen, np.full((1, 1), HOPE if direction == "maximize" else -HOPE))[0]
            for direction, belief in zip(self.directions, self.objectives, strict=True)
        ]
        points = as_gains(np.stack(hoped, axis=-1), reference, self.directions, scale)
        volumes = np.prod(np.maximum(points, 0.0), axis=1)
        return [places[index] for index in np.argsort(-volumes)[:most]]
