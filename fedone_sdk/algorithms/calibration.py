"""The best label bias: read off losses on a grid of biases, or fitted to log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["BiasGrid", "fitted_bias"]

_PRIOR_SD = 10.0
"""Of a bias, nats: it keeps the fit finite where a class is missing or told apart without errors,
and is as good as none elsewhere."""

_STEPS, _SETTLED = 100, 1e-9
_HALVINGS = 40


class BiasGrid:
    """A regular grid of label biases.

    Args:
        biases: G of them, C numbers each, 0 for the first class: every combination of the same
            evenly spaced numbers for the others, the last class's running fastest.

    Attributes:
        biases: Shape (G, C).

    Raises:
        ValueError: They are no such grid.
    """

    def __init__(self, biases: Sequence[Sequence[float]]) -> None:
        self.biases = np.array(biases, dtype=np.float64)
        if self.biases.ndim != 2 or self.biases.shape[1] < 2:
            raise ValueError("biases must be rows of one number per class, two classes or more")
        axes = self.biases.shape[1] - 1
        offsets = np.unique(self.biases[:, -1])
        grid = np.stack(np.meshgrid(*[offsets] * axes, indexing="ij"), axis=-1).reshape(-1, axes)
        whole = np.pad(grid, ((0, 0), (1, 0)))
        steps = np.diff(offsets)
        if (
            len(offsets) < 3
            or whole.shape != self.biases.shape
            or not np.array_equal(whole, self.biases)
            or not np.allclose(steps, steps[0])
        ):
            raise ValueError("biases must be a regular grid, 0 for the first class")
        self._step = float(steps[0])
        self._shape = (len(offsets),) * axes

    def lowest(self, curves: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the least value of each curve between the grid's points, and the nearest point.

        Through the least point and its neighbours goes a paraboloid, as the loss is smooth and
        convex in the bias; at the grid's edge the point itself counts.

        Args:
            curves: Shape (P, G).

        Returns:
            Values, shape (P,), and rows of `biases`, shape (P,).
        """
        values, places, _ = self._fitted(curves)
        return values, places

    def best(self, curve: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bias where a curve, shape (G,), is least; shape (C,)."""
        bias: NDArray[np.float64] = self.bests(curve[None])[0]
        return bias

    def bests(self, curves: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the bias where each of some curves, shape (P, G), is least; shape (P, C)."""
        _, places, shifts = self._fitted(curves)
        biases: NDArray[np.float64] = self.biases[places].copy()
        biases[:, 1:] += shifts
        return biases

    def weights(self, biases: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how a smooth curve at some biases is a sum of the grid's values, shape (P, G).

        Through the three nearest points of each axis goes a parabola (Lagrange).

        Args:
            biases: Shape (P, C); 0 for the first class.
        """
        size = self._shape[0]
        lowest = self.biases[0, -1]
        result = np.ones((len(biases), 1))
        for axis in range(len(self._shape)):
            place = (biases[:, axis + 1] - lowest) / self._step
            middle = np.clip(np.rint(place), 1, size - 2)
            at = np.clip(place - middle, -1.0, 1.0)
            three = np.stack([at * (at - 1.0) / 2.0, 1.0 - at**2, at * (at + 1.0) / 2.0], axis=1)
            along = np.zeros((len(biases), size))
            columns = middle[:, None].astype(np.int64) + np.arange(-1, 2)
            np.put_along_axis(along, columns, three, axis=1)
            result = (result[:, :, None] * along[:, None, :]).reshape(len(biases), -1)
        return result

    def _fitted(
        self, curves: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """The least values, the nearest points, and how far beside them along each axis."""
        places = curves.argmin(axis=1)
        rows, axes = np.arange(len(curves)), len(self._shape)
        least = curves[rows, places]
        at = np.stack(np.unravel_index(places, self._shape), axis=1)
        size = self._shape[0]
        inside = (at > 0) & (at < size - 1)
        strides = np.where(inside, size ** np.arange(axes - 1, -1, -1), 0)

        def beside(
            axis: int, sign: int, other: int = 0, other_sign: int = 0
        ) -> NDArray[np.float64]:
            step = sign * strides[:, axis] + other_sign * strides[:, other]
            values: NDArray[np.float64] = curves[rows, places + step]
            return values

        slope = np.zeros((len(curves), axes))
        bend = np.zeros((len(curves), axes, axes))
        for one in range(axes):
            after, before = beside(one, 1), beside(one, -1)
            slope[:, one] = (after - before) / 2.0
            bend[:, one, one] = after + before - 2.0 * least
            for two in range(one):
                mixed = beside(one, 1, two, 1) + beside(one, -1, two, -1)
                mixed = mixed - beside(one, 1, two, -1) - beside(one, -1, two, 1)
                both = inside[:, one] & inside[:, two]
                bend[:, one, two] = bend[:, two, one] = np.where(both, mixed / 4.0, 0.0)
        # Axes at an edge, or without any bend, stay where they are.
        flat = np.diagonal(bend, axis1=1, axis2=2) <= 0.0
        slope[flat] = 0.0
        bend += np.where(flat, 1.0, 0.0)[:, :, None] * np.eye(axes)
        solved = np.linalg.solve(bend, slope[:, :, None])[:, :, 0]
        shifts: NDArray[np.float64] = -np.asarray(solved, dtype=np.float64)
        # The least point's neighbours are no lower: what a fit finds beyond half way is an error.
        shifts = np.clip(shifts, -0.5, 0.5)
        values: NDArray[np.float64] = least + 0.5 * (slope * shifts).sum(axis=1)
        return values, places, shifts * self._step


def fitted_bias(log_probs: NDArray[np.float64], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the bias under which the cross-entropy over the labels is least.

    That is the intercept of a multinomial logistic regression whose offsets are the
    log-probabilities; the loss is convex in it, and Newton's steps with halving find it.

    Args:
        log_probs: Label log-probabilities, shape (M, C), nats.
        targets: Index of each true label, shape (M,).

    Returns:
        Shape (C,), nats; the first label's is 0.
    """
    counts = np.bincount(targets, minlength=log_probs.shape[1]).astype(np.float64)

    def loss(bias: NDArray[np.float64]) -> float:
        total = np.logaddexp.reduce(log_probs + bias, axis=1).sum() - counts @ bias
        return float(total + 0.5 * (bias / _PRIOR_SD) @ (bias / _PRIOR_SD))

    bias = np.zeros(log_probs.shape[1])
    for _ in range(_STEPS):
        values = log_probs + bias
        shares = np.exp(values - np.logaddexp.reduce(values, axis=1, keepdims=True))
        slope = shares.sum(axis=0) - counts + bias / _PRIOR_SD**2
        bend = np.diag(shares.sum(axis=0) + 1.0 / _PRIOR_SD**2) - shares.T @ shares
        step = np.zeros_like(bias)
        step[1:] = np.linalg.solve(bend[1:, 1:], slope[1:])
        size, before = 1.0, loss(bias)
        for _ in range(_HALVINGS):
            if loss(bias - size * step) <= before:
                break
            size /= 2.0
        else:
            break
        bias = bias - size * step
        if np.abs(size * step).max() < _SETTLED:
            break
    return bias
