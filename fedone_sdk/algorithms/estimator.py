"""The variance-reduced policy gradient that GS-BDPL and BDPL share."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .method import Candidates


def variance_reduced_gradient(
    losses: NDArray[np.float64], scores: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return 1/(I-1) sum_r (l_r - mean l) score_r, the estimator of FedOne, eq. 6.

    The mean is a baseline. For independently drawn prompts the estimate is unbiased, and it does
    not change when a constant is added to all losses (an easy or hard mini-batch).

    Args:
        losses: Shape (I,).
        scores: The gradient of each prompt's log-probability, shape (I, n, N).
    """
    centred = _centred(losses)
    gradient: NDArray[np.float64] = np.tensordot(centred, scores, axes=1) / (len(losses) - 1)
    return gradient


def drawn_advantage(candidates: Candidates, losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1/(I-1) sum_r (l_r - mean l) [prompt r has token j at position i], shape (n, N).

    All score functions here have the form `other_ij + (drawn_ij - other_ij) [token drawn]`. The
    centred losses sum to zero, so `other` cancels and `variance_reduced_gradient` equals
    `(drawn - other) * drawn_advantage`. This needs no (I, n, N) array. Tokens that no prompt drew
    get exactly 0, where AdamW would amplify rounding noise. All operations are correctly rounded
    and in a fixed order, so a phone and a server compute the same bits.
    """
    advantage = np.zeros_like(candidates.probabilities)
    positions = np.arange(len(advantage))
    for prompt, centred in zip(candidates.prompts, _centred(losses), strict=True):
        advantage[positions, prompt] += centred
    return advantage / (len(losses) - 1)


def _centred(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    return losses - math.fsum(losses) / len(losses)
