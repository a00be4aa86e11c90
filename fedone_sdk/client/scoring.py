"""The loss oracle: prompts and private examples in, one loss per prompt out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from fedone_sdk.backends.asking import query_for, rows_of, score_all
from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.backends.wrappers import BudgetedBackend
from fedone_sdk.budget import NOTHING, BudgetGuard, Usage
from fedone_sdk.errors import BackendError, BudgetError, FedOneError, SpecError
from fedone_sdk.messages import MAX_TEXT_CHARS, MIN_SCORED_SHARE, Array, Score, Scored, Scores
from fedone_sdk.task import (
    Example,
    LogProbs,
    ScoreFunction,
    TaskSpec,
    example_loss,
    references_of,
)

__all__ = ["BeforeSend", "Declining", "Losses", "Minibatch", "backend_losses", "gateway_losses"]

_log = structlog.get_logger(__name__)

BeforeSend = Callable[[str], "str | Awaitable[str | None] | None"]
"""Sees every text before it leaves the device; returns it, a redacted form, or None to veto."""


class Declining(FedOneError):
    """The work cannot be done well enough to be worth sending."""

    def __init__(self, reason: str, usage: Usage = NOTHING) -> None:
        self.reason, self.usage = reason, usage
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What scoring gave.

    Attributes:
        values: One mean loss per prompt.
        scored: What became of the examples.
        usage: What a backend of the client's own spent.
        model: Fingerprint of the model.
    """

    values: tuple[float, ...]
    scored: Scored
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The examples of one step that may leave the device.

    Attributes:
        texts: Text fields of each, after the hook.
        references: Reference text of each, after the hook, for loss ``nll``; else none.
        examples: The same examples whole; their labels stay on the device when the gateway scores.
        vetoed: Examples that the hook held back.
    """

    texts: tuple[dict[str, str], ...]
    references: tuple[str, ...]
    examples: tuple[Example, ...]
    vetoed: int

    @classmethod
    async def of(
        cls, task: TaskSpec, examples: Sequence[Example], before_send: BeforeSend | None
    ) -> Minibatch:
        """Applies the hook to the examples of a step.

        Raises:
            Declining: The hook held too many back.
        """
        # What the model must see passes the hook: for a reference text that is the label too.
        names = (*task.fields, task.label_field) if task.loss == "nll" else task.fields
        texts, kept_examples = [], []
        for example in examples:
            fields: dict[str, str | None] = {name: example[name] for name in names}
            if before_send is not None:
                fields = {name: await _passed(before_send, text) for name, text in fields.items()}
            kept = {name: text for name, text in fields.items() if text is not None}
            if len(kept) == len(fields):
                texts.append({name: kept[name] for name in task.fields})
                kept_examples.append({**example, **kept})
        batch = cls(
            texts=tuple(texts),
            references=references_of(task, kept_examples),
            examples=tuple(kept_examples),
            vetoed=len(examples) - len(texts),
        )
        batch.check(frozenset(), NOTHING)
        return batch

    def check(self, failed: frozenset[int], usage: Usage) -> Scored:
        """Counts what became of the examples.

        Raises:
            Declining: Too few were scored.
        """
        total = len(self.texts) + self.vetoed
        scored = len(self.texts) - len(failed)
        if not scored or scored < MIN_SCORED_SHARE * total:
            raise Declining(
                f"only {scored} of {total} examples could be scored "
                f"({len(failed)} failed, {self.vetoed} vetoed)",
                usage,
            )
        return Scored(scored=scored, failed=len(failed), vetoed=self.vetoed)

    def mean_loss(
        self,
        task: TaskSpec,
        rows: Sequence[LogProbs | str | None],
        failed: frozenset[int],
        score: ScoreFunction | None,
        usage: Usage,
    ) -> float:
        """Mean loss of one prompt over the examples that every prompt was scored on.

        Raises:
            Declining: The user's score function is broken.
        """
        try:
            losses = [
                example_loss(task, row, example, score)
                for index, (row, example) in enumerate(zip(rows, self.examples, strict=True))
                if index not in failed and row is not None
            ]
        except SpecError as exc:
            _log.warning("score function failed", reason=str(exc))
            cause = exc.__cause__
            # The server learns only the kind: what a function says may quote private text.
            reason = (
                exc.problems[0]
                if cause is None
                else f"task.score: the score function failed with {type(cause).__name__}"
            )
            raise Declining(reason, usage) from exc
        return sum(losses) / len(losses)


async def _passed(before_send: BeforeSend, text: Any) -> str | None:
    result = before_send(text)
    return await result if inspect.isawaitable(result) else result


async def gateway_losses(
    task: TaskSpec,
    batch: Minibatch,
    *,
    assignment_id: str,
    prompts: Array | None,
    ask: Callable[[Score], Awaitable[Scores]],
    score: ScoreFunction | None = None,
) -> Losses:
    """Scores prompts through the aggregator's gateway.

    Args:
        task: The run's task.
        batch: What may be sent.
        assignment_id: Whose lease pays.
        prompts: Shape (P, n); None means the assignment's own.
        ask: Sends the request.
        score: The user's function, for loss ``score``.

    Raises:
        Declining: The model failed on too many examples, or the score function did.
    """
    scores = await ask(
        Score(
            assignment_id=assignment_id,
            prompts=prompts,
            examples=batch.texts,
            references=batch.references,
        )
    )
    # An example counts for all prompts or for none: otherwise they would be compared on
    # different examples.
    failed = frozenset(example for _, example in scores.failed)
    counts = batch.check(failed, NOTHING)
    values = tuple(batch.mean_loss(task, rows, failed, score, NOTHING) for rows in _rows(scores))
    return Losses(values=values, scored=counts, usage=NOTHING, model=scores.model)


def _rows(scores: Scores) -> Sequence[Sequence[LogProbs | str]]:
    """Per prompt what the model answered to each example."""
    if scores.log_probs is None:
        return scores.texts
    num_prompts, batch_size, num_values = scores.log_probs.shape
    flat = scores.log_probs.values().tolist()
    width = batch_size * num_values
    return [
        [flat[at : at + num_values] for at in range(start, start + width, num_values)]
        for start in range(0, num_prompts * width, width)
    ]


async def backend_losses(
    task: TaskSpec,
    batch: Minibatch,
    *,
    prompts: Sequence[str],
    backend: LLMBackend,
    score: ScoreFunction | None = None,
) -> Losses:
    """Scores prompts with a backend on the device.

    A prompt that stands twice is asked once; it counts as two queries all the same.

    Args:
        task: The run's task.
        batch: What may be scored.
        prompts: The prompts' texts.
        backend: The device's model.
        score: The user's function, for loss ``score``.

    Raises:
        Declining: The model failed, or on too many examples, or the score function did.
        SpecError: The backend cannot answer what the task's loss needs.
    """
    queries = {
        prompt: query_for(task, prompt, batch.texts, backend=backend, references=batch.references)
        for prompt in prompts
    }
    # Counts every attempt, also of calls that fail, for the report to the server.
    bill = BudgetGuard(None, name="client")
    if not backend.metered:
        backend = BudgetedBackend(backend)
    usage = Usage(queries=len(prompts))
    try:
        answers = await score_all(
            backend, (replace(query, payer=bill) for query in queries.values())
        )
    except (BackendError, BudgetError) as exc:
        raise Declining(str(exc), usage + (await bill.account()).held) from exc
    usage += (await bill.account()).held
    rows = {
        prompt: rows_of(query, answer)
        for (prompt, query), answer in zip(queries.items(), answers, strict=True)
    }
    failed = frozenset(
        index for found in rows.values() for index, row in enumerate(found) if row is None
    )
    counts = batch.check(failed, usage)
    values = tuple(batch.mean_loss(task, rows[prompt], failed, score, usage) for prompt in prompts)
    return Losses(values=values, scored=counts, usage=usage, model=backend.fingerprint)


def usable(task: TaskSpec, example: Mapping[str, Any]) -> bool:
    """Whether an example has the task's text fields, of a fit length, and what its loss needs."""
    if not all(_fits(example.get(name)) for name in task.fields):
        return False
    label = example.get(task.label_field)
    if task.generates:
        return task.loss == "score" or (_fits(label) and label != "")
    return str(label) in task.labels


def _fits(text: object) -> bool:
    return isinstance(text, str) and len(text) <= MAX_TEXT_CHARS
