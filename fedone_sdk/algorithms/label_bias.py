"""Label biases: numbers (nats) that are added to the log-probabilities of the labels.

A client scores a prompt on some examples with a bias b0. It reports the mean loss l, the mean label
probabilities p, and the trace h of the loss's Hessian with respect to the bias. The shares of the
true labels are t. The loss with another bias b0 + d is then approximated by

    l - t.d + s log sum_k p_k e^(d_k / s),    s = (1 - sum_k p_k^2) / h.

At d = 0 the approximation has the reported loss, gradient (p - t) and trace. It is convex, and
exact for one example, where s is 1. `lowest` finds the bias that minimises it.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .method_state import Floats, Ints

PRIOR_STD = 3.0
"""Prior standard deviation of a label's bias, nats."""

UNKNOWN_TRACE = 1.0
"""Value of h that clients report if they add noise for privacy; a real trace is below 1."""

_LARGEST = 50.0
"""Bound on the absolute value of a fitted bias, nats."""

_MOST_SPREAD = 10.0
"""Upper bound of s; for examples whose log-odds differ much, s would be very large."""

_LEAST = 1e-30
_STEPS = 100


class Expansions(NamedTuple):
    """The approximated losses of the module's docstring, as functions of the bias of C labels.

    Attributes:
        losses: l, nats, shape (...).
        probabilities: p, shape (..., C), at least 0, sum 1.
        gradients: p - t, with p as reported (noise may make it negative); shape (..., C), sum 0.
        spreads: s, shape (...), at least 1.
        biases: b0, shape (..., C).
    """

    losses: Floats
    probabilities: Floats
    gradients: Floats
    spreads: Floats
    biases: Floats

    @classmethod
    def of(cls, means: NDArray[np.floating], targets: Floats, biases: NDArray[np.floating]) -> Self:
        """Return the functions that are defined by the numbers from clients.

        Args:
            means: l, h and p of some examples, shape (..., 2 + C).
            targets: t, shape (..., C).
            biases: b0, broadcast to (..., C).
        """
        numbers = means.astype(np.float64)
        gradients = numbers[..., 2:] - targets
        # Probabilities with noise are used only for the gradient; elsewhere p_k is 1 / C.
        noised = numbers[..., 1:2] >= UNKNOWN_TRACE
        probabilities = np.where(noised, 1.0 / targets.shape[-1], on_simplex(numbers[..., 2:]))
        return cls(
            losses=numbers[..., 0],
            probabilities=probabilities,
            gradients=gradients - gradients.mean(axis=-1, keepdims=True),
            spreads=_spreads(probabilities, numbers[..., 1]),
            biases=np.broadcast_to(biases, probabilities.shape).astype(np.float64),
        )

    def at(self, biases: Floats) -> Self:
        """Return the same functions, expressed at other biases b0, broadcast to (..., C)."""
        shift = biases - self.biases
        scaled = np.log(np.maximum(self.probabilities, _LEAST)) + shift / self.spreads[..., None]
        total = np.logaddexp.reduce(scaled, axis=-1)
        probabilities = np.exp(scaled - total[..., None])
        linear = ((self.gradients - self.probabilities) * shift).sum(axis=-1)
        return self._replace(
            losses=self.losses + linear + self.spreads * total,
            probabilities=probabilities,
            gradients=self.gradients + probabilities - self.probabilities,
            biases=np.broadcast_to(biases, self.biases.shape),
        )

    @property
    def traces(self) -> Floats:
        """The traces h, shape (...)."""
        return _impurity(self.probabilities) / self.spreads


def on_simplex(values: Floats) -> Floats:
    """Return numbers (..., C) as probabilities: clipped at 0 and divided by their sum."""
    positive = np.maximum(values, _LEAST)
    return positive / positive.sum(axis=-1, keepdims=True)


