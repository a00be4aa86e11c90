"""Euclidean projections on the probability simplex."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

# A float32 entry has a relative rounding error of at most 2**-24; a sum of 1, at most 6e-8.
_ROUNDING = 1e-6


def project_to_simplex(rows: ArrayLike, *, floor: float = 0.0) -> NDArray[np.float64]:
    """Return the nearest rows that sum to 1 with every entry at least `floor`.

    Sort-based and exact (Duchi et al. 2008, figure 1): the projection subtracts one threshold
    from a row and clips at zero. Rows that sum below 1 are raised the same way. A floor shifts
    the simplex and reduces its mass to 1 - N floor.

    Args:
        rows: Shape (..., N), finite.
        floor: In [0, 1/N).
    """
    values = np.asarray(rows, dtype=np.float64)
    if values.ndim == 0 or values.shape[-1] == 0 or not np.isfinite(values).all():
        raise ValueError("rows must be finite vectors of at least one entry")
    size = values.shape[-1]
    if not 0.0 <= floor < 1.0 / size:
        raise ValueError(f"floor must lie in [0, 1/{size}), not {floor!r}")
    mass = 1.0 - size * floor
    # A constant added to a row does not change its projection; this one keeps the sums small.
    values = values - values.max(axis=-1, keepdims=True)
    descending = np.flip(np.sort(values, axis=-1), axis=-1)
    excess = np.cumsum(descending, axis=-1) - mass
    support = np.count_nonzero(descending * np.arange(1, size + 1) > excess, axis=-1, keepdims=True)
    threshold = np.take_along_axis(excess, support - 1, axis=-1) / support
    projected: NDArray[np.float64] = np.maximum(values - threshold, 0.0) + floor
    return projected


def nearest_probabilities(
    alpha: NDArray[np.float64], *, floor: float, mask: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Return `alpha` projected in float32; a feasible one is returned bit for bit.

    Float32 rows sum to 1 only up to rounding. A second projection would change their last bits and
    with them `alpha_sha256`.

    Args:
        alpha: Shape (n, N).
        floor: The least probability of a candidate.
        mask: Which candidates exist, shape (n, N); the others have probability 0. All by
            default.
    """
    if mask is None or mask.all():
        if alpha.min() < floor or np.abs(alpha.sum(axis=1) - 1.0).max() > _ROUNDING:
            alpha = project_to_simplex(alpha, floor=floor)
        return alpha.astype(np.float32)
    kept = not alpha[~mask].any() and alpha[mask].min() >= floor
    kept = kept and np.abs(alpha.sum(axis=1) - 1.0).max() <= _ROUNDING
    return _masked(alpha, mask, lambda row: row if kept else project_to_simplex(row, floor=floor))


def _masked(
    alpha: NDArray[np.float64],
    mask: NDArray[np.bool_],
    project: Callable[[NDArray[np.float64]], NDArray[np.floating]],
) -> NDArray[np.float32]:
    """Project each row over the candidates that exist; the rest is 0."""
    result = np.zeros(alpha.shape, dtype=np.float32)
    for row, exists, values in zip(result, mask, alpha, strict=True):
        row[exists] = project(values[None, exists])[0]
    return result
