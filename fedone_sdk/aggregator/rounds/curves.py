"""Losses by class and label bias, which clients report in runs with label calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.algorithms.calibration import BiasGrid
from fedone_sdk.messages import Array
from fedone_sdk.messages.array import from_wire
from fedone_sdk.task import Bias

_MAX_LOSS = 1e6
"""Upper bound of a loss in a message."""

_ROUNDING = 1e-5
"""Relative tolerance for float32 and for another summation order."""


class Curves(NamedTuple):
    """Losses of one local step by class and label bias, in wire form.

    Attributes:
        means: Mean losses, float32, shape (I, C, G): prompts, classes, biases.
        counts: Examples of each class, shape (C,).
    """

    means: Array
    counts: tuple[int, ...]

    def dump(self) -> dict[str, Any]:
        """Return the curves as JSON values."""
        return {"means": self.means.model_dump(), "counts": list(self.counts)}

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Curves:
        """Return the curves of a `dump`."""
        return cls(Array.model_validate(document["means"]), tuple(document["counts"]))


def check_curves(curves: Curves, losses: Sequence[float], biases: Sequence[Bias]) -> None:
    """Check the shape and the consistency of a client's curves.

    Raises:
        ValueError: The shape is wrong, a loss is out of bounds, a class without examples has
            losses, or the curves contradict `losses`, the mean losses without a bias.
    """
    means, shape = curves.means, (len(losses), len(biases[0]), len(biases))
    if means.dtype != "float32" or means.shape != shape:
        raise ValueError(
            f"by_class: is {means.dtype} {list(means.shape)}, must be float32 {list(shape)}"
        )
    if len(curves.counts) != shape[1]:
        raise ValueError(f"class_counts: {len(curves.counts)} were sent for {shape[1]} labels")
    if not any(curves.counts):
        raise ValueError("class_counts: no example was scored")
    values, counts = from_wire(means), np.array(curves.counts)
    if np.abs(values).max() > _MAX_LOSS:
        raise ValueError(f"by_class: a loss is beyond {_MAX_LOSS:g}")
    if values[:, counts == 0].any():
        raise ValueError("by_class: must be 0 for a class without examples")
    given = np.array(losses)
    zero = next(index for index, bias in enumerate(biases) if not any(bias))
    distance = np.abs(_mixed(curves)[:, zero] - given)
    if (distance > _ROUNDING * np.maximum(1.0, np.abs(given))).any():
        raise ValueError("by_class: contradicts losses at bias 0")


def check_possible(curves: Curves, biases: Sequence[Bias]) -> None:
    """Check that some log-probabilities have a client's curves, whose shape is right.

    Raises:
        ValueError: No log-probabilities have such losses.
    """
    means = from_wire(curves.means).astype(np.float64)
    if not BiasGrid(biases).possible(means, rounding=_ROUNDING):
        raise ValueError(
            "by_class: is not the losses of any log-probabilities: a loss falls with the bias of "
            "its own label and rises with the others', by at most the change of the bias"
        )


def as_class_losses(curves: Curves, highest: float | None) -> ClassLosses:
    """Return curves as the method's input, clipped to [0, `highest`]; None does not clip."""
    losses = ClassLosses(means=from_wire(curves.means), counts=np.array(curves.counts))
    return losses.clipped(highest)


def best_losses(curves: Curves) -> NDArray[np.float64]:
    """Return each prompt's mean loss at its best bias on this mini-batch, shape (I,).

    Searches compare prompts by this value, so the defences examine it.
    """
    best: NDArray[np.float64] = _mixed(curves).min(axis=1)
    return best


def _mixed(curves: Curves) -> NDArray[np.float64]:
    """Return the mean losses of the mini-batch at each bias, shape (I, G)."""
    counts = np.array(curves.counts, dtype=np.float64)
    means = from_wire(curves.means).astype(np.float64)
    mixed: NDArray[np.float64] = np.tensordot(means, counts, axes=(1, 0)) / counts.sum()
    return mixed
