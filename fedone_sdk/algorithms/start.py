"""What a search begins with: a known prompt, or what an earlier run came to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Start", "begun", "is_begun"]

Start = Sequence[Sequence[tuple[int, float]]]
"""For each position, tokens and their shares of its probability."""


def begun(
    shape: tuple[int, int], start: Start | None, mask: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return probabilities that begin with known shares, shape (n, N).

    What a position's shares leave over goes to all tokens alike; without any it is uniform.

    Args:
        shape: Positions and tokens, (n, N).
        start: Of each position; None for none.
        mask: Which candidates there are, shape (n, N); all by default.

    Raises:
        ValueError: It has other positions or tokens, or shares that are none.
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


def is_begun(alpha: NDArray[np.float32]) -> bool:
    """Whether an alpha that nothing was learnt for yet began with something."""
    there = np.where(alpha > 0.0, alpha, np.nan)
    return bool((np.nanmax(there, axis=1) > np.nanmin(there, axis=1)).any())
