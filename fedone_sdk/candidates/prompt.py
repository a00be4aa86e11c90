"""The prompt that chosen candidates make."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from fedone_sdk.candidates.fill import fill
from fedone_sdk.candidates.label_sets import label_words
from fedone_sdk.task import Filling, Rendered, TaskSpec, TextPrompt, form_of, render
from fedone_sdk.vocabulary import LABELS, Vocabulary


def prompt_of(task: TaskSpec, vocabulary: Vocabulary, indices: Iterable[int]) -> TextPrompt:
    """Return the prompt of these candidates, one index per position.

    Args:
        task: The task.
        vocabulary: The candidates.
        indices: Shape (n,).

    Returns:
        Their concatenation; with slots, the text of each slot, with placeholders of label words
        and other slots replaced (`fill`).

    Raises:
        IndexError: An index is not one of its position's candidates.
        ValueError: The candidate of the slot ``labels`` is not a set of the task's label words.
    """
    if not vocabulary.slots:
        return vocabulary.text(indices)
    texts = vocabulary.by_slot(indices)
    chosen = texts.pop(LABELS, None)
    words = () if chosen is None else label_words(chosen, len(task.labels))
    spelled = words or task.label_words
    if task.chat is not None:  # Spelled as `answer_word` spells them after text.
        spelled = tuple(f" {word.lstrip()}" for word in spelled)
    filled = fill(texts, dict(zip(task.labels, spelled, strict=True)))
    return Filling(tuple(filled.values()), words)


def no_prompt(task: TaskSpec, vocabulary: Vocabulary) -> TextPrompt:
    """Return "no prompt": the prompt without any tuning.

    It is an empty text. With slots, each slot is blank if possible, or else has its first
    candidate, which is what a user would write without tuning.
    """
    if not vocabulary.slots:
        return ""
    return prompt_of(
        task,
        vocabulary,
        [slot.blank or 0 for slot in vocabulary.slots for _ in range(slot.repeat)],
    )


def label_sets(task: TaskSpec, vocabulary: Vocabulary) -> tuple[tuple[str, ...], ...]:
    """Return all sets of label words of a prompt: those of the slot ``labels``, or the task's.

    Raises:
        ValueError: A candidate of the slot is not a set of the task's label words.
    """
    for slot in vocabulary.slots:
        if slot.name == LABELS:
            return tuple(label_words(text, len(task.labels)) for text in slot.candidates)
    return (task.label_words,)


def forms_of(task: TaskSpec, vocabulary: Vocabulary) -> tuple[Rendered, ...]:
    """Return the task's inputs without content, to check the label words that follow them.

    After text a label word may have a leading space; at the beginning of an answer it has none
    (`answer_word`). There is one form for a last slot that is empty or ends in white space, and one
    for a last slot that ends in text, if there are such candidates.
    """
    if not task.slots:
        return (form_of(task),)
    nothing = dict.fromkeys(task.fields, "")
    found: dict[bool, Rendered] = {}
    for text in vocabulary.candidates_of(task.slots[-1]):
        texts = (*[""] * (len(task.slots) - 1), text)
        behind_text = bool(text) and not text[-1].isspace()
        found.setdefault(behind_text, render(task, Filling(texts), nothing))
    return tuple(found.values())


def label_checks(
    task: TaskSpec, vocabulary: Vocabulary
) -> tuple[tuple[tuple[str, ...], Rendered], ...]:
    """Return each set of label words with each form of the task, for a check against a model.

    Raises:
        ValueError: A candidate of the slot ``labels`` is not a set of the task's label words.
    """
    return tuple(product(label_sets(task, vocabulary), forms_of(task, vocabulary)))