def expanded(gradients: Floats, targets: Floats, traces: Floats, biases: Floats) -> Expansions:
    """Return functions with the given gradients, label shares t and traces h, and with l = 0."""
    probabilities = on_simplex(gradients + targets)
    spreads = _spreads(probabilities, traces)
    about = np.broadcast_to(biases, gradients.shape)
    return Expansions(np.zeros_like(traces), probabilities, gradients, spreads, about)


def _impurity(probabilities: Floats) -> Floats:
    return 1.0 - (probabilities**2).sum(axis=-1)


def _spreads(probabilities: Floats, traces: Floats) -> Floats:
    spreads = np.maximum(_impurity(probabilities), 0.0) / np.maximum(traces, _LEAST)
    return np.clip(spreads, 1.0, _MOST_SPREAD)


def lowest(parts: Expansions, weights: Floats, ridge: Floats) -> Floats:
    """Return the biases that minimise weighted means of losses.

    Newton's method with bounded steps minimises, for each row,

        sum_i w_i loss_i(b0 + d) + ridge |d|^2 / 2.

    Args:
        parts: The losses, shape (P, T); all losses of a row have the same b0.
        weights: w, shape (P, T), sum 1.
        ridge: Shape (P,); positive.

    Returns:
        b0 + d, shape (P, C), 0 for the first label.
    """
    size = parts.probabilities.shape[-1]
    log_probs = np.log(np.maximum(parts.probabilities, _LEAST))
    wanted = np.einsum("pt,ptc->pc", weights, parts.probabilities - parts.gradients)
    # Noise may make entries of `wanted` negative; the loss would then have no minimum.
    off = (wanted < 0.0).any(axis=1, keepdims=True)
    wanted = np.where(off, on_simplex(np.maximum(wanted, ridge[:, None])), wanted)
    shift = np.zeros_like(wanted)
    diagonal = np.arange(size)
    for _ in range(_STEPS):
        scaled = log_probs + shift[:, None] / parts.spreads[..., None]
        odds = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        probabilities = odds / odds.sum(axis=-1, keepdims=True)
        gradient = np.einsum("pt,ptc->pc", weights, probabilities) - wanted
        gradient += ridge[:, None] * shift
        bent = (weights / parts.spreads)[..., None] * probabilities
        hessian = -bent.transpose(0, 2, 1) @ probabilities
        hessian[:, diagonal, diagonal] += bent.sum(axis=1) + ridge[:, None]
        step = np.clip(np.linalg.solve(hessian, gradient[..., None])[..., 0], -1.0, 1.0)
        before, shift = shift, np.clip(shift - step, -_LARGEST, _LARGEST)
        if np.abs(shift - before).max() < 1e-9:
            break
    best = parts.biases[:, 0] + shift
    return np.clip(best - best[:, :1], -_LARGEST, _LARGEST)


def fitted_bias(log_probs: Floats, targets: Ints, weights: Floats | None = None) -> Floats:
    """Return the label bias that minimises the cross-entropy, with a normal prior (`PRIOR_STD`).

    Args:
        log_probs: Log-probabilities of C labels for R rows, shape (R, C), nats.
        targets: Indices of the true labels, shape (R,).
        weights: Weight of each row, shape (R,); None weighs all equally.

    Returns:
        Shape (C,), nats; 0 for the first label.
    """
    total = np.logaddexp.reduce(log_probs, axis=1, keepdims=True)
    probabilities = np.exp(log_probs - total)
    rows = Expansions(
        losses=np.zeros(len(targets)),
        probabilities=probabilities,
        gradients=probabilities - np.eye(log_probs.shape[1])[targets],
        spreads=np.ones(len(targets)),
        biases=np.zeros_like(probabilities),
    )
    parts = np.ones(len(targets)) if weights is None else weights
    ridge = np.array([1.0 / (PRIOR_STD**2 * parts.sum())])
    expansions = Expansions(*(each[None] for each in rows))
    return lowest(expansions, (parts / parts.sum())[None], ridge)[0]
