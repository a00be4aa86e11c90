"""Use of a prompt: prediction of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedone_sdk.backends import LLMBackend, Prediction, query_for, score_all
from fedone_sdk.budget import Usage
from fedone_sdk.errors import SpecError
from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.task import Example, biased, form_of, predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A model's answers to examples.

    Attributes:
        labels: The label of each example; null if the model wrote no label word, or failed.
        scores: Each label's log-probability with the bias, in nats, by label; null if the model
            failed.
    """

    labels: tuple[str | None, ...]
    scores: tuple[dict[str, float] | None, ...]
    texts: tuple[str | None, ...]
    usage: Usage


async def label_examples(
    backend: LLMBackend,
    artefact: PromptArtefact,
    examples: Sequence[Example],
    *,
    batch_size: int | None = None,
    any_model: bool = False,
) -> Labelled:
    """Predicts the labels of examples with the artefact's prompt.

    Args:
        backend: The model, open.
        artefact: The prompt and its task.
        examples: The template's text fields, without labels.
        batch_size: Examples per query; None is that of the prompt's measurement.
        any_model: Whether to allow another model than the one the prompt was tuned for.
    """
    task = artefact.asked
    if task.loss == "nll":
        raise SpecError("task.loss: nll scores a text that is given; there is nothing to predict")
    await backend.check(task.label_words, form_of(task))
    if not any_model and artefact.model not in (None, backend.fingerprint):
        raise SpecError(
            f"model: is {backend.fingerprint!r}, the prompt was tuned for {artefact.model!r}"
        )
    size = batch_size or artefact.evaluation.batch_size
    batches = [examples[at : at + size] for at in range(0, len(examples), size)]
    queries = [query_for(task, artefact.prompt.prompt, batch, backend=backend) for batch in batches]
    answers = await score_all(backend, queries)
    return _labelled(Prediction.of(task, queries, answers, examples))


def _labelled(found: Prediction) -> Labelled:
    task, names = found.task, list(found.task.labels)
    labels: list[str | None] = []
    scores: list[dict[str, float] | None] = []
    texts: list[str | None] = []
    for row in found.rows:
        texts.append(row if isinstance(row, str) else None)
        if row is None or isinstance(row, str):
            labels.append(None)
            scores.append(None)
            continue
        index = predicted(task, row)
        labels.append(names[index] if index >= 0 else None)
        scores.append(dict(zip(names, biased(task, row), strict=True)))
    return Labelled(
        labels=tuple(labels), scores=tuple(scores), texts=tuple(texts), usage=found.usage
    )
