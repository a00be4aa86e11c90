"""Draws of prompts from per-position categoricals, and the argmax prompt of a matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .streams import stream, stream_seed


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the categoricals of rows of logits, shape (n, N)."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return result


def draw_prompts(
    probabilities: NDArray[np.float64], num_samples: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw prompts with independent positions, j_i ~ Cat(p_i), by the inverse CDF.

    Args:
        probabilities: Shape (n, N); rows need not sum exactly to 1.
        num_samples: How many prompts, I.
        rng: The source of I * n uniforms.

    Returns:
        Token indices, shape (I, n).
    """
    cumulative = np.cumsum(probabilities, axis=1)
    # Rounding may leave the last sum below a uniform. Divided by itself it is exactly 1, which is
    # above all uniforms, and a token of probability 0 is never drawn.
    cumulative /= cumulative[:, -1:]
    uniforms = rng.random((num_samples, len(cumulative)))
    indices = np.empty(uniforms.shape, dtype=np.int64)
    for position, row in enumerate(cumulative):
        indices[:, position] = np.searchsorted(row, uniforms[:, position], side="right")
    return indices


def argmax_prompt(alpha: NDArray[np.float32], seed: int) -> NDArray[np.int64]:
    """Return the likeliest token of each position, shape (n,).

    Exact ties are broken by a draw fixed by `seed`: the untrained, uniform matrix gives one random
    prompt rather than n copies of token 0.
    """
    priority = stream(stream_seed(seed, "ties", 0)).random(alpha.shape)
    tied = alpha == alpha.max(axis=1, keepdims=True)
    prompt: NDArray[np.int64] = np.where(tied, priority, -1.0).argmax(axis=1).astype(np.int64)
    return prompt
