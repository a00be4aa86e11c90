"""From a task to queries, answers and predictions."""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fedone_sdk.backends.base import Answer, LLMBackend, Query, Want
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetError,
    SpecError,
)
from fedone_sdk.losses import example_loss, predicted
from fedone_sdk.messages import MAX_WRITTEN_CHARS
from fedone_sdk.metrics import MetricFunction, evaluate
from fedone_sdk.scores import graded
from fedone_sdk.task import (
    Example,
    LogProbs,
    Loss,
    Part,
    Role,
    Score,
    ScoreFunction,
    TaskSpec,
    TextPrompt,
    references_of,
    render,
    target_of,
    words_of,
)

if TYPE_CHECKING:
    from fedone_sdk.budget import Payer

Q = TypeVar("Q")
R = TypeVar("R")

CONCURRENCY = 32
"""Number of concurrent queries. A number beyond the rate limit only delays the detection of
failures."""

_STARTS = 8
"""Queries that start in one turn of the event loop, each in up to half a millisecond."""

_WANTED: dict[Loss, tuple[Want, ...]] = {
    # With log-probabilities, the most likely label is the one that the model would write.
    "zero_one": ("labels", "choice"),
    "nll": ("reference",),
    "score": ("text",),
}


def want_of(task: TaskSpec, answers: frozenset[Want]) -> Want:
    """Return the kind of query that a task's loss needs."""
    wanted = _WANTED.get(task.loss, ("labels",))
    if supported := [want for want in wanted if want in answers]:
        return supported[0]
    if "choice" in answers:
        raise SpecError(
            f"task.loss: {task.loss} needs log-probabilities, which this backend does not show; "
            "zero_one does without, and log_probs: {samples: 8} estimates them"
        )
    others = "; kinds transformers and vllm do" if wanted == ("reference",) else ""
    raise SpecError(
        f"task.loss: {task.loss} needs a backend that answers {wanted[0]!r}; this one answers "
        f"{', '.join(sorted(answers))}{others}"
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
        raise SpecError(
            "task.score.json_fields.schema: this backend holds no text to a JSON schema; kinds "
            "llama_cpp, vllm and openai with api chat do"
        )
    return Query(
        inputs=tuple(render(task, prompt, text) for text in texts),
        label_words=words_of(task, prompt),
        want=want,
        references=tuple(references) if want == "reference" else (),
        max_tokens=task.max_written,
        stop=task.stop,
        schema="" if schema is None else json.dumps(schema),
        scope=scope,
        payer=payer,
    )


def written_query(messages: Iterable[tuple[Role, str]], max_tokens: int, schema: str = "") -> Query:
    """Return the query of a text that a model writes after these messages."""
    parts = [part for role, text in messages for part in (Part("role", role), Part("text", text))]
    rendered = (*parts, Part("role", "assistant"))
    return Query(inputs=(rendered,), want="text", max_tokens=max_tokens, schema=schema)


def rows_of(query: Query, answer: Answer) -> tuple[LogProbs | str | None, ...]:
    """Per input the log-probabilities or the text; None if the input failed."""
    if query.want != "text":
        return answer.log_probs
    return tuple(None if text is None else _ended(query, text) for text in answer.texts)


def texts_of(queries: Sequence[Query], answers: Sequence[Answer]) -> list[str | None]:
    """Per input of some queries the generated text; None if the input failed."""
    pairs = zip(queries, answers, strict=True)
    rows = (row for query, answer in pairs for row in rows_of(query, answer))
    return [row if isinstance(row, str) else None for row in rows]


def _ended(query: Query, text: str) -> str:
    """Return a text up to its end, and to the wire's limit.

    Not every model stops there, and a loss must not depend on where it is computed.
    """
    for stop in query.stop:
        text = text.partition(stop)[0]
    return text[:MAX_WRITTEN_CHARS]


def check_answer(query: Query, answer: Answer) -> None:
    """Check that an answer fits its query, because a backend may be user code."""
    rows = rows_of(query, answer)
    if len(rows) != len(query.inputs):
        raise ValueError(f"{len(rows)} answers were given to {len(query.inputs)} inputs")
    num_values = len(query.label_words) or 1
    for row in rows:
        if row is None or isinstance(row, str):
            continue
        if len(row) != num_values:
            raise ValueError(f"{len(row)} log-probabilities were given, {num_values} are asked for")
        if not all(map(math.isfinite, row)):
            raise ValueError(f"log-probabilities must be finite numbers, not {list(row)}")


async def is_known(backend: LLMBackend, query: Query) -> bool:
    """Whether a cache of the backend has the answer, so that the query costs nothing."""
    return (await backend.quote(query)).without_queries() == NOTHING


async def score_all(
    backend: LLMBackend, queries: Iterable[Query], *, concurrency: int = CONCURRENCY
) -> list[Answer]:
    """Scores several queries concurrently and waits for all of them (see `ask_each`)."""
    asked = list(queries)
    answers, failures = await ask_each(backend.score, asked, concurrency=concurrency)
    if failures:
        raise failures[0]
    return [answers[index] for index in range(len(asked))]


async def ask_each(
    score: Callable[[Q], Awaitable[R]], queries: Iterable[Q], *, concurrency: int = CONCURRENCY
) -> tuple[dict[int, R], list[Exception]]:
    """Scores several queries, `concurrency` of them at a time.

    After a failure no further query starts. Pending queries complete, because they are paid and a
    cache keeps their answers. A cancellation cancels them.

    Returns:
        The answers by position, and the failures, most severe first.
    """
    answers: dict[int, R] = {}
    failures: list[Exception] = []
    ahead = deque(enumerate(queries))

    async def work() -> None:
        while ahead and not failures:
            index, query = ahead.popleft()
            try:
                answers[index] = await score(query)
            except Exception as exc:
                failures.append(exc)

    async with asyncio.TaskGroup() as group:
        for started in range(1, min(concurrency, len(ahead)) + 1):
            group.create_task(work())
            if started % _STARTS == 0:
                await asyncio.sleep(0)
    return answers, sorted(failures, key=_gravity, reverse=True)


def _gravity(failure: Exception) -> int:
    order = (BackendUnavailable, BackendBlocked, BudgetError, BackendError)
    ranks = {BackendUnavailable: 0, BackendError: 1, BudgetError: 2, BackendBlocked: 3}
    return next((ranks[kind] for kind in order if isinstance(failure, kind)), len(order))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A model's answers to one prompt.

    Attributes:
        rows: Per example, the log-probabilities without the label bias, or the text's score; None
            if the model or the score function failed on it.
        censored: Number of log-probabilities that are upper bounds.
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
        """Combine the answers to `prediction_queries`, and score the texts among them."""
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
        """The pairs of answer and example on which nothing failed."""
        pairs = zip(self.rows, self.examples, strict=True)
        return [(row, example) for row, example in pairs if row is not None]

    @property
    def metric(self) -> float | None:
        """The task's metric over the scored examples; None if there are none."""
        if not self.scored or self.task.metric == "loss":
            return self.mean_loss
        predictions, targets = [], []
        for row, example in self.scored:
            target = target_of(self.task, example)
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
    """Return the queries that measure a prompt, one per batch."""
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
    """Scores every example with one prompt; the prediction includes the task's label bias."""
    queries = prediction_queries(backend, task, prompt, examples, batch_size)
    answers = await score_all(backend, queries)
    return await Prediction.of(task, queries, answers, examples, score=score, measure=measure)
