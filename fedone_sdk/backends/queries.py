"""Makes queries from a task's rows, and predictions from the answers."""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fedone_sdk import errors
from fedone_sdk import task as tasks
from fedone_sdk.backends.base import Answer, LLMBackend, Query, Want
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.losses import example_loss, predicted
from fedone_sdk.messages import MAX_WRITTEN_CHARS
from fedone_sdk.metrics import MetricFunction, evaluate
from fedone_sdk.scores import graded
from fedone_sdk.task import Example, LogProbs, Loss, Score, ScoreFunction, TaskSpec, TextPrompt

if TYPE_CHECKING:
    from fedone_sdk.budget import Payer

T = TypeVar("T")
R = TypeVar("R")

CONCURRENCY = 32
"""Number of concurrent queries. With the default of `limits.concurrency`, more would only wait."""

_MAX_STARTS = 8
"""Number of queries that start in one event loop iteration; a start takes up to 0.5 ms."""

_WANTED: dict[Loss, tuple[Want, ...]] = {
    # The first supported kind is used. With `choice` the model writes its likeliest label.
    "zero_one": ("labels", "choice"),
    "nll": ("reference",),
    "score": ("text",),
}
_NEEDED = {
    "labels": "log-probabilities of label words",
    "reference": "log-probabilities of reference texts",
    "text": "generated texts",
}


def want_of(task: TaskSpec, answers: frozenset[Want]) -> Want:
    """Return the kind of query that a task's loss needs."""
    wanted = _WANTED.get(task.loss, ("labels",))
    if supported := [want for want in wanted if want in answers]:
        return supported[0]
    hint = ": use kind transformers or vllm" if wanted == ("reference",) else ""
    if wanted == ("labels",) and "choice" in answers:
        hint = ": set loss: zero_one, or estimate them by log_probs: {samples: 8}"
    raise errors.SpecError(
        f"task.loss: {task.loss} needs {_NEEDED[wanted[0]]}, which this backend does not "
        f"return{hint}"
    )


def query_for(
    task: TaskSpec,
    prompt: TextPrompt,
    texts: Sequence[Mapping[str, Any]],
    *,
    backend: LLMBackend,
    references: Sequence[str] = (),
    scope: tuple[str, ...] = (),
    payer: Payer | None = None,
) -> Query:
    """Return the query of one prompt on one mini-batch."""
    want = want_of(task, backend.answers)
    schema = task.answer_schema
    if schema is not None and not backend.takes_schema:
        raise errors.SpecError(
            "task.score.json_fields.schema: this backend cannot enforce a JSON schema: use kind "
            "llama_cpp or vllm, or kind openai with api: chat"
        )
    return Query(
        inputs=tuple(tasks.render(task, prompt, text) for text in texts),
        label_words=tasks.words_of(task, prompt),
        want=want,
        references=tuple(references) if want == "reference" else (),
        max_tokens=task.max_written,
        stop=task.stop,
        schema="" if schema is None else json.dumps(schema),
        scope=scope,
        payer=payer,
    )


def written_query(
    messages: Iterable[tuple[tasks.Role, str]], max_tokens: int, schema: str = ""
) -> Query:
    """Return a query for the text that follows these messages."""
    pairs = [(tasks.Part("role", role), tasks.Part("text", text)) for role, text in messages]
    rendered = (*chain(*pairs), tasks.Part("role", "assistant"))
    return Query(inputs=(rendered,), want="text", max_tokens=max_tokens, schema=schema)


def rows_of(query: Query, answer: Answer) -> tuple[LogProbs | str | None, ...]:
    """Return per input the log-probabilities or the text; None if the input failed."""
    if query.want != "text":
        return answer.log_probs
    return tuple(None if text is None else _cut_at_stop(query, text) for text in answer.texts)


def texts_of(queries: Sequence[Query], answers: Sequence[Answer]) -> list[str | None]:
    """Return the generated text of each input of the queries; None if the input failed."""
    pairs = zip(queries, answers, strict=True)
    rows = (row for query, answer in pairs for row in rows_of(query, answer))
    return [row if isinstance(row, str) else None for row in rows]


def _cut_at_stop(query: Query, text: str) -> str:
    # The server cuts its own texts too, so that devices and the server compute the same losses.
    for stop in query.stop:
        text = text.partition(stop)[0]
    return text[:MAX_WRITTEN_CHARS]


def check_answer(query: Query, answer: Answer) -> None:
    """Check that an answer has the values that its query needs; the backend may be user code."""
    rows = rows_of(query, answer)
    if len(rows) != len(query.inputs):
        raise ValueError(f"{len(rows)} answers were given to {len(query.inputs)} inputs")
    num_values = len(query.label_words) or 1
    for row in rows:
        if row is None or isinstance(row, str):
            continue
        if len(row) != num_values:
            raise ValueError(f"{len(row)} log-probabilities were given instead of {num_values}")
        if not all(map(math.isfinite, row)):
            raise ValueError(f"log-probabilities must be finite numbers, not {list(row)}")


async def is_known(backend: LLMBackend, query: Query) -> bool:
    """Whether the backend has the answer in its cache, so that the query costs nothing."""
    return (await backend.quote(query)).without_queries() == NOTHING


