"""What releases of noised numbers give away.

The accountant is dp-accounting's. A Gaussian's privacy loss adds up: releases with the noise
multipliers s_1 ... s_k over the same data are exactly one mechanism whose multiplier s has
``1 / s**2 = sum(1 / s_i**2)``, and the library has the exact curve of one (Balle and Wang, 2018).
"""

from __future__ import annotations

import math

from fedone_sdk.errors import needs_extra

__all__ = ["GaussianAccountant"]


class GaussianAccountant:
    """Epsilon of Gaussian noise at one delta."""

    def __init__(self, delta: float) -> None:
        with needs_extra("differential privacy", "privacy"):
            from dp_accounting import get_epsilon_gaussian
            from numpy import errstate
        self._epsilon = get_epsilon_gaussian
        self._errstate = errstate
        self.delta = delta

    def epsilon(self, precision: float) -> float:
        """Epsilon of all releases together."""
        if precision < 0:
            raise ValueError(f"precision must be at least 0, not {precision}")
        if precision == 0:
            return 0.0
        with self._errstate(divide="ignore"):  # It takes the logarithm of a delta of 0.
            return float(self._epsilon(1.0 / math.sqrt(precision), self.delta))
