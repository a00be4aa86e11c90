"""From a task to queries, and from queries to answers: what all who ask a model share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedone_sdk.backends.base import Answer, LLMBackend, Query, Want
from fedone_sdk.budget import Payer
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetError,
    SpecError,
)
from fedone_sdk.messages import MAX_WRITTEN_CHARS
from fedone_sdk.task import LogProbs, Loss, TaskSpec, render

__all__ = ["query_for", "rows_of", "score_all", "want_of"]


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
    raise SpecError(
        f"task.loss: {task.loss} needs a backend that answers {wanted[0]!r}; this one answers "
        f"{', '.join(sorted(answers))}"
    )


def query_for(
    task: TaskSpec,
    prompt: str,
    texts: Sequence[Mapping[str, Any]],
    *,
    backend: LLMBackend,
    references: Sequence[str] = (),
    payer: Payer | None = None,
) -> Query:
    """One prompt on one mini-batch, as a task puts it.

    Args:
        task: The task.
        prompt: The prompt's text.
        texts: The text fields of each example.
        backend: Who will be asked.
        references: The reference text of each example, for loss ``nll``.
        payer: Who pays.

    Raises:
        DataError: A text field is missing.
        SpecError: The backend cannot answer what the task's loss needs.
    """
    want = want_of(task, backend.answers)
    return Query(
        inputs=tuple(render(task, prompt, text) for text in texts),
        label_words=task.label_words,
        want=want,
        references=tuple(references) if want == "reference" else (),
        max_tokens=task.max_tokens if want == "text" else 0,
        payer=payer,
    )


def rows_of(query: Query, answer: Answer) -> tuple[LogProbs | str | None, ...]:
    """What an answer says of each input: log-probabilities, or the text; None where it failed."""
    if query.want != "text":
        return answer.log_probs
    # No longer than a message may carry, so that a loss does not hang on where it is computed.
    return tuple(None if text is None else text[:MAX_WRITTEN_CHARS] for text in answer.texts)


async def score_all(backend: LLMBackend, queries: Iterable[Query]) -> list[Answer]:
    """Asks several queries at once, and waits for all of them.

    What was paid for is never thrown away: when one fails, the others are still let end, so that
    a cache keeps their answers.

    Raises:
        BackendError: The gravest of the failures.
        BudgetError: A request could not be paid.
    """
    found = await asyncio.gather(
        *(backend.score(query) for query in queries), return_exceptions=True
    )
    failures = [result for result in found if isinstance(result, BaseException)]
    if failures:
        raise max(failures, key=_gravity)
    return [result for result in found if isinstance(result, Answer)]


def _gravity(failure: BaseException) -> int:
    """Higher for what a person must know first; a bug comes before all."""
    order = (BackendUnavailable, BackendBlocked, BudgetError, BackendError)
    ranks = {BackendUnavailable: 0, BackendError: 1, BudgetError: 2, BackendBlocked: 3}
    return next((ranks[kind] for kind in order if isinstance(failure, kind)), len(order))
