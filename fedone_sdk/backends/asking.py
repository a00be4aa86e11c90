"""From a task to queries, and from queries to answers: what all who ask a model share."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedone_sdk.backends.base import Answer, LLMBackend, Query, Want
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetError,
    SpecError,
)
from fedone_sdk.messages import MAX_WRITTEN_CHARS
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.task import LogProbs, Loss, TaskSpec, TextPrompt, render, words_of

if TYPE_CHECKING:
    from fedone_sdk.budget import Payer

__all__ = [
    "CONCURRENCY",
    "ask_each",
    "check_answer",
    "is_known",
    "query_for",
    "rows_of",
    "score_all",
    "want_of",
]

CONCURRENCY = 32
"""Queries under way at once. More than a rate limiter lets through gains nothing, and delays the
news that one has failed."""

_WANTED: dict[Loss, tuple[Want, ...]] = {
    "cross_entropy": ("labels",),
    "hinge": ("labels",),
    # Where there are log-probabilities, the likeliest label is what the model would write.
    "zero_one": ("labels", "choice"),
    "nll": ("reference",),
    "score": ("text",),
}


def want_of(task: TaskSpec, answers: frozenset[Want]) -> Want:
    """What a task's loss needs to know about each input.

    Args:
        task: The task.
        answers: What may be asked of the backend.

    Raises:
        SpecError: The backend cannot answer that.
    """
    wanted = _WANTED[task.loss]
    for want in wanted:
        if want in answers:
            return want
    if "choice" in answers:
        raise SpecError(
            f"task.loss: {task.loss} needs log-probabilities, which this backend does not show; "
            "zero_one does without"
        )
    others = "; kinds transformers and vllm do" if wanted == ("reference",) else ""
    raise SpecError(
        f"task.loss: {task.loss} needs a backend that answers {wanted[0]!r}; this one answers "
        f"{', '.join(sorted(answers))}{others}"
    )


def query_for(
    task: TaskSpec,
    prompt: TextPrompt | SoftPrompt,
    texts: Sequence[Mapping[str, Any]],
    *,
    backend: LLMBackend,
    references: Sequence[str] = (),
    payer: Payer | None = None,
) -> Query:
    """One prompt on one mini-batch, as a task puts it.

    Args:
        task: The task.
        prompt: The prompt's text, what its slots hold, or the vectors that take its place.
        texts: The text fields of each example.
        backend: Who will be asked.
        references: The reference text of each example, for loss ``nll``.
        payer: Who pays.

    Raises:
        DataError: A text field is missing.
        SpecError: The backend cannot answer what the task's loss needs, or takes no such vectors.
    """
    want = want_of(task, backend.answers)
    soft = prompt if isinstance(prompt, SoftPrompt) else None
    if soft is not None and soft.kind not in backend.takes:
        raise SpecError(f"method: needs a backend that takes {soft.kind}; this one does not")
    shown = "" if isinstance(prompt, SoftPrompt) else prompt
    return Query(
        inputs=tuple(render(task, shown, text) for text in texts),
        label_words=words_of(task, shown),
        want=want,
        references=tuple(references) if want == "reference" else (),
        max_tokens=task.max_written,
        soft_prompt=soft,
        payer=payer,
    )


def rows_of(query: Query, answer: Answer) -> tuple[LogProbs | str | None, ...]:
    """What an answer says of each input: log-probabilities, or the text; None where it failed."""
    if query.want != "text":
        return answer.log_probs
    # No longer than a message may carry, so that a loss does not hang on where it is computed.
    return tuple(None if text is None else text[:MAX_WRITTEN_CHARS] for text in answer.texts)


def check_answer(query: Query, answer: Answer) -> None:
    """Looks whether an answer is one to a query: a backend may be anybody's.

    Raises:
        ValueError: It has another size, or a number that is none.
    """
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
    """Whether a cache of the backend has the answer, so that asking costs nothing."""
    return (await backend.quote(query)).without_queries() == NOTHING


async def score_all(
    backend: LLMBackend, queries: Iterable[Query], *, concurrency: int = CONCURRENCY
) -> list[Answer]:
    """Asks several queries, many at a time, and waits for all of them (see `ask_each`).

    Raises:
        BackendError: The gravest of the failures.
        BudgetError: A request could not be paid.
    """
    asked = list(queries)
    answers, failures = await ask_each(backend, asked, concurrency=concurrency)
    if failures:
        raise failures[0]
    return [answers[index] for index in range(len(asked))]


async def ask_each(
    backend: LLMBackend, queries: Iterable[Query], *, concurrency: int = CONCURRENCY
) -> tuple[dict[int, Answer], list[Exception]]:
    """Asks several queries, `concurrency` of them at a time.

    When one fails, no further one is begun. Those under way are waited for: they are paid, and a
    cache keeps their answers. A cancellation cancels them.

    Returns:
        The answers by position, and the failures, the gravest first.
    """
    answers: dict[int, Answer] = {}
    failures: list[Exception] = []
    ahead = deque(enumerate(queries))

    async def work() -> None:
        while ahead and not failures:
            index, query = ahead.popleft()
            try:
                answers[index] = await backend.score(query)
            except Exception as exc:
                failures.append(exc)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(ahead))):
            group.create_task(work())
    return answers, sorted(failures, key=_gravity, reverse=True)


def _gravity(failure: Exception) -> int:
    """Higher for what waiting helps least; what nobody foresaw is a bug, and comes first."""
    order = (BackendUnavailable, BackendBlocked, BudgetError, BackendError)
    ranks = {BackendUnavailable: 0, BackendError: 1, BudgetError: 2, BackendBlocked: 3}
    return next((ranks[kind] for kind in order if isinstance(failure, kind)), len(order))
