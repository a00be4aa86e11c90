"""The loss oracle: prompts and private examples in, one loss per prompt out."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedone_sdk.backends.base import LLMBackend, Query
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendError, FedOneError
from fedone_sdk.messages import MAX_TEXT_CHARS, MIN_SCORED_SHARE, Array, Score, Scored, Scores
from fedone_sdk.task import Example, TaskSpec, label_loss, render, target_of

__all__ = ["BeforeSend", "Declining", "Losses", "Minibatch", "backend_losses", "gateway_losses"]

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
        targets: Label indices; these stay on the device when the gateway scores.
        vetoed: Examples that the hook held back.
    """

    texts: tuple[dict[str, str], ...]
    targets: tuple[int, ...]
    vetoed: int

    @classmethod
    async def of(
        cls, task: TaskSpec, examples: Sequence[Example], before_send: BeforeSend | None
    ) -> Minibatch:
        """Applies the hook to the examples of a step.

        Raises:
            Declining: The hook held too many back.
        """
        texts, targets = [], []
        for example in examples:
            fields: dict[str, str | None] = {name: example[name] for name in task.fields}
            if before_send is not None:
                fields = {name: await _passed(before_send, text) for name, text in fields.items()}
            kept = {name: text for name, text in fields.items() if text is not None}
            if len(kept) == len(fields):
                texts.append(kept)
                targets.append(target_of(task, example))
        batch = cls(texts=tuple(texts), targets=tuple(targets), vetoed=len(examples) - len(texts))
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
        self, task: TaskSpec, rows: Sequence[Sequence[float] | None], failed: frozenset[int]
    ) -> float:
        """Mean loss of one prompt over the examples that every prompt was scored on."""
        losses = [
            label_loss(task, row, target)
            for index, (row, target) in enumerate(zip(rows, self.targets, strict=True))
            if index not in failed and row is not None
        ]
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
) -> Losses:
    """Scores prompts through the aggregator's gateway.

    Args:
        task: The run's task.
        batch: What may be sent.
        assignment_id: Whose lease pays.
        prompts: Shape (P, n); None means the assignment's own.
        ask: Sends the request.

    Raises:
        Declining: The model failed on too many examples.
    """
    scores = await ask(Score(assignment_id=assignment_id, prompts=prompts, examples=batch.texts))
    num_prompts, batch_size, num_labels = scores.log_probs.shape
    flat = scores.log_probs.values().tolist()
    # An example counts for all prompts or for none: otherwise they would be compared on
    # different examples.
    failed = frozenset(example for _, example in scores.failed)
    counts = batch.check(failed, NOTHING)
    width = batch_size * num_labels
    values = []
    for start in range(0, num_prompts * width, width):
        rows = [flat[at : at + num_labels] for at in range(start, start + width, num_labels)]
        values.append(batch.mean_loss(task, rows, failed))
    return Losses(values=tuple(values), scored=counts, usage=NOTHING, model=scores.model)


async def backend_losses(
    task: TaskSpec, batch: Minibatch, *, prompts: Sequence[str], backend: LLMBackend
) -> Losses:
    """Scores prompts with a backend on the device.

    A prompt that stands twice is asked once; it counts as two queries all the same.

    Raises:
        Declining: The model failed on too many examples.
    """
    answers: dict[str, tuple[tuple[float, ...] | None, ...]] = {}
    usage = Usage(queries=len(prompts))
    for prompt in prompts:
        if prompt in answers:
            continue
        query = Query(
            inputs=tuple(render(task, prompt, text) for text in batch.texts),
            label_words=task.label_words,
        )
        try:
            answer = await backend.score(query)
        except BackendError as exc:
            # What the failed call cost is unknown, so it is reported in full.
            worst = backend.worst_case(len(batch.texts)).without_queries()
            raise Declining(str(exc), usage + worst) from exc
        usage += answer.usage.without_queries()
        answers[prompt] = answer.log_probs
    failed = frozenset(
        index for rows in answers.values() for index, row in enumerate(rows) if row is None
    )
    counts = batch.check(failed, usage)
    values = tuple(batch.mean_loss(task, answers[prompt], failed) for prompt in prompts)
    return Losses(values=values, scored=counts, usage=usage, model=backend.fingerprint)


def usable(task: TaskSpec, example: Mapping[str, Any]) -> bool:
    """Whether an example has the task's text fields, of a fit length, and one of its labels."""
    texts = (example.get(name) for name in task.fields)
    return all(isinstance(text, str) and len(text) <= MAX_TEXT_CHARS for text in texts) and (
        str(example.get(task.label_field)) in task.labels
    )