async def score_all(backend: LLMBackend, queries: Iterable[Query]) -> list[Answer]:
    """Answer several queries concurrently; raise the most severe failure (see `run_each`)."""
    answers, failures = await run_each(backend.score, queries)
    if failures:
        raise failures[0]
    return [answers[index] for index in range(len(answers))]


async def run_each(
    call: Callable[[T], Awaitable[R]], arguments: Iterable[T], *, concurrency: int = CONCURRENCY
) -> tuple[dict[int, R], list[Exception]]:
    """Call a function, such as `LLMBackend.score`, for each argument, `concurrency` at a time.

    After a failure no further call starts. Pending calls complete, because their queries are paid
    and a cache keeps the answers. If the caller is cancelled, pending calls are cancelled.

    Returns:
        The results by position, and the failures, most severe first.
    """
    results: dict[int, R] = {}
    failures: list[Exception] = []
    waiting = deque(enumerate(arguments))

    async def work() -> None:
        while waiting and not failures:
            index, argument = waiting.popleft()
            try:
                results[index] = await call(argument)
            except Exception as exc:
                failures.append(exc)

    if len(waiting) == 1:  # Needs no task.
        await work()
    async with asyncio.TaskGroup() as group:
        for started in range(1, min(concurrency, len(waiting)) + 1):
            group.create_task(work())
            if started % _MAX_STARTS == 0:
                await asyncio.sleep(0)
    return results, sorted(failures, key=_severity, reverse=True)


def _severity(failure: Exception) -> int:
    # BackendError is last, because two of the other classes are its subclasses.
    ranks = {
        errors.BackendUnavailable: 0,
        errors.BackendBlocked: 3,
        errors.BudgetError: 2,
        errors.BackendError: 1,
    }
    return next((rank for kind, rank in ranks.items() if isinstance(failure, kind)), 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A model's answers to one prompt.

    Attributes:
        task: The task. The metric and the loss include its label bias; `rows` do not.
        rows: Per example, the log-probabilities, or the score of the text; None if the model or the
            score function failed.
        censored: Number of log-probabilities that are upper bounds.
        measure: The user's metric function, if the task has one.
    """

    task: TaskSpec
    rows: tuple[LogProbs | Score | None, ...]
    examples: tuple[Example, ...]
    usage: Usage
    censored: int = 0
    models: tuple[str, ...] = ()
    measure: MetricFunction | None = None

    @classmethod
    async def of(
        cls,
        task: TaskSpec,
        queries: Sequence[Query],
        answers: Sequence[Answer],
        examples: Sequence[Example],
        *,
        score: ScoreFunction | None = None,
        measure: MetricFunction | None = None,
    ) -> Self:
        """Combine the answers to `prediction_queries`, and score generated texts by `score`."""
        rows = [*chain.from_iterable(map(rows_of, queries, answers))]
        spent = (answer.usage.without_queries() for answer in answers)
        return cls(
            task=task,
            rows=await graded(task, rows, examples, score),
            examples=tuple(examples),
            usage=sum(spent, Usage(queries=len(queries))),
            censored=sum(answer.censored for answer in answers),
            models=tuple(dict.fromkeys(answer.model for answer in answers if answer.model)),
            measure=measure,
        )

    @property
    def scored(self) -> list[tuple[LogProbs | Score, Example]]:
        """The answers that did not fail, each with its example."""
        pairs = zip(self.rows, self.examples, strict=True)
        return [(row, example) for row, example in pairs if row is not None]

    @property
    def metric(self) -> float | None:
        """The task's metric over the scored examples; None if there are none."""
        if not self.scored or self.task.metric == "loss":
            return self.mean_loss
        predictions, targets = [], []
        for row, example in self.scored:
            target = tasks.target_of(self.task, example)
            assert not isinstance(row, Score)
            assert isinstance(target, int)
            predictions.append(predicted(self.task, row))
            targets.append(target)
        return evaluate(self.task.metric, predictions, targets, self.measure)

    @property
    def mean_loss(self) -> float | None:
        """The task's mean loss over the scored examples; None if there are none."""
        losses = [example_loss(self.task, row, example) for row, example in self.scored]
        return math.fsum(losses) / len(losses) if losses else None


def prediction_queries(
    backend: LLMBackend,
    task: TaskSpec,
    prompt: TextPrompt,
    examples: Sequence[Example],
    batch_size: int,
) -> list[Query]:
    """Return the queries that ask about every example with one prompt, one query per batch."""
    if not task.generates:
        for example in examples:
            tasks.target_of(task, example)  # Labels are checked before any query is paid for.
    batches = [examples[at : at + batch_size] for at in range(0, len(examples), batch_size)]
    return [
        query_for(task, prompt, batch, backend=backend, references=tasks.references_of(task, batch))
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
    """Answer every example with one prompt, and score generated texts by `score`."""
    queries = prediction_queries(backend, task, prompt, examples, batch_size)
    answers = await score_all(backend, queries)
    return await Prediction.of(task, queries, answers, examples, score=score, measure=measure)
