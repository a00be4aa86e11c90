"""Predictions of one prompt on many examples, for evaluation and `fedone score`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from fedone_sdk.backends.asking import query_for, rows_of, score_all
from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.budget import Usage
from fedone_sdk.metrics import MetricFunction, evaluate
from fedone_sdk.task import (
    Example,
    LogProbs,
    ScoreFunction,
    TaskSpec,
    TextPrompt,
    example_loss,
    predicted,
    references_of,
    target_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A model's answers to one prompt.

    Attributes:
        task: The task; metric and losses include its label bias.
        rows: Per example, the log-probabilities or the text, without the label bias; None if the
            model failed on it.
        examples: The examples.
        usage: Usage, one query per batch, without retries, which are charged to the payer.
        censored: Number of log-probabilities that are upper bounds.
        models: Model versions that the provider reported.
        score: The user's function, for loss ``score``.
        measure: The user's function, for a user-defined metric.
    """

    task: TaskSpec
    rows: tuple[LogProbs | str | None, ...]
    examples: tuple[Example, ...]
    usage: Usage
    censored: int = 0
    models: tuple[str, ...] = ()
    score: ScoreFunction | None = None
    measure: MetricFunction | None = None

    @classmethod
    def of(
        cls,
        task: TaskSpec,
        queries: Sequence[Query],
        answers: Sequence[Answer],
        examples: Sequence[Example],
        *,
        score: ScoreFunction | None = None,
        measure: MetricFunction | None = None,
    ) -> Self:
        """Combine the answers to `prediction_queries`."""
        found = [rows_of(query, answer) for query, answer in zip(queries, answers, strict=True)]
        spent = (answer.usage.without_queries() for answer in answers)
        return cls(
            task=task,
            rows=tuple(row for rows in found for row in rows),
            examples=tuple(examples),
            usage=sum(spent, Usage(queries=len(queries))),
            censored=sum(answer.censored for answer in answers),
            models=tuple(dict.fromkeys(answer.model for answer in answers if answer.model)),
            score=score,
            measure=measure,
        )

    @property
    def scored(self) -> list[tuple[LogProbs | str, Example]]:
        """The pairs of answer and example on which the model did not fail."""
        pairs = zip(self.rows, self.examples, strict=True)
        return [(row, example) for row, example in pairs if row is not None]

    @property
    def metric(self) -> float | None:
        """The task's metric over the scored examples; None if there are none.

        Raises:
            SpecError: The user's function is missing or broken.
        """
        if not self.scored or self.task.metric == "loss":
            return self.mean_loss
        predictions, targets = [], []
        for row, example in self.scored:
            target = target_of(self.task, example)
            assert not isinstance(row, str)
            assert isinstance(target, int)
            predictions.append(predicted(self.task, row))
            targets.append(target)
        return evaluate(self.task.metric, predictions, targets, self.measure)

    @property
    def mean_loss(self) -> float | None:
        """The task's mean loss over the scored examples; None if there are none.

        Raises:
            SpecError: The user's score function is missing or broken.
        """
        losses = [example_loss(self.task, row, example, self.score) for row, example in self.scored]
        return math.fsum(losses) / len(losses) if losses else None


def prediction_queries(
    backend: LLMBackend,
    task: TaskSpec,
    prompt: TextPrompt,
    examples: Sequence[Example],
    batch_size: int,
) -> list[Query]:
    """Return the queries that measure a prompt, one per batch.

    Args:
        backend: The backend that will score them.
        task: The task.
        prompt: The prompt.
        examples: Labelled examples.
        batch_size: Examples per query.

    Raises:
        DataError: An example does not fit the task.
        SpecError: The backend does not support the task's loss.
    """
    if not task.generates:
        for example in examples:
            target_of(task, example)  # Labels are checked before any query is paid for.
    batches = [examples[at : at + batch_size] for at in range(0, len(examples), batch_size)]
    return [
        query_for(task, prompt, batch, backend=backend, references=references_of(task, batch))
        for batch in batches
    ]


async def predict(
    backend: LLMBackend,
    task: TaskSpec,
    prompt: TextPrompt,
    examples: Sequence[Example],
    batch_size: int,
    *,
    score: ScoreFunction | None = None,
    measure: MetricFunction | None = None,
) -> Prediction:
    """Scores every example with one prompt; the prediction includes the task's label bias.

    Args:
        backend: The backend.
        task: The task.
        prompt: The prompt.
        examples: Labelled examples.
        batch_size: Examples per query.
        score: The user's function, for loss ``score``.
        measure: The user's function, for a user-defined metric.

    Raises:
        BackendError: The model refused a query.
        DataError: An example does not fit the task.
        SpecError: The backend does not support the task's loss.
    """
    queries = prediction_queries(backend, task, prompt, examples, batch_size)
    answers = await score_all(backend, queries)
    return Prediction.of(task, queries, answers, examples, score=score, measure=measure)
