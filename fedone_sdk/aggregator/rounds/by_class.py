"""Losses by class about the assigned label biases, which clients report under calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import ClassLosses
from fedone_sdk.algorithms.label_bias import UNKNOWN_TRACE
from fedone_sdk.messages import MAX_LOSS, Tensor
from fedone_sdk.messages.tensor import from_wire

_ROUNDING = 1e-5
"""Tolerance for float32 and for another summation order; for losses, relative to the loss."""


_MOST_STDS = 3.0
"""Standard deviations of noise that a probability keeps."""


class ByClass(NamedTuple):
    """What a client reports of one local step, in wire form.

    Attributes:
        means: Float32, shape (I, K, 2 + C), as in `ClassLosses`.
        counts: Examples of each class, shape (C,); under privacy with noise.
        scored: Number of scored examples.
    """

    means: Tensor
    counts: tuple[float, ...]
    scored: int

    def check(self, losses: Sequence[float], *, groups: int, private: bool) -> None:
        """Check the shape, and that some log-probabilities have these numbers.

        By Jensen's inequality the trace is at most 1 - sum_k p_k^2, and e^-loss at most
        sum_k min(p_k, t_k), with the mean probabilities p and the shares t of the true labels.
        Under privacy, noise may break that; the losses are those of the update all the same, and
        the unknown trace is 1.

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
            if (values[..., 1] != UNKNOWN_TRACE).any():
                raise ValueError("by_class: the trace must be 1 under privacy")
            if _contradict(values[:, 0, 0], losses):
                raise ValueError("by_class: contradicts losses")
            return
        if any(count < 0 or count % 1 for count in self.counts) or sum(self.counts) != self.scored:
            raise ValueError(
                f"class_counts: must be whole numbers that add up to {self.scored}, the scored "
                "examples"
            )
        examples, targets = self._groups(groups)
        if values[:, examples == 0].any():
            raise ValueError("by_class: must be 0 for a class without examples")
        if _contradict(values[..., 0] @ examples / self.scored, losses):
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
        noise: float | None,
    ) -> ClassLosses:
        """Return the method's input, with losses clipped to [0, `highest`]; None does not clip.

        With noise a mini-batch weighs as much as one example, however many it has: the noise of the
        mean probabilities is about as large as their spread over examples. Probabilities and shares
        of labels are clipped to [0, 1] and 3 standard deviations, so that no update decides the
        bias of its prompts. `noise` is that of a mean probability, under privacy.
        """
        examples, targets = self._groups(groups)
        means = from_wire(self.means).astype(np.float64)
        if noise is not None:
            examples = np.ones_like(examples)
            low, high = -_MOST_STDS * noise, 1.0 + _MOST_STDS * noise
            means[..., 2:], targets = means[..., 2:].clip(low, high), targets.clip(low, high)
        losses = ClassLosses(means=means, counts=examples, targets=targets, biases=biases)
        return losses.clipped(highest)

    def _groups(self, groups: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the examples of each group, and the shares of the true labels in it."""
        counts = np.array(self.counts, dtype=np.float64)
        if groups == 1:
            return np.array([self.scored]), counts[None] / self.scored
        return counts.astype(np.int64), np.eye(len(counts))


def _contradict(means: NDArray[np.float64], losses: Sequence[float]) -> bool:
    """Whether mean losses differ from those of the update by more than rounding."""
    given = np.array(losses)
    return bool((np.abs(means - given) > _ROUNDING * np.maximum(1.0, np.abs(given))).any())
