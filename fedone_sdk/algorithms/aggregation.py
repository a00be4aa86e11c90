"""Aggregation of client alphas: FedAvg, and two aggregates robust to Byzantine clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import _checks


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


def trimmed_mean(alphas: Sequence[NDArray[np.float32]], trim: float) -> NDArray[np.float32]:
    """Return the mean of each entry, without its largest and smallest values.

    Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
    2018. Clients have equal weights, because a client's example count is unverified.

    Args:
        alphas: One matrix per client, of equal shapes, finite, in any order.
        trim: Share of the clients left out at each end, in [0, 0.5); rounded up. At least one
            value is kept.

    Returns:
        Float32; a single client's alpha comes back bit for bit.
    """
    if _checks.fraction("trim", trim) >= 0.5:
        raise ValueError(f"trim must lie in [0, 0.5), not {trim!r}")
    stacked = np.sort(np.stack(_checked(alphas)).astype(np.float64), axis=0)
    count = len(stacked)
    # Rounded first: in floating point, 0.07 * 100 is slightly more than 7.
    cut = min(math.ceil(round(trim * count, 9)), (count - 1) // 2)
    mean: NDArray[np.float32] = stacked[cut : count - cut].mean(axis=0).astype(np.float32)
    return mean


def median(alphas: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the median of each entry (Yin et al. 2018), the midpoint for an even number.

    An entry that fewer than half of the clients moved does not change. With randomly drawn prompts,
    most entries are unchanged as long as there are fewer prompts than tokens.

    Args:
        alphas: One matrix per client, of equal shapes, finite, in any order.

    Returns:
        Float32; a single client's alpha comes back bit for bit.
    """
    middle: NDArray[np.float32] = np.median(
        np.stack(_checked(alphas)).astype(np.float64), axis=0
    ).astype(np.float32)
    return middle


def _checked(alphas: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    if not alphas:
        raise ValueError("no alphas to aggregate")
    stacked = [np.asarray(alpha, dtype=np.float32) for alpha in alphas]
    if len({alpha.shape for alpha in stacked}) != 1:
        raise ValueError(f"alphas differ in shape: {sorted({a.shape for a in stacked})}")
    if not all(np.isfinite(alpha).all() for alpha in stacked):
        raise ValueError("alphas must be finite")
    return stacked
