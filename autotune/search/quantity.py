"""What is believed of one quantity, an objective or the memory, for every candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.search.residuals import Array, Likeness, Residuals, Scales

PREDICTED_MEMORY = Scales(common=0.3, knobs=0.05, combinations=0.03, noise=0.01, shares=1.0)
"""Measured over predicted, of memory. Kernels of another device may keep twice as much of one kind
of memory, and what a process holds beside its tensors is a guess; what the knobs do is known."""

PREDICTED_TIME = Scales(common=0.6, knobs=0.25, combinations=0.15, noise=0.04, shares=0.3, own=0.1)
"""The same of time and rates: a roofline knows neither how well each kernel does on the device nor
what the host adds to each operator, nor which tensors just fit into a cache."""

UNPREDICTED = Scales(common=1.0, knobs=0.4, combinations=0.25, noise=0.015)
"""The quantity itself, where nothing was predicted: knobs change it by a half or so each."""

MOST_GUESSES = 300
"""Predictions that others are filled in from, where not all candidates were predicted."""

LESSON_NOISE = 0.1
"""What a prediction's error in another run says of the one in this run, at best."""

FAITH = 10.0
"""How much likelier predictions are held to be of use than not, before anything was measured."""

BEYOND = 0.02
"""How far beyond a limit something is taken to be, at least, that is known to be over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """A quantity's distribution for each candidate.

    Attributes:
        mean: Of the logarithm, or of the value itself where values need not be positive.
            Shape (N,).
        deviation: The standard deviation of that. Shape (N,).
        is_log: Which of them it is.
    """

    mean: Array
    deviation: Array
    is_log: bool

    def at(self, rows: Sequence[int], deviates: Array) -> Array:
        """Return values, in the quantity's unit, for standard normal deviates.

        Args:
            rows: Numbers of candidates. Shape (N,).
            deviates: Shape (S, 1), or (S, N).

        Returns:
            Shape (S, N).
        """
        index = list(rows)
        found = self.mean[index] + self.deviation[index] * deviates
        return np.exp(found) if self.is_log else found


class Quantity:
    """One quantity of all candidates.

    Args:
        likeness: Of the candidates, then of those of lessons.
        size: Number of candidates.
        guesses: Predicted values, by number of the candidate.
        lessons: Measured over predicted in earlier runs, by number after the candidates.
        is_memory: Whether it is memory, which predictions know better than time.
        shares: What predictions are made of, by number of the candidate: part to share (0 to 1).
    """

    def __init__(
        self,
        likeness: Likeness,
        size: int,
        *,
        guesses: Mapping[int, float],
        lessons: Mapping[int, float],
        is_memory: bool = False,
        shares: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        self._likeness = likeness
        self._size = size
        self._predicted = PREDICTED_MEMORY if is_memory else PREDICTED_TIME
        self._lessons = _sound(lessons)
        self._shares = _matrix(shares or {}, likeness.size)
        usable = _sound(guesses)
        self._guessed = self._fill(usable) if usable else None

    def _fill(self, guesses: Mapping[int, float]) -> tuple[Array, Array]:
        """Return the predictions' logarithm for all, and how sure it is. Shapes (N,).

        What was not predicted is filled in from candidates that are like it.
        """
        mean, deviation = np.zeros(self._size), np.zeros(self._size)
        rows = sorted(guesses)
        mean[rows] = np.log([guesses[row] for row in rows])
        lacking = [row for row in range(self._size) if row not in guesses]
        if lacking:
            kept = rows[:: -(-len(rows) // MOST_GUESSES)]
            centre = float(np.mean(mean[kept]))
            known = mean[kept] - centre
            model = Residuals(self._likeness, kept, known, np.zeros(len(kept)), UNPREDICTED)
            found, spread = model.posterior(lacking)
            mean[lacking], deviation[lacking] = found + centre, spread
        return mean, deviation

    def believe(
        self,
        observed: Sequence[tuple[int, float]],
        *,
        above: Sequence[int] = (),
        limit: float = 1.0,
    ) -> Belief:
        """Return what is believed after some candidates were measured.

        Args:
            observed: Number and value, in the quantity's unit, of each.
            above: Numbers of candidates that are only known to be above ``limit``.
            limit: In the quantity's unit, greater than 0.
        """
        is_log = all(value > 0 for _, value in observed)
        rows = [row for row, _ in observed]
        values = np.array([value for _, value in observed], dtype=float)
        if not is_log:
            return self._linear(rows, values)
        logs = np.log(values)
        over = (list(above), float(np.log(limit)) + BEYOND)
        unaided, unaided_score = self._unaided(rows, logs, over)
        if self._guessed is None:
            return unaided
        aided, aided_score = self._aided(rows, logs, over)
        if not rows:
            return aided
        doubt = 1.0 / (1.0 + FAITH * float(np.exp(np.clip(aided_score - unaided_score, -50, 50))))
        return _mixed(aided, unaided, doubt)

    def _aided(
        self, rows: list[int], logs: Array, over: tuple[list[int], float]
    ) -> tuple[Belief, float]:
        """Return what predictions and what is learnt of them say, and how likely it is."""
        assert self._guessed is not None
        prior, doubt = self._guessed
        learnt = list(self._lessons)
        noted = [float(np.log(self._lessons[row])) for row in learnt]
        found = self._learn(
            [*rows, *learnt],
            [*(logs - prior[rows]), *noted],
            [*doubt[rows], *[LESSON_NOISE] * len(learnt)],
            (over[0], over[1] - prior[over[0]]),
            self._predicted,
            self._shares,
        )
        mean, deviation = found.posterior(range(self._size))
        together = np.sqrt(deviation**2 + doubt**2)
        # How likely what was measured is, given the lessons.
        alone = self._learn(
            learnt,
            noted,
            [LESSON_NOISE] * len(learnt),
            ([], prior[[]]),
            self._predicted,
            self._shares,
        )
        belief = Belief(mean=prior + mean, deviation=together, is_log=True)
        return belief, found.score - alone.score

    def _unaided(
        self, rows: list[int], logs: Array, over: tuple[list[int], float]
    ) -> tuple[Belief, float]:
        """Return what follows from measurements alone, and how likely they are then."""
        centre = float(logs.mean()) if len(logs) else 0.0
        limits = np.full(len(over[0]), over[1] - centre)
        found = self._learn(
            rows, list(logs - centre), [0.0] * len(rows), (over[0], limits), UNPREDICTED, None
        )
        mean, deviation = found.posterior(range(self._size))
        return Belief(mean=centre + mean, deviation=deviation, is_log=True), found.score

    def _learn(
        self,
        rows: list[int],
        known: list[float],
        noise: list[float],
        over: tuple[list[int], Array],
        scales: Scales,
        shares: Array | None,
    ) -> Residuals:
        """Return what is learnt, with candidates that are over a limit moved beyond it."""
        found = Residuals(self._likeness, rows, known, noise, scales, shares=shares)
        more, least = over
        if not more:
            return found
        mean, _ = found.posterior(more)
        moved = [float(value) for value in np.maximum(mean, least)]
        noise = [*noise, *[BEYOND] * len(more)]
        again = Residuals(
            self._likeness, [*rows, *more], [*known, *moved], noise, scales, shares=shares
        )
        again.score = found.score  # of what was measured alone
        return again

    def _linear(self, rows: Sequence[int], values: Array) -> Belief:
        """Return the belief of a quantity that is not always positive; predictions are no help."""
        centre, scale = float(values.mean()), float(values.std()) or 1.0
        known = (values - centre) / scale
        model = Residuals(self._likeness, rows, known, np.zeros(len(rows)), UNPREDICTED)
        mean, deviation = model.posterior(range(self._size))
        return Belief(mean=centre + scale * mean, deviation=scale * deviation, is_log=False)


def _sound(values: Mapping[int, float]) -> dict[int, float]:
    """Return those that have a logarithm, within what any quantity can be."""
    return {row: value for row, value in values.items() if 1e-100 < value < 1e100}


def _mixed(first: Belief, second: Belief, share: float) -> Belief:
    """Return the belief that the second one is right with a probability of ``share``."""
    mean = (1.0 - share) * first.mean + share * second.mean
    spread = (1.0 - share) * (first.deviation**2 + first.mean**2)
    spread += share * (second.deviation**2 + second.mean**2)
    return Belief(mean=mean, deviation=np.sqrt(np.maximum(spread - mean**2, 1e-12)), is_log=True)


def _matrix(shares: Mapping[int, Mapping[str, float]], size: int) -> Array | None:
    """Return shares as an array, the mean of all for candidates without. Shape (C, P)."""
    names = sorted({name for item in shares.values() for name in item})
    if not names:
        return None
    rows = sorted(shares)
    known = np.array([[shares[row].get(name, 0.0) for name in names] for row in rows])
    found = np.tile(known.mean(axis=0), (size, 1))
    found[rows] = known
    return found
