"""How alike prompts are: the covariance of their values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .space import Space

__all__ = ["Features", "Kernel"]


# No slots: the columns are kept with the space.
@dataclass(frozen=True)
class Features:
    """The candidates that prompts have in common, wherever they stand in a slot.

    A feature is one candidate of one slot; a prompt has it or not. The blank of a repeated slot is
    no feature: prompts are not alike by what neither has. Where a slot has a single position,
    leaving it out is a choice like another.

    Attributes:
        space: What prompts are made of.
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
        """Return which features prompts have, 0 or 1, shape (P, F)."""
        present = np.zeros((len(prompts), self.count + 1), dtype=np.float32)
        found = self.columns[np.arange(self.space.prompt_len), prompts]
        np.put_along_axis(present, found, 1.0, axis=1)  # -1 is the column beyond
        return present[:, :-1]


class Kernel(NamedTuple):
    """The prior covariance of prompts' values, in any unit.

    A value is a sum of independent normal parts: one of each feature, one of each pair of features
    and one of the whole prompt. Prompts that share m of n features have the covariance

        additive m / n + pairs m (m - 1) / (n (n - 1)) + same [equal prompts].

    Attributes:
        additive: Variance of the first part of a prompt of n features.
        pairs: Variance of the second.
        same: Variance of the third.
    """

    additive: float
    pairs: float
    same: float

    def weights(self, prompt_len: int) -> tuple[float, float]:
        """Return the variances of one feature's part and of one pair's."""
        pairs = prompt_len * (prompt_len - 1) / 2.0
        return self.additive / prompt_len, self.pairs / max(pairs, 1.0)

    def matrix(self, shared: NDArray[np.float32], prompt_len: int) -> NDArray[np.float64]:
        """Return the covariances of distinct prompts, shape (P, P).

        Args:
            shared: How many features they share, shape (P, P).
            prompt_len: n.
        """
        one, pair = self.weights(prompt_len)
        both = shared.astype(np.float64)
        matrix = both * (one + 0.5 * pair * (both - 1.0))
        matrix[np.diag_indices(len(matrix))] += self.same
        return matrix
