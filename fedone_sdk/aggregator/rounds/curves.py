"""Losses by class and label bias: what a client brings of a run that calibrates by labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.messages import Array
from fedone_sdk.messages.ndarray import from_wire
from fedone_sdk.task import Bias

__all__ = ["Curves", "best_losses", "check_curves", "as_class_losses"]

_MAX_LOSS = 1e6
"""The bound of every loss of a message."""

_ROUNDING = 1e-5
"""What float32 and another order of summing may make of a loss, and more."""


class Curves(NamedTuple):
    """One local step's losses by class and label bias, as they were sent.

    Attributes:
        means: Shape (I, C, G), float32.
        counts: Examples of each class, shape (C,).
    """

    means: Array
    counts: tuple[int, ...]

    def dump(self) -> dict[str, Any]:
        """As JSON."""
        return {"means": self.means.model_dump(), "counts": list(self.counts)}

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Curves:
        """What was dumped."""
        return cls(Array.model_validate(document["means"]), tuple(document["counts"]))


def check_curves(curves: Curves, losses: Sequence[float], biases: Sequence[Bias]) -> None:
    """Refuses curves that no honest client sends.

    Args:
        curves: What a client sent.
        losses: Its mean losses without a bias, one per prompt; the curves must say the same.
        biases: The grid.

    Raises:
        ValueError: They are of another shape or beyond all bounds, speak of a class of which there
            is no example, or contradict the losses.
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


def as_class_losses(curves: Curves, highest: float | None) -> ClassLosses:
    """What the method is told.

    Args:
        curves: What a client sent.
        highest: Losses are clipped to [0, `highest`]; None clips none.
    """
    losses = ClassLosses(means=from_wire(curves.means), counts=np.array(curves.counts))
    return losses.clipped(highest)


def best_losses(curves: Curves) -> NDArray[np.float64]:
    """Each prompt's mean loss at the bias that is best for it on this mini-batch, shape (I,).

    That is what prompts are compared by, so it is what a liar would bend.
    """
    best: NDArray[np.float64] = _mixed(curves).min(axis=1)
    return best


def _mixed(curves: Curves) -> NDArray[np.float64]:
    """Mean losses of the mini-batch at each bias, shape (I, G)."""
    counts = np.array(curves.counts, dtype=np.float64)
    means = from_wire(curves.means).astype(np.float64)
    mixed: NDArray[np.float64] = np.tensordot(means, counts, axes=(1, 0)) / counts.sum()
    return mixed
