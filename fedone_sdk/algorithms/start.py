"""The warm start of a search: a known prompt, or the result of an earlier run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Start = Sequence[Sequence[tuple[int, float]]]
"""For each position, tokens and their share of the probability."""


def warm_start(
    shape: tuple[int, int], start: Start | None, mask: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return initial probabilities with the given shares, shape (n, N).

    The rest of a position's probability is uniform over all tokens.

    Args:
        shape: Positions and tokens, (n, N).
        start: Shares of each position; None for none.
        mask: Which candidates exist, shape (n, N); all by default.

    Raises:
        ValueError: The positions, tokens or shares of `start` are invalid.
    """
    rows, _ = shape
    mask = np.ones(shape, dtype=bool) if mask is None else mask
    uniform: NDArray[np.float64] = mask / mask.sum(axis=1, keepdims=True)
    if start is None:
        return uniform
    if len(start) != rows:
        raise ValueError(f"start must have {rows} positions, not {len(start)}")
    shares = np.zeros(shape)
    for row, known, size in zip(shares, start, mask.sum(axis=1).tolist(), strict=True):
        for token, share in known:
            if not 0 <= token < size:
                raise ValueError(f"start: tokens must lie in [0, {size}), not {token}")
            if not (math.isfinite(share) and 0.0 < share <= 1.0):
                raise ValueError(f"start: a share must lie in (0, 1], not {share!r}")
            row[token] += share
    left = 1.0 - shares.sum(axis=1, keepdims=True)
    if left.min() < -1e-6:
        raise ValueError("start: the shares of a position must sum to at most 1")
    probabilities: NDArray[np.float64] = shares + np.maximum(left, 0.0) * uniform
    return probabilities


def is_warm_started(alpha: NDArray[np.float32]) -> bool:
    """Whether an untrained alpha has a warm start."""
    there = np.where(alpha > 0.0, alpha, np.nan)
    return bool((np.nanmax(there, axis=1) > np.nanmin(there, axis=1)).any())
