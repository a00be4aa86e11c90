"""The epsilon of differential privacy for numbers that a device sends with Gaussian noise.

Several messages about the same data, with noise multipliers s_1, s_2, ..., are together one
Gaussian mechanism. Its multiplier s follows from ``1 / s**2 = sum(1 / s_i**2)``. The library
dp-accounting computes the exact epsilon of this mechanism (Balle and Wang, 2018).

A device's noise is discrete Gaussian: a whole number k of small steps, with a standard deviation
sigma of at least 1e8 steps. A Gaussian that is rounded to whole steps reveals no more than a
Gaussian. The discrete Gaussian's probability of k is that of the rounded Gaussian, times a factor
between ``exp(-k**2 / (24 * sigma**4))`` and ``exp(1 / (24 * sigma**2))``. Within 40 sigma of 0 the
factor differs from 1 by at most 7e-15. All values outside have a total probability below
``exp(-800)``. `_MARGIN` covers both errors for 1e8 numbers.
"""

from __future__ import annotations

import math

from fedone_sdk.errors import needs_extra

__all__ = ["GaussianAccountant"]

_MARGIN = 1e-6


class GaussianAccountant:
    """Computes the epsilon of messages with discrete Gaussian noise, for a given delta."""

    def __init__(self, delta: float) -> None:
        with needs_extra("differential privacy", "privacy"):
            from dp_accounting import get_epsilon_gaussian
            from numpy import errstate
        self._epsilon = get_epsilon_gaussian
        self._errstate = errstate
        self.delta = delta

    def epsilon(self, precision: float) -> float:
        """Return the epsilon of messages whose ``sum(1 / s_i**2)`` is `precision`."""
        if precision < 0:
            raise ValueError(f"precision must be at least 0, not {precision}")
        if precision == 0:
            return 0.0
        with self._errstate(divide="ignore"):  # The library takes the logarithm of 0.
            delta = self.delta * (1.0 - _MARGIN)
            return float(self._epsilon(1.0 / math.sqrt(precision), delta)) + _MARGIN
