"""The posterior of prompts' values, given the losses of several mini-batches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .contrasts import Contrasts, MiniBatches

_LEAST_VARIANCE = 1e-12


class Comparisons(NamedTuple):
    """Losses of one class with the weights of their mini-batches.

    Attributes:
        batches: The prompts of each mini-batch.
        contrasts: The noise of one example.
        losses: Shape (J, I) or (J, I, G), nats, 0 where there is no prompt.
        weights: Examples of the class times the mini-batch's trust, shape (J,).
    """

    batches: MiniBatches
    contrasts: Contrasts
    losses: NDArray[np.float64]
    weights: NDArray[np.float64]

    def precision(self) -> NDArray[np.float64]:
        """Return the precision of the values, (P, P), in units of one example's noise."""
        return self.batches.matrix(self.weights[:, None, None] * self.contrasts.precision)

    def weighted(self) -> NDArray[np.float64]:
        """Return the losses times that precision, summed per prompt, shape (P,) or (P, G)."""
        return self.batches.totals(self._weighted())

    def square(self) -> float:
        """Return the weighted sum of squared differences of plain losses (J, I)."""
        return float((self.losses * self._weighted()).sum())

    def degrees(self) -> float:
        """Return the number of independent differences, with full trust in all mini-batches."""
        present = self.weights > 0.0
        return float(self.contrasts.degrees[present].sum())

    def _weighted(self) -> NDArray[np.float64]:
        flat = self.losses.reshape(*self.losses.shape[:2], -1)
        result = self.weights[:, None, None] * (self.contrasts.precision @ flat)
        return result.reshape(self.losses.shape)


class Posterior(NamedTuple):
    """A Gaussian process at the observed prompts, for one class.

    Attributes:
        mean: Values relative to the average prompt, nats, shape (P,).
        unit: Their covariance in units of the noise variance, shape (P, P).
        noise: The variance of one example's noise, nats^2.
        weighted: The losses times their precision, in units of `unit`, shape (P,).
    """

    mean: NDArray[np.float64]
    unit: NDArray[np.float64]
    noise: float
    weighted: NDArray[np.float64]


def posterior(
    comparisons: Comparisons,
    prior: NDArray[np.float64],
    precision: NDArray[np.float64] | None = None,
) -> Posterior:
    """Return the posterior given some losses.

    Args:
        comparisons: Losses (J, I).
        prior: The inverse of the prior covariance, in units of the noise variance, (P, P).
        precision: `Comparisons.precision`, if already computed.
    """
    data_precision = comparisons.precision() if precision is None else precision
    unit = inverted(prior + data_precision)
    weighted = comparisons.weighted()
    mean = unit @ weighted
    square = comparisons.square() - float(weighted @ mean)
    noise = square / max(comparisons.degrees(), 1.0)
    return Posterior(mean, unit, max(noise, _LEAST_VARIANCE), weighted)


def inverted(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the inverse of a matrix."""
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)
