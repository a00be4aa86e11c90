"""One prompt on many examples: what evaluation and `fedone score` measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedone_sdk.backends.base import LLMBackend, Query
from fedone_sdk.budget import Usage
from fedone_sdk.metrics import evaluate
from fedone_sdk.task import Example, TaskSpec, label_loss, render, target_of

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model answered to one prompt.

    Attributes:
        task: What was asked.
        log_probs: Per example its label log-probabilities, or None where the model failed on it.
        targets: Per example the index of its label.
        usage: What was spent; every batch is one query.
        cache_hits: Queries that were answered without asking the model.
    """

    task: TaskSpec
    log_probs: tuple[tuple[float, ...] | None, ...]
    targets: tuple[int, ...]
    usage: Usage
    cache_hits: int

    @property
    def scored(self) -> list[tuple[tuple[float, ...], int]]:
        """Log-probabilities and target of each example that the model did not fail on."""
        pairs = zip(self.log_probs, self.targets, strict=True)
        return [(row, target) for row, target in pairs if row is not None]

    @property
    def metric(self) -> float | None:
        """The task's metric over what was scored; None where nothing was."""
        if not self.scored:
            return None
        predictions = [row.index(max(row)) for row, _ in self.scored]
        return evaluate(self.task.metric, predictions, [target for _, target in self.scored])

    @property
    def mean_loss(self) -> float | None:
        """The task's mean loss over what was scored; None where nothing was."""
        losses = [label_loss(self.task, row, target) for row, target in self.scored]
        return math.fsum(losses) / len(losses) if losses else None


async def predict(
    backend: LLMBackend,
    task: TaskSpec,
    prompt: str,
    examples: Sequence[Example],
    batch_size: int,
) -> Prediction:
    """Asks a model about every example under one prompt, batch by batch.

    Raises:
        BackendError: The model refused a query.
        DataError: An example does not fit the task.
    """
    targets = tuple(target_of(task, example) for example in examples)
    rows: list[tuple[float, ...] | None] = []
    usage, hits = Usage(), 0
    for start in range(0, len(examples), batch_size):
        query = Query(
            inputs=tuple(
                render(task, prompt, example) for example in examples[start : start + batch_size]
            ),
            label_words=task.label_words,
        )
        answer = await backend.score(query)
        rows += answer.log_probs
        hits += answer.cached
        usage += answer.usage.without_queries() + Usage(queries=1)
    return Prediction(
        task=task, log_probs=tuple(rows), targets=targets, usage=usage, cache_hits=hits
    )
