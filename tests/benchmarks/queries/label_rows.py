"""Answers of a model to labelled rows: losses and metrics with any label bias, at no new cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedone_sdk.algorithms.calibration import fitted_bias
from fedone_sdk.backends import predict
from fedone_sdk.errors import BackendError
from fedone_sdk.metrics import accuracy, evaluate
from fedone_sdk.task import Example, TaskSpec, target_of

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend

__all__ = ["BATCH_SIZE", "LabelRows", "targets_of"]

BATCH_SIZE = 32
"""Rows per query."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelRows:
    """Answers to one prompt.

    Attributes:
        metric_name: The task's metric.
        log_probs: Of the label words, float64, shape (R, C), nats.
        targets: Indices of the true labels, shape (R,).
    """

    metric_name: str
    log_probs: NDArray[np.float64]
    targets: NDArray[np.int64]

    @classmethod
    async def ask(
        cls, backend: LLMBackend, task: TaskSpec, prompt: str, examples: Sequence[Example]
    ) -> Self:
        """Score every example with one prompt.

        Args:
            backend: The model.
            task: A task over label words, without its own bias.
            prompt: The prompt.
            examples: At least one.

        Raises:
            BackendError: The model rejected a query, or an input.
            DataError: An example does not fit the task.
        """
        found = await predict(backend, task, prompt, examples, BATCH_SIZE)
        if len(found.scored) < len(examples):
            failed = len(examples) - len(found.scored)
            raise BackendError(f"the model failed on {failed} of {len(examples)} rows")
        return cls(
            metric_name=task.metric,
            log_probs=np.array(found.rows, dtype=np.float64),
            targets=targets_of(task, examples),
        )

    def loss(self, bias: ArrayLike | None = None) -> float:
        """Return the mean cross-entropy over the label words, nats.

        Args:
            bias: Added to the log-probabilities, shape (C,); None adds nothing.
        """
        return float(self.losses(bias).mean())

    def losses(self, bias: ArrayLike | None = None) -> NDArray[np.float64]:
        """Return the cross-entropy of each row, shape (R,), nats; `bias` as of `loss`."""
        shifted = self._shifted(bias)
        right: NDArray[np.float64] = shifted[np.arange(len(shifted)), self.targets]
        losses: NDArray[np.float64] = np.logaddexp.reduce(shifted, axis=1) - right
        return losses

    def metric(self, bias: ArrayLike | None = None) -> float:
        """Return the task's metric; `bias` as of `loss`."""
        if self.metric_name == "loss":
            return self.loss(bias)
        return evaluate(self.metric_name, self._predicted(bias), self.targets.tolist())

    def accuracy(self, bias: ArrayLike | None = None) -> float:
        """Return the share of correct predictions; `bias` as of `loss`."""
        return accuracy(self._predicted(bias), self.targets.tolist())

    def fitted(self, *, balanced: bool = False) -> NDArray[np.float64]:
        """Return the bias with the least loss on these rows, shape (C,).

        Args:
            balanced: Whether classes have equal weights, regardless of their rows.
        """
        if not balanced:
            return fitted_bias(self.log_probs, self.targets)
        rows = np.bincount(self.targets)
        return fitted_bias(self.log_probs, self.targets, 1.0 / rows[self.targets])

    def _predicted(self, bias: ArrayLike | None) -> list[int]:
        return [int(label) for label in self._shifted(bias).argmax(axis=1)]

    def _shifted(self, bias: ArrayLike | None) -> NDArray[np.float64]:
        return self.log_probs if bias is None else self.log_probs + np.asarray(bias)


def targets_of(task: TaskSpec, examples: Sequence[Example]) -> NDArray[np.int64]:
    """Return the indices of the examples' labels, shape (R,).

    Raises:
        DataError: A label is missing or unknown to the task.
    """
    return np.array([target_of(task, example) for example in examples], dtype=np.int64)
