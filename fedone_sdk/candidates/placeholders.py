"""Functions that build a prompt from chosen candidates, and replace placeholders in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import product

from fedone_sdk.candidates.label_sets import label_words
from fedone_sdk.task import Filling, Rendered, TaskSpec, TextPrompt, form_of, render
from fedone_sdk.vocabulary import LABELS, Vocabulary

_QUOTES = "\"'`"
_OPENING = "([{<\u2018\u201c\u00ab"


def label_placeholder(label: str) -> str:
    """Return the placeholder of a class's label word in a candidate."""
    return f"{{label:{label}}}"


def fill(texts: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of slots with placeholders of label words and slots replaced.

    ``{label:KEY}`` becomes the label word of class KEY. After text the word is unchanged: with the
    word ``" great"``, ``It was{label:1}`` becomes ``It was great``. After white space, at the
    beginning, and after an opening quote or bracket the word loses its leading white space.

    ``{NAME}`` becomes the text of slot NAME, except in the text of slot NAME itself. In an inserted
    text, placeholders of label words are replaced, but placeholders of slots are not.

    Args:
        texts: The chosen candidate of each slot, by name, without the slot ``labels``.
        labels: The label word of each class, by label value, as it is spelled after text.
    """
    worded = {name: _replaced(text, labels, {}) for name, text in texts.items()}
    return {
        name: _replaced(text, labels, {other: worded[other] for other in texts if other != name})
        for name, text in texts.items()
    }


def _replaced(text: str, labels: Mapping[str, str], others: Mapping[str, str]) -> str:
    words = {label_placeholder(label): word for label, word in labels.items()}
    slots = {f"{{{name}}}": other for name, other in others.items()}
    # The longest key comes first: with labels `a` and `a}b`, one key is the beginning of the other.
    keys = sorted([*words, *slots], key=len, reverse=True)
    if "{" not in text or not keys:
        return text
    pieces: list[str] = []
    before, end = "", 0  # the last 2 characters of the result; how much of `text` was read
    for match in re.finditer("|".join(map(re.escape, keys)), text):
        plain, key = text[end : match.start()], match[0]
        before = (before + plain[-2:])[-2:]
        piece = slots[key] if key in slots else _word(words[key], before)
        before = (before + piece[-2:])[-2:]
        pieces += [plain, piece]
        end = match.end()
    return "".join([*pieces, text[end:]])


def _word(word: str, before: str) -> str:
    if before and before[-1] in _QUOTES:  # The quote is opening if no text precedes it.
        before = before[:-1]
    return word.lstrip() if not before or before[-1].isspace() or before[-1] in _OPENING else word


def prompt_of(
    task: TaskSpec,
    vocabulary: Vocabulary,
    indices: Iterable[int],
    changed: Mapping[str, str] | None = None,
) -> TextPrompt:
    """Return the prompt of some candidates, one index per position.

    Without slots, the prompt is the concatenation of the candidates. With slots, it is the filled
    text of each slot (`fill`); the texts of `changed`, by slot name, replace the candidates.
    """
    if not vocabulary.slots:
        return vocabulary.text(indices)
    texts = {**vocabulary.by_slot(indices), **(changed or {})}
    chosen = texts.pop(LABELS, None)
    words = () if chosen is None else label_words(chosen, len(task.labels))
    spelled = words or task.label_words
    if task.chat is not None:  # Spelled as `answer_word` spells them after text.
        spelled = tuple(f" {word.lstrip()}" for word in spelled)
    filled = fill(texts, dict(zip(task.labels, spelled, strict=True)))
    return Filling(tuple(filled.values()), words)


def no_prompt(task: TaskSpec, vocabulary: Vocabulary) -> TextPrompt:
    """Return the baseline "no prompt", which is an empty text in a run without slots.

    With slots, each slot has its blank candidate. A slot without a blank has its first candidate,
    which is what a user would write without tuning.
    """
    if not vocabulary.slots:
        return ""
    return prompt_of(
        task, vocabulary, [slot.blank or 0 for slot in vocabulary.slots for _ in range(slot.repeat)]
    )


def label_sets_of(task: TaskSpec, vocabulary: Vocabulary) -> tuple[tuple[str, ...], ...]:
    """Return the sets of label words in the slot ``labels``; without the slot, the task's words."""
    for slot in vocabulary.slots:
        if slot.name == LABELS:
            return tuple(label_words(text, len(task.labels)) for text in slot.candidates)
    return (task.label_words,)


def forms_of(task: TaskSpec, vocabulary: Vocabulary) -> tuple[Rendered, ...]:
    """Return inputs with empty fields, to check whether a model supports the label words.

    Label words have a leading space only after text (`answer_word`). If some candidates of the last
    slot end with text and others do not, there is one input for each case.
    """
    if not task.slots:
        return (form_of(task),)
    nothing = dict.fromkeys(task.fields, "")
    forms: dict[bool, Rendered] = {}
    for text in vocabulary.candidates_of(task.slots[-1]):
        texts = (*[""] * (len(task.slots) - 1), text)
        behind_text = bool(text) and not text[-1].isspace()
        forms.setdefault(behind_text, render(task, Filling(texts), nothing))
    return tuple(forms.values())


def label_checks(
    task: TaskSpec, vocabulary: Vocabulary
) -> tuple[tuple[tuple[str, ...], Rendered], ...]:
    """Return all pairs of label words and inputs (`forms_of`) that a model must support."""
    return tuple(product(label_sets_of(task, vocabulary), forms_of(task, vocabulary)))
