"""Losses per class, which clients report if the run estimates label biases."""

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
"""Tolerance for rounding errors; relative for losses above 1."""

_MAX_STDS = 3.0
"""Probabilities with noise are clipped at this many standard deviations below 0 and above 1."""


class ByClass(NamedTuple):
    """The losses per class of one local step, as the client has sent them.

    Attributes:
        means: For each of I prompts and K groups of examples (see `check`): mean loss, trace of
            the covariance of the label probabilities, and mean probability of each of C labels.
            Float32, shape (I, K, 2 + C).
        counts: Number of examples of each class, shape (C,); with noise if the run has privacy.
        scored: Number of scored examples.
    """

    means: Tensor
    counts: tuple[float, ...]
    scored: int

    def check(self, losses: Sequence[float], *, groups: int, private: bool) -> None:
        """Check the shape, and that a model's log-probabilities can give these numbers.

        Let p_c be the mean probability of label c, and t_c its share of the true labels. The trace
        must be at most 1 - sum_c p_c^2, and e^-loss at most sum_c min(p_c, t_c). Numbers with noise
        can exceed these bounds, so they are not checked; their trace must be 1 (unknown).

        Args:
            losses: The mean loss of each prompt in the same update; `means` must agree with it.
            groups: K: the number of classes, or 1 if one group contains all examples.
            private: Whether the numbers have noise.

        Raises:
            ValueError: No log-probabilities can give these numbers.
        """
        means, shape = self.means, (len(losses), groups, 2 + len(self.counts))
        if means.dtype != "float32" or means.shape != shape:
            raise ValueError(
                f"by_class: is {means.dtype} {list(means.shape)}, must be float32 {list(shape)}"
            )
        values = from_wire(means).astype(np.float64)
        if np.abs(values).max() > MAX_LOSS:
            raise ValueError(f"by_class: an absolute value is above {MAX_LOSS:g}")
        if private:
            if (values[..., 1] != UNKNOWN_TRACE).any():
                raise ValueError("by_class: the trace must be 1 under privacy")
            if _contradict(values[:, 0, 0], losses):
                raise ValueError("by_class: its mean losses differ from losses")
            return
        if any(count < 0 or count % 1 for count in self.counts) or sum(self.counts) != self.scored:
            raise ValueError(
                f"class_counts: must be whole numbers that add up to {self.scored}, the scored "
                "examples"
            )
        counts, targets = self._groups(groups)
        if values[:, counts == 0].any():
            raise ValueError("by_class: must be 0 for a class without examples")
        if _contradict(values[..., 0] @ counts / self.scored, losses):
            raise ValueError("by_class: its mean losses differ from losses")
        values, targets = values[:, counts > 0], targets[counts > 0]
        loss, trace, probabilities = values[..., 0], values[..., 1], values[..., 2:]
        max_likelihood = np.minimum(probabilities, targets).sum(axis=-1)
        max_trace = 1.0 - (probabilities**2).sum(axis=-1)
        possible = (
            (probabilities >= -_ROUNDING).all()
            and (np.abs(probabilities.sum(axis=-1) - 1.0) <= _ROUNDING).all()
            and ((trace >= -_ROUNDING) & (trace <= max_trace + _ROUNDING)).all()
            and (np.exp(-loss) <= max_likelihood + _ROUNDING).all()
        )
        if not possible:
            raise ValueError("by_class: no log-probabilities can give these numbers")

    def class_losses(
        self,
        biases: NDArray[np.floating[Any]],
        loss_clip: float | None,
        *,
        groups: int,
        noise: float | None,
    ) -> ClassLosses:
        """Return the losses as the input of the method's `tell`.

        With noise, a mini-batch counts as one example: its mean probabilities are about as
        uncertain as the probabilities of one example. They are clipped, to limit the effect of one
        update on the label biases.

        Args:
            biases: Label bias of each prompt.
            loss_clip: Losses are clipped to [0, `loss_clip`]; if None, they are not clipped.
            groups: As in `check`.
            noise: Standard deviation of the noise of a mean probability; None without privacy.
        """
        counts, targets = self._groups(groups)
        means = from_wire(self.means).astype(np.float64)
        if noise is not None:
            counts = np.ones_like(counts)
            low, high = -_MAX_STDS * noise, 1.0 + _MAX_STDS * noise
            means[..., 2:], targets = means[..., 2:].clip(low, high), targets.clip(low, high)
        losses = ClassLosses(means=means, counts=counts, targets=targets, biases=biases)
        return losses.clipped(loss_clip)

    def _groups(self, groups: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return each group's number of examples, and the share of each label in each group."""
        counts = np.array(self.counts, dtype=np.float64)
        if groups == 1:
            return np.array([self.scored]), counts[None] / self.scored
        return counts.astype(np.int64), np.eye(len(counts))


def _contradict(means: NDArray[np.float64], losses: Sequence[float]) -> bool:
    """Whether mean losses differ from `losses` by more than rounding errors."""
    expected = np.array(losses)
    tolerance = _ROUNDING * np.maximum(1.0, np.abs(expected))
    return bool((np.abs(means - expected) > tolerance).any())
