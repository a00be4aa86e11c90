"""The label bias that needs no prompt: fitted on labelled rows of the clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import stream_seed
from fedone_sdk.data import draw_minibatch
from fedone_sdk.simulation import Federation
from fedone_sdk.task import Example

__all__ = ["fitted_bias", "pooled_rows"]

_LARGEST = 20.0
"""No fitted bias is larger, nats: where a class is absent, the likelihood has no maximum."""


def pooled_rows(federation: Federation, count: int | None = None) -> list[Example]:
    """Rows of all clients together, in an order that the run's seed draws.

    Args:
        federation: Whose clients.
        count: How many at most; None is all.
    """
    held = [row for shard in federation.shards for row in shard]
    wanted = len(held) if count is None else count
    drawn = draw_minibatch(len(held), wanted, stream_seed(federation.spec.seed, "pooled-rows", 0))
    return [held[index] for index in drawn]


def fitted_bias(
    log_probs: NDArray[np.float64],
    targets: NDArray[np.int64],
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """The label bias of the least cross-entropy: a regression with nothing but intercepts.

    Newton's method; the loss is convex. The first label's bias is 0.

    Args:
        log_probs: Shape (R, C), nats.
        targets: Indices of the true labels, shape (R,).
        weights: How much each row counts, shape (R,); None is all alike.
    """
    num_labels = log_probs.shape[1]
    parts = np.ones(len(targets)) if weights is None else weights
    parts = parts / parts.sum()
    share = np.bincount(targets, parts, minlength=num_labels)
    bias = np.zeros(num_labels)
    for _ in range(100):
        shifted = log_probs + bias
        shifted = shifted - shifted.max(axis=1, keepdims=True)
        odds = np.exp(shifted)
        probabilities = odds / odds.sum(axis=1, keepdims=True)
        mean = parts @ probabilities
        gradient = (mean - share)[1:]
        hessian = np.diag(mean) - probabilities.T @ (parts[:, None] * probabilities)
        # The ridge keeps a step finite where all probabilities are 0 or 1.
        step = np.linalg.solve(hessian[1:, 1:] + 1e-9 * np.eye(num_labels - 1), gradient)
        step = np.clip(step, -1.0, 1.0)
        before, bias[1:] = bias[1:].copy(), np.clip(bias[1:] - step, -_LARGEST, _LARGEST)
        if np.abs(bias[1:] - before).max() < 1e-9:
            break
    return bias
