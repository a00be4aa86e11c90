"""The best label bias: the minimum of losses over a bias grid, or a fit to log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LARGEST = 20.0
"""Upper bound of a fitted bias, nats: if a class is absent, the likelihood has no maximum."""


class BiasGrid:
    """A regular grid of label biases.

    Args:
        biases: G rows of C numbers, the first 0. The other columns hold every combination of the
            same evenly spaced numbers; the last class varies fastest.

    Attributes:
        biases: Shape (G, C).

    Raises:
        ValueError: The biases are not such a grid.
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
        """Return the interpolated minimum of each curve, and the nearest grid point.

        The interpolation is a paraboloid through the least point and its neighbours, because the
        loss is smooth and convex in the bias. At the grid's edge it is the point itself.

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
        """Return the weights that interpolate a curve at some biases, shape (P, G).

        Interpolates with a parabola through the three nearest points of each axis (Lagrange).

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

    def possible(self, curves: NDArray[np.float64], *, rounding: float) -> bool:
        """Return whether losses by class and bias can come from log-probabilities.

        The slope of any loss of a task is in [-1, 0] along the bias of the true label and in [0, 1]
        along the others, and so is the slope of a mean over examples. Losses that a client mirrors,
        scales or makes up break this, because their prompts have different best biases.

        Args:
            curves: Mean losses of each class, shape (P, C, G).
            rounding: Tolerance as a fraction of a curve's largest loss, or of 1 if that is larger.
        """
        grids = curves.reshape(*curves.shape[:2], *self._shape)
        along = range(2, grids.ndim)
        tolerance = rounding * np.maximum(1.0, np.abs(grids).max(axis=(*along,), keepdims=True))
        for label, axis in enumerate(along, start=1):  # the first label has no axis
            rises = np.diff(grids, axis=axis)
            rises[:, label] *= -1.0
            if (rises < -tolerance).any() or (rises > self._step + tolerance).any():
                return False
        return True

    def _fitted(
        self, curves: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Return the least values, the nearest points, and the offset from them along each axis."""
        places = curves.argmin(axis=1)
        rows, axes = np.arange(len(curves)), len(self._shape)
        least = curves[rows, places]
        at = np.stack(np.unravel_index(places, self._shape), axis=1)
        size = self._shape[0]
        inside = (at > 0) & (at < size - 1)
        strides = np.where(inside, size ** np.arange(axes - 1, -1, -1), 0)

        def neighbour(
            axis: int, sign: int, other: int = 0, other_sign: int = 0
        ) -> NDArray[np.float64]:
            step = sign * strides[:, axis] + other_sign * strides[:, other]
            values: NDArray[np.float64] = curves[rows, places + step]
            return values

        slope = np.zeros((len(curves), axes))
        bend = np.zeros((len(curves), axes, axes))
        for one in range(axes):
            after, before = neighbour(one, 1), neighbour(one, -1)
            slope[:, one] = (after - before) / 2.0
            bend[:, one, one] = after + before - 2.0 * least
            for two in range(one):
                mixed = neighbour(one, 1, two, 1) + neighbour(one, -1, two, -1)
                mixed = mixed - neighbour(one, 1, two, -1) - neighbour(one, -1, two, 1)
                both = inside[:, one] & inside[:, two]
                bend[:, one, two] = bend[:, two, one] = np.where(both, mixed / 4.0, 0.0)
        # An axis at an edge, or without curvature, gets no offset.
        flat = np.diagonal(bend, axis1=1, axis2=2) <= 0.0
        slope[flat] = 0.0
        bend += np.where(flat, 1.0, 0.0)[:, :, None] * np.eye(axes)
        solved = np.linalg.solve(bend, slope[:, :, None])[:, :, 0]
        shifts: NDArray[np.float64] = -np.asarray(solved, dtype=np.float64)
        # The least point's neighbours are no lower, so an offset beyond half a step is an error.
        shifts = np.clip(shifts, -0.5, 0.5)
        values: NDArray[np.float64] = least + 0.5 * (slope * shifts).sum(axis=1)
        return values, places, shifts * self._step


def fitted_bias(
    log_probs: NDArray[np.float64],
    targets: NDArray[np.int64],
    weights: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return the label bias of the least cross-entropy: a regression with intercepts only.

    Newton's method; the loss is convex. The first label's bias is 0.

    Args:
        log_probs: Shape (R, C), nats.
        targets: Indices of the true labels, shape (R,).
        weights: Weight of each row, shape (R,); None weighs all equally.
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
