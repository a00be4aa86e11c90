"""Epsilon of releases with Gaussian noise.

Releases with noise multipliers s_1 ... s_k over the same data are exactly one Gaussian mechanism
whose multiplier s has ``1 / s**2 = sum(1 / s_i**2)``. dp-accounting computes the exact epsilon of
one Gaussian mechanism (Balle and Wang, 2018).

A device draws discrete Gaussian noise, with a standard deviation sigma of at least 1e8 grid steps.
The probability of k steps is the probability of k under a rounded Gaussian, times a factor between
``exp(-k**2 / (24 * sigma**4))`` and ``exp(1 / (24 * sigma**2))``. A rounded Gaussian reveals at
most as much as a Gaussian. Within 40 sigma of 0 the factor differs from 1 by at most 7e-15, and
values beyond have probability ``exp(-800)``. `_MARGIN` covers both for 1e8 released numbers.
"""

from __future__ import annotations

import math

from fedone_sdk.errors import needs_extra

__all__ = ["GaussianAccountant"]

_MARGIN = 1e-6


class GaussianAccountant:
    """Epsilon of discrete Gaussian noise on a fine grid, at one delta."""

    def __init__(self, delta: float) -> None:
        with needs_extra("differential privacy", "privacy"):
            from dp_accounting import get_epsilon_gaussian
            from numpy import errstate
        self._epsilon = get_epsilon_gaussian
        self._errstate = errstate
        self.delta = delta

    def epsilon(self, precision: float) -> float:
        """Return epsilon of releases with this precision, ``sum(1 / s_i**2)``."""
        if precision < 0:
            raise ValueError(f"precision must be at least 0, not {precision}")
        if precision == 0:
            return 0.0
        with self._errstate(divide="ignore"):  # The library takes the logarithm of 0.
            delta = self.delta * (1.0 - _MARGIN)
            return float(self._epsilon(1.0 / math.sqrt(precision), delta)) + _MARGIN
