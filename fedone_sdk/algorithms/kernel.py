"""The similarity of prompts: the prior covariance of their values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .space import Space


# No slots: cached_property needs a __dict__.
@dataclass(frozen=True)
class Features:
    """Features that prompts share, independent of the position within a slot.

    A feature is one candidate of one slot; a prompt has it or not. The blank of a repeated slot is
    no feature, because a missing candidate does not make prompts similar. In a slot of one position
    the blank is a candidate like any other.

    Attributes:
        space: The space of prompts.
    """

    space: Space

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        """The feature of each candidate of each position, -1 for none; shape (n, N)."""
        columns = np.full(self.space.shape, -1, dtype=np.int64)
        first = 0
        for positions in self.space.groups():
            size, blank = self.space.sizes[positions[0]], self.space.blanks[positions[0]]
            own = np.arange(first, first + size)
            first += size
            if len(positions) > 1 and blank is not None:
                own[blank] = -1
            columns[list(positions), :size] = own
        return columns

    @cached_property
    def count(self) -> int:
        """Features, F."""
        return sum(self.space.sizes[positions[0]] for positions in self.space.groups())

    def present(self, prompts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the features of each prompt, 0 or 1, shape (P, F)."""
        present = np.zeros((len(prompts), self.count + 1), dtype=np.float32)
        found = self.columns[np.arange(self.space.prompt_len), prompts]
        np.put_along_axis(present, found, 1.0, axis=1)  # -1 is the extra last column
        return present[:, :-1]


class Kernel(NamedTuple):
    """The prior covariance of prompts' values, in arbitrary units.

    A value is a sum of independent normal parts: one per feature, one per pair of features and one
    for the whole prompt. Feature effects have a common random mean; for example, most words do
    harm. Prompts of a and b features that share m of them have the covariance

        additive (m / L + a b / L^2) + pairs m (m - 1) / (L (L - 1)) + same [equal prompts].

    If all prompts have the same number of features, the mean is part of the intercepts.

    Attributes:
        additive: Variance of the first part of a prompt of L features.
        pairs: Variance of the second.
        same: Variance of the third.
        length: L, the number of features of a typical prompt, at least 2.
    """

    additive: float
    pairs: float
    same: float
    length: float

    @property
    def one(self) -> float:
        """The variance of one feature's effect about the common mean."""
        return self.additive / self.length

    @property
    def common(self) -> float:
        """The variance of the common mean."""
        return self.additive / self.length**2

    @property
    def pair(self) -> float:
        """The variance of one pair's effect."""
        return 2.0 * self.pairs / (self.length * (self.length - 1.0))

    def matrix(self, present: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the covariance matrix of distinct prompts, shape (P, P).

        Args:
            present: Features of each prompt, 0 or 1, shape (P, F).
        """
        both = (present @ present.T).astype(np.float64)
        counts = np.diagonal(both)
        matrix = both * (self.one + 0.5 * self.pair * (both - 1.0))
        matrix += self.common * counts[:, None] * counts
        matrix[np.diag_indices(len(matrix))] += self.same
        return matrix


def typical_length(present: NDArray[np.float32]) -> float:
    """Return the mean number of features per prompt, at least 2; `present` has shape (P, F)."""
    return max(2.0, float(present.sum(axis=1).mean()))
