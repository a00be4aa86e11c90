"""Losses by class about the assigned label biases, which clients report under calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.messages import MAX_LOSS, Array
from fedone_sdk.messages.array import from_wire

_ROUNDING = 1e-5
"""Tolerance for float32 and for another summation order; for losses, relative to the loss."""


class ByClass(NamedTuple):
    """What a client reports of one local step, in wire form.

    Attributes:
        means: Float32, shape (I, K, 2 + C), as in `ClassLosses`.
        counts: Examples of each class, shape (C,); under privacy with noise.
        scored: Number of scored examples.
    """

    means: Array
    counts: tuple[float, ...]
    scored: int

    def dump(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**self._asdict(), "means": self.means.model_dump(), "counts": list(self.counts)}

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> ByClass:
        """Return what a `dump` holds."""
        means = Array.model_validate(document["means"])
        return cls(means, tuple(document["counts"]), int(document["scored"]))

    def check(self, losses: Sequence[float], *, groups: int, private: bool) -> None:
        """Check the shape, and that some log-probabilities have these numbers.

        By Jensen's inequality the trace is at most 1 - sum_k p_k^2, and e^-loss at most
        sum_k min(p_k, t_k), with the mean probabilities p and the shares t of the true labels.
        Noise may break all but the shape.

        Args:
            losses: The mean losses of the update.
            groups: K.
            private: Whether the numbers have noise.

        Raises:
            ValueError: No log-probabilities have these numbers.
        """
        means, shape = self.means, (len(losses), groups, 2 + len(self.counts))
        if means.dtype != "float32" or means.shape != shape:
            raise ValueError(
                f"by_class: is {means.dtype} {list(means.shape)}, must be float32 {list(shape)}"
            )
        values = from_wire(means).astype(np.float64)
        if np.abs(values).max() > MAX_LOSS:
            raise ValueError(f"by_class: a number is beyond {MAX_LOSS:g}")
        if private:
            return
        if any(count < 0 or count % 1 for count in self.counts) or sum(self.counts) != self.scored:
            raise ValueError(
                f"class_counts: must be whole numbers that add up to {self.scored}, the scored "
                "examples"
            )
        examples, targets = self._groups(groups)
        if values[:, examples == 0].any():
            raise ValueError("by_class: must be 0 for a class without examples")
        given = np.array(losses)
        distance = np.abs(values[..., 0] @ examples / self.scored - given)
        if (distance > _ROUNDING * np.maximum(1.0, np.abs(given))).any():
            raise ValueError("by_class: contradicts losses")
        values, targets = values[:, examples > 0], targets[examples > 0]
        loss, trace, probabilities = values[..., 0], values[..., 1], values[..., 2:]
        true = np.minimum(probabilities, targets).sum(axis=-1)
        most = 1.0 - (probabilities**2).sum(axis=-1)
        possible = (
            (probabilities >= -_ROUNDING).all()
            and (np.abs(probabilities.sum(axis=-1) - 1.0) <= _ROUNDING).all()
            and ((trace >= -_ROUNDING) & (trace <= most + _ROUNDING)).all()
            and (np.exp(-loss) <= true + _ROUNDING).all()
        )
        if not possible:
            raise ValueError("by_class: is not the losses of any log-probabilities")

    def class_losses(
        self,
        biases: NDArray[np.floating[Any]],
        highest: float | None,
        *,
        groups: int,
        private: bool,
    ) -> ClassLosses:
        """Return the method's input, with losses clipped to [0, `highest`]; None does not clip.

        With noise a mini-batch weighs as much as one example, however many it has: the noise of the
        mean probabilities is about as large as their spread over examples.
        """
        examples, targets = self._groups(groups)
        if private:
            examples = np.ones_like(examples)
        losses = ClassLosses(
            means=from_wire(self.means), counts=examples, targets=targets, biases=biases
        )
        return losses.clipped(highest)

    def _groups(self, groups: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the examples of each group, and the shares of the true labels in it."""
        counts = np.array(self.counts, dtype=np.float64)
        if groups == 1:
            return np.array([self.scored]), counts[None] / self.scored
        return counts.astype(np.int64), np.eye(len(counts))
