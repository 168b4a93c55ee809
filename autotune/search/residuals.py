"""What measurements teach about candidates that have not been measured.

A Gaussian process over the knobs (Rasmussen and Williams, "Gaussian Processes for Machine
Learning", 2006, chapters 2 and 5). What it learns is the logarithm of a quantity, or, where the
quantity was predicted, of measured over predicted: by how much predictions are off on this device
as a whole, per knob, per combination of knobs, and per part that predictions are made of: if the
optimizer's step takes twice as long as predicted, a candidate is off by as much of that as its
share of the predicted time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NEIGHBOURS = 0.7
"""Likeness of the two nearest values of an ordered knob, such as two micro-batches."""

_ALIKE = 0.5
"""Likeness that a combination keeps for each knob in which two candidates differ."""


class Likeness:
    """How alike candidates are, knob by knob.

    Args:
        candidates: Knob name to value, for each.
        ordered: Knobs whose values are numbers that lie on a scale.

    Attributes:
        size: Number of candidates.
    """

    def __init__(self, candidates: Sequence[Mapping[str, Any]], ordered: Sequence[str]) -> None:
        names = list(dict.fromkeys(name for item in candidates for name in item))
        tables, columns = [], []
        for name in names:
            values = [item.get(name) for item in candidates]
            known = list(dict.fromkeys(values))
            if len(known) == 1:
                continue
            if name in ordered:
                known.sort(key=_on_scale)
            places = {value: place for place, value in enumerate(known)}
            columns.append([places[value] for value in values])
            tables.append(_table(known, is_ordered=name in ordered))
        self.size = len(candidates)
        self._tables = tables
        self._places = np.array(columns, dtype=int).reshape(len(columns), len(candidates))

    def parts(self, rows: Sequence[int], others: Sequence[int]) -> tuple[Array, Array]:
        """Return the mean of the knobs' likenesses, and that of the combinations.

        Args:
            rows: Numbers of candidates. Shape (N,).
            others: Numbers of candidates. Shape (M,).

        Returns:
            Two arrays from 0 to 1, 1 for the same candidate. Shapes (N, M).
        """
        one_by_one = np.zeros((len(rows), len(others)))
        together = np.ones_like(one_by_one)
        for table, places in zip(self._tables, self._places, strict=True):
            alike = table[np.ix_(places[list(rows)], places[list(others)])]
            one_by_one += alike
            together *= _ALIKE + (1.0 - _ALIKE) * alike
        return one_by_one / max(len(self._tables), 1), together


def _on_scale(value: Any) -> tuple[bool, bool, float, str]:
    """Return where a value lies; what is no number, as of an earlier version, comes last."""
    is_number = isinstance(value, int | float)
    return value is None, not is_number, float(value) if is_number else 0.0, str(value)


def _table(values: Sequence[Any], *, is_ordered: bool) -> Array:
    """Return the likeness of each two values of a knob. Shape (V, V)."""
    if not is_ordered:
        return np.eye(len(values))
    places = np.arange(len(values))
    table = _NEIGHBOURS ** np.abs(places[:, None] - places[None, :]).astype(float)
    if None in values:  # not active is no neighbour of any value
        index = list(values).index(None)
        table[index, :] = table[:, index] = 0.0
        table[index, index] = 1.0
    return np.asarray(table, dtype=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """How much a quantity is expected to vary: standard deviations of its logarithm.

    Attributes:
        common: Of what all candidates share.
        knobs: Of what the knobs add to it, each by itself, all together.
        combinations: Of what combinations of knobs add to that.
        noise: Of a measurement that is repeated.
        shares: Of what each part of a prediction is off by; of no use without shares.
        own: Of what may be a candidate's own. It is rare and large, so that those measured so far
            say little of it and are not taken to have any.
    """

    common: float
    knobs: float
    combinations: float
    noise: float
    shares: float = 0.0
    own: float = 0.0

    def times(self, knobs: float, combinations: float, noise: float) -> Scales:
        """Return them with all but the common one multiplied."""
        return Scales(
            common=self.common,
            knobs=self.knobs * knobs,
            combinations=self.combinations * combinations,
            noise=self.noise * noise,
            shares=self.shares,
            own=self.own,
        )


_TRIED = tuple(itertools.product((0.7, 1.0, 1.6), (0.7, 1.0, 1.6), (0.5, 1.0, 2.0)))
"""Factors to the scales that are tried. That some knobs are predicted well says little of another
one that has not been tried, so that none is much below 1."""

_TRUST = 0.5
"""How strongly the scales as given are preferred: the penalty for each factor's logarithm."""


