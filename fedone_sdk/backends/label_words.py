"""Label words that a model supports, with suggestions for others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import structlog

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.candidates import forms_of, label_sets
from fedone_sdk.errors import LabelWordError
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Rendered
from fedone_sdk.vocabulary import LABELS, Vocabulary

_log = structlog.get_logger(__name__)

_SUGGESTED = 3


async def check_label_words(
    backend: LLMBackend, words: tuple[str, ...], form: Rendered = ()
) -> None:
    """Check label words and form like `LLMBackend.check`, and report all wrong words."""
    try:
        await backend.check(words, form)
    except LabelWordError:
        wrong = []
        for position, word in enumerate(words):
            try:
                await backend.check((word,), form)
            except LabelWordError as exc:
                others = [*words[:position], *words[position + 1 :]]
                likely = _alike(word, position, words)
                suggestions = await valid_words(backend, likely, form, apart_from=others)
                wrong.append((exc.word, exc.tokens, exc.way_out, suggestions[:_SUGGESTED]))
        if not wrong:  # They do not fit together.
            raise
        also = [LabelWordError(*one) for one in wrong[1:]]
        raise LabelWordError(*wrong[0], also=also) from None


async def valid_words(
    backend: LLMBackend,
    words: Sequence[str],
    form: Rendered = (),
    *,
    apart_from: Sequence[str] = (),
) -> list[str]:
    """Return the valid label words of a model, each in one spelling, without those taken."""
    taken = {word.strip().casefold() for word in apart_from}
    valid = []
    for word in dict.fromkeys(words):
        if word.strip().casefold() in taken:
            continue
        try:
            await backend.check((word,), form)
        except LabelWordError:
            continue
        valid.append(word)
        taken.add(word.strip().casefold())
    return valid


def _alike(word: str, position: int, words: Sequence[str]) -> list[str]:
    sets = label_sets.shipped_label_sets({str(at): one for at, one in enumerate(words)})
    return [*spellings_of(word), *(each[position] for each in sets)]


def spellings_of(text: str) -> Iterator[str]:
    """Spellings of a text: whole and in parts, with a leading space and in lower case."""
    whole = " ".join(re.split(r"[\W_]+", text)).strip()
    for part in (whole, *whole.split(), text.strip()):
        if part:
            yield f" {part.lower()}"
            yield f" {part}"


async def usable_vocabulary(
    backend: LLMBackend | None, spec: RunSpec, vocabulary: Vocabulary
) -> Vocabulary:
    """Drop built-in sets of label words that a model does not support.

    User-defined sets are kept; the run rejects invalid ones at its start.
    """
    shipped = any(
        isinstance(source, label_sets.LabelsSource) and not source.sets
        for _, source in spec.prompt.sources
    )
    if backend is None or not shipped:
        return vocabulary
    dropped = []
    for candidate in vocabulary.candidates_of(LABELS)[1:]:  # The first set is the task's.
        try:
            for form in forms_of(spec.task, vocabulary):
                await backend.check(label_sets.label_words(candidate), form)
        except LabelWordError:
            dropped.append(candidate)
    if dropped:
        _log.info("label words dropped that the model does not take", sets=dropped)
    return vocabulary.without(LABELS, dropped)
