"""Bootstrap intervals for the means of few paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_DRAWS = 10_000


class Difference(NamedTuple):
    """A mean difference of pairs.

    Attributes:
        mean: Over the pairs.
        low: Lower end of the two-sided 95 % interval.
        high: Its upper end.
    """

    mean: float
    low: float
    high: float


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the mean of ``first - second``, over pairs of the same seed.

    The percentile interval of the mean is multiplied by ``sqrt(n / (n - 1))``, because the interval
    of few pairs is too narrow otherwise (Hesterberg 2015). One pair has no interval: its ends are
    infinite.

    Args:
        first: One number per seed, finite.
        second: Of the same seeds.

    Raises:
        ValueError: The lengths differ, there are no pairs, or one is not a number.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if not all(map(math.isfinite, differences)):
        raise ValueError("differences must be finite")
    count = len(differences)
    means = _resampled(differences).mean(axis=1)
    mean = math.fsum(differences) / count
    if count == 1:
        return Difference(mean, -math.inf, math.inf)
    stretched = mean + math.sqrt(count / (count - 1)) * (means - mean)
    low, high = np.quantile(stretched, (0.025, 0.975))
    return Difference(mean, float(low), float(high))


def _resampled(values: Sequence[float]) -> NDArray[np.float64]:
    """Return resampled repeats, shape (draws, n)."""
    numbers = np.array(values, dtype=np.float64)
    if not len(numbers) or np.isnan(numbers).any():
        raise ValueError("differences must be numbers, at least one of them")
    rng = np.random.Generator(np.random.Philox(0))
    drawn: NDArray[np.float64] = numbers[rng.integers(len(numbers), size=(_DRAWS, len(numbers)))]
    return drawn
