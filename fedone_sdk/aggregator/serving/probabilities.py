"""Readable form of alpha: the most probable tokens per position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.messages import PositionProbabilities, TokenProbability
from fedone_sdk.vocabulary import Vocabulary


def likeliest(
    alpha: NDArray[np.float32], vocabulary: Vocabulary, top: int
) -> tuple[PositionProbabilities, ...]:
    """Return the most probable tokens of every position.

    Args:
        alpha: Shape (n, N), 0 for candidates that a position does not have. Normalised rows are the
            token probabilities; for Gumbel-Softmax, their limit at temperature 0.
        vocabulary: The candidates.
        top: Number of tokens per position.
    """
    weights = alpha.astype(np.float64)
    shares = weights / weights.sum(axis=1, keepdims=True)
    # Candidates with probability 0 contribute nothing to the entropy.
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropies = -(shares * logs).sum(axis=1)
    order = np.argsort(-shares, axis=1, kind="stable")[:, :top]
    positions = []
    for position, (entropy, row, known) in enumerate(zip(entropies, order, shares, strict=True)):
        candidates = vocabulary.of_position(position)
        positions.append(
            PositionProbabilities(
                entropy=abs(round(float(entropy), 6)),
                tokens=tuple(
                    TokenProbability(
                        token=candidates[index], probability=round(float(known[index]), 6)
                    )
                    for index in row.tolist()
                    if index < len(candidates)
                ),
            )
        )
    return tuple(positions)