class Residuals:
    """The posterior of one quantity's logarithm, for all candidates.

    Args:
        likeness: Of the candidates.
        rows: Numbers of the candidates that were observed; one may be there more than once.
            Shape (N,).
        observed: What was observed, as a logarithm of a ratio. Shape (N,).
        extra_noise: Standard deviation of each observation beside the noise. Shape (N,).
        scales: What is expected before anything is observed.
        shares: Share of each part in each candidate's prediction; None if there is none.
            Shape (C, P), for all C candidates that ``likeness`` knows.

    Attributes:
        scales: Those under which what was observed is likeliest.
        score: The logarithm of how likely that is, but for a constant of the observations' number.
    """

    def __init__(
        self,
        likeness: Likeness,
        rows: Sequence[int],
        observed: Sequence[float] | Array,
        extra_noise: Sequence[float] | Array,
        scales: Scales,
        shares: Array | None = None,
    ) -> None:
        self._likeness = likeness
        self._shares = shares
        self._rows = list(rows)
        self._observed = np.asarray(observed, dtype=float)
        self._extra = np.asarray(extra_noise, dtype=float) ** 2
        self._alike = self._likenesses(self._rows, self._rows)
        best: tuple[float, Scales] | None = None
        for factors in _TRIED if len(self._rows) > 3 else ((1.0, 1.0, 1.0),):
            tried = scales.times(*factors)
            score = self._log_likelihood(tried)
            score -= _TRUST * sum(np.log(factor) ** 2 for factor in factors)
            if best is None or score > best[0]:
                best = (score, tried)
        assert best is not None
        self.score, self.scales = best
        self._factor: Array = np.asarray(np.linalg.cholesky(self._covariance(self.scales)))
        self._weights = _solve(self._factor, self._observed)

    def posterior(self, candidates: Sequence[int]) -> tuple[Array, Array]:
        """Return mean and standard deviation for candidates, without a measurement's noise."""
        scales = self.scales
        total = np.full(
            len(candidates),
            scales.common**2 + scales.knobs**2 + scales.combinations**2 + scales.own**2,
        )
        if self._shares is not None:
            total += scales.shares**2 * np.sum(self._shares[list(candidates)] ** 2, axis=1)
        if not self._rows:
            return np.zeros(len(candidates)), np.sqrt(total)
        across = _weighted(self._likenesses(candidates, self._rows), scales)
        mean = across @ self._weights
        half = np.linalg.solve(self._factor, across.T)
        variance = np.maximum(total - np.sum(half**2, axis=0), 1e-12)
        return mean, np.sqrt(variance)

    def _covariance(self, scales: Scales) -> Array:
        size = len(self._rows)
        noise = np.full(size, scales.noise**2) + self._extra + 1e-10
        return _weighted(self._alike, scales) + np.diag(noise)

    def _likenesses(
        self, rows: Sequence[int], others: Sequence[int]
    ) -> tuple[Array, Array, Array | float]:
        alike, together = self._likeness.parts(rows, others)
        if self._shares is None:
            return alike, together, 0.0
        return alike, together, self._shares[list(rows)] @ self._shares[list(others)].T

    def _log_likelihood(self, scales: Scales) -> float:
        if not self._rows:
            return 0.0
        factor = np.linalg.cholesky(self._covariance(scales))
        half = np.linalg.solve(factor, self._observed)
        return float(-0.5 * half @ half - np.sum(np.log(np.diag(factor))))


def _weighted(alike: tuple[Array, Array, Array | float], scales: Scales) -> Array:
    one_by_one, together, in_shares = alike
    return np.asarray(
        scales.common**2
        + scales.knobs**2 * one_by_one
        + scales.combinations**2 * together
        + scales.shares**2 * in_shares
    )


def _solve(factor: Array, values: Array) -> Array:
    return np.asarray(np.linalg.solve(factor.T, np.linalg.solve(factor, values)))
