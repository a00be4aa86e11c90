"""Mean losses of single candidates, from the losses that a search remembers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .state import Memory


class Standings(NamedTuple):
    """Mean losses of the candidates of one position.

    Attributes:
        examples: Example calls per candidate, float64, shape (N_i,); 0 for a candidate that was
            not evaluated.
        losses: Mean loss at the candidate's best label bias, with equal class weights; shape
            (N_i,), NaN for a candidate that was not evaluated.
        by_class: The same of each class alone, shape (N_i, C).
    """

    examples: NDArray[np.float64]
    losses: NDArray[np.float64]
    by_class: NDArray[np.float64]


def standings(memory: Memory, position: int, size: int) -> Standings:
    """Return the standings of one position's candidates, over all other positions.

    Args:
        memory: The memory of a method that keeps a pool of prompts.
        position: Which position.
        size: Its candidates, N_i.
    """
    if not memory:
        return Standings(np.zeros(size), np.full(size, np.nan), np.full((size, 1), np.nan))
    candidate = memory["prompts"][memory["rows"], position]
    examples = memory["examples"][memory["batches"]].astype(np.float64)
    means = memory["means"].astype(np.float64)
    counts = np.zeros((size, means.shape[1]))
    sums = np.zeros((size, *means.shape[1:]))
    np.add.at(counts, candidate, examples)
    np.add.at(sums, candidate, examples[:, :, None] * means)
    met = counts > 0.0
    curves = sums / np.where(met, counts, 1.0)[:, :, None]
    tried = met.any(axis=1)
    mixed = curves.sum(axis=1) / np.maximum(met.sum(axis=1), 1)[:, None]
    at_best = mixed.argmin(axis=1)
    rows = np.arange(size)
    return Standings(
        examples=counts.sum(axis=1),
        losses=np.where(tried, mixed[rows, at_best], np.nan),
        by_class=np.where(met, curves[rows, :, at_best], np.nan),
    )
