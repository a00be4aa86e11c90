"""Aggregation of client alphas: FedAvg."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def aggregate(
    alphas: Sequence[NDArray[np.float32]], weights: Sequence[float] | None = None
) -> NDArray[np.float32]:
    """Return the mean of the clients' alphas, computed in float64 (FedOne, Algorithm 1, line 11).

    The last bit of a sum depends on the order: pass clients by enrolment index.

    Args:
        alphas: One matrix per client, of equal shapes, finite.
        weights: Examples held by each client; None weighs all equally, as Algorithm 1 does.

    Returns:
        Float32; a single client's alpha comes back bit for bit.
    """
    stacked = _checked(alphas)
    shares = np.array([1.0] * len(stacked) if weights is None else weights, dtype=np.float64)
    if shares.shape != (len(stacked),):
        raise ValueError(f"{len(stacked)} alphas need as many weights, not {shares.size}")
    if not np.isfinite(shares).all() or shares.min() < 0.0 or shares.sum() <= 0.0:
        raise ValueError("weights must be finite, at least 0 and not all 0")
    if len(stacked) == 1:
        return stacked[0].copy()
    total = np.zeros(stacked[0].shape)
    for alpha, share in zip(stacked, shares, strict=True):
        total += share * alpha.astype(np.float64)
    mean: NDArray[np.float32] = (total / shares.sum()).astype(np.float32)
    return mean


def _checked(alphas: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    if not alphas:
        raise ValueError("no alphas to aggregate")
    stacked = [np.asarray(alpha, dtype=np.float32) for alpha in alphas]
    if len({alpha.shape for alpha in stacked}) != 1:
        raise ValueError(f"alphas differ in shape: {sorted({a.shape for a in stacked})}")
    if not all(np.isfinite(alpha).all() for alpha in stacked):
        raise ValueError("alphas must be finite")
    return stacked
