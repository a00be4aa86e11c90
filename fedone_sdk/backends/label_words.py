"""Checks of label words: does a model support them, and do its answers contain them."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.backends.completions import spelling, token_spellings
from fedone_sdk.backends.request_form import SAMPLES_ADVICE
from fedone_sdk.budget import NOTHING
from fedone_sdk.candidates import forms_of, label_sets
from fedone_sdk.errors import LabelsNotShown, LabelWordError
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import Rendered
from fedone_sdk.vocabulary import LABELS, Vocabulary

_log = structlog.get_logger(__name__)

_SUGGESTED = 3

NUM_WATCHED = 64
"""Number of answers that are counted for each set of label words."""

_MAX_PER_DEVICE = NUM_WATCHED // 4
_MAJORITY = NUM_WATCHED // 2
_FEW = 8  # A warning is logged after this many answers if none of them has a label word.
_MAX_SETS = 256  # Sets of label words in memory; callers of a gateway may use different ones.
_MAX_NAMED = 5
# An error quotes the beginning of answers only if this many answers begin so. A rarer text could be
# a word of a private input.
_MIN_REPEATS = 3
_BEGINNING_WORDS = 3


async def check_label_words(
    backend: LLMBackend, words: tuple[str, ...], form: Rendered = ()
) -> None:
    """Check label words like `LLMBackend.check`, and report all wrong words in one error."""
    try:
        await backend.check(words, form)
    except LabelWordError:
        errors = []
        sets = label_sets.shipped_label_sets({str(at): word for at, word in enumerate(words)})
        for position, word in enumerate(words):
            try:
                await backend.check((word,), form)
            except LabelWordError as exc:
                others = [*words[:position], *words[position + 1 :]]
                similar = [*spellings_of(word), *(labels[position] for labels in sets)]
                valid = await valid_words(backend, similar, form, apart_from=others)
                errors.append((exc.word, exc.tokens, exc.way_out, valid[:_SUGGESTED]))
        if not errors:  # Each word alone is valid, but they conflict.
            raise
        first, *more = errors
        raise LabelWordError(*first, also=[LabelWordError(*error) for error in more]) from None


async def valid_words(
    backend: LLMBackend,
    words: Sequence[str],
    form: Rendered = (),
    *,
    apart_from: Sequence[str] = (),
) -> list[str]:
    """Return the supported words, without those that repeat another or one of `apart_from`."""
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


def spellings_of(text: str) -> Iterator[str]:
    """Yield a text and each of its words with a leading space, in lower case and as written."""
    words = " ".join(re.split(r"[\W_]+", text)).strip()
    for part in (words, *words.split(), text.strip()):
        if part:
            yield f" {part.lower()}"
            yield f" {part}"


async def usable_vocabulary(
    backend: LLMBackend | None, spec: RunSpec, vocabulary: Vocabulary
) -> Vocabulary:
    """Drop the built-in candidates of the slot ``labels`` that a model does not support.

    User-defined candidates are kept; a run with unsupported candidates is refused at its start.
    """
    shipped = any(
        isinstance(source, label_sets.LabelsSource) and not source.sets
        for _, source in spec.prompt.sources
    )
    if backend is None or not shipped:
        return vocabulary
    dropped = []
    for candidate in vocabulary.candidates_of(LABELS)[1:]:  # The first set has the task's words.
        try:
            for form in forms_of(spec.task, vocabulary):
                await backend.check(label_sets.label_words(candidate), form)
        except LabelWordError:
            dropped.append(candidate)
    if dropped:
        _log.info("label words that the model does not support are dropped", sets=dropped)
    return vocabulary.without_label_sets(dropped)


@dataclass(slots=True)
class _Count:
    """Counts of the answers to queries with one set of label words."""

    answers: int = 0
    unseen: int = 0  # Answers without any of the label words.
    beginnings: Counter[str] = field(default_factory=Counter)  # Their first words.
    seen: Counter[str] = field(default_factory=Counter)  # Number of answers with each label word.
    # For each label word: how many answers show a beginning of it, such as ' pos' of ' positive'.
    prefixed: Counter[str] = field(default_factory=Counter)
    devices: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @property
    def split(self) -> list[str]:
        """The label words of which most answers show a beginning, and no answer the whole word."""
        return [w for w, n in self.prefixed.items() if n > _MAJORITY and not self.seen[w]]

    @property
    def refused(self) -> bool:
        return self.unseen > _MAJORITY or bool(self.split)


class LabelWatch:
    """Refuses queries if most of the first answers have none of the label words.

    The first `NUM_WATCHED` answers for each set of label words are counted. Queries with these
    words are refused, until `reset`, in two cases:

    - Over half of these answers have none of the label words.
    - Over half of these answers show the beginning of a label word, and none shows the whole word.

    Args:
        written: Whether answers are written words; otherwise they are the tokens that an API shows.
    """

    def __init__(self, *, model: str, url: str, written: bool = False) -> None:
        self._model = model
        self._url = url
        self._written = written
        self._counts: OrderedDict[tuple[str, ...], _Count] = OrderedDict()

    def admit(self, words: tuple[str, ...]) -> None:
        """Raise `LabelsNotShown` if queries with these words are refused."""
        count = self._counts.get(words)
        if count is not None and count.refused:
            raise self._refusal(words, count)

    def note(
        self, words: tuple[str, ...], shown: Sequence[str], *, device: tuple[str, ...] | None = None
    ) -> None:
        """Count one answer: the tokens that the API shows, likeliest first, or the written word.

        At most `_MAX_PER_DEVICE` answers per device count, so that one device cannot block others.
        """
        count = self._counts.setdefault(words, _Count())
        self._counts.move_to_end(words)
        while len(self._counts) > _MAX_SETS:
            self._counts.popitem(last=False)
        if count.answers == NUM_WATCHED or count.refused:
            return
        if device is not None:
            if count.devices[device] == _MAX_PER_DEVICE:
                return
            count.devices[device] += 1
        count.answers += 1
        tokens = set().union(*map(token_spellings, shown))
        spelled = {word: spelling(word).rstrip() for word in words}
        seen = [word for word in words if spelled[word] in tokens]
        count.seen.update(seen)
        if not seen:
            count.unseen += 1
            count.beginnings[" ".join(shown[0].split(" ")[: _BEGINNING_WORDS + 1])] += 1
        if not self._written:
            others = tokens - {"", *spelled.values()}
            count.prefixed.update(
                word for word in words if any(map(spelled[word].startswith, others))
            )
        never = [word for word in words if not count.seen[word]]
        if count.answers == (_FEW if len(never) == len(words) else NUM_WATCHED) and never:
            _log.warning(
                "some of the label words are in no answer",
                model=self._model,
                answers=count.answers,
                words=never,
                effect="losses and accuracy are wrong for these labels",
                change="choose label words of one token that the model writes",
            )

    def reset(self) -> None:
        """Reset all counts."""
        self._counts.clear()

    def _refusal(self, words: tuple[str, ...], count: _Count) -> LabelsNotShown:
        common = [
            repr(text) for text, times in count.beginnings.most_common(3) if times >= _MIN_REPEATS
        ]
        split = [] if count.unseen > _MAJORITY else count.split
        named = ", ".join(map(repr, (split or words)[:_MAX_NAMED]))
        named += ", ..." if (split or words)[_MAX_NAMED:] else ""
        answers = f"of the first {count.answers} answers of model {self._model!r}"
        advice = "end the template with a request for one of these words and nothing else"
        if split:
            problem = (
                f"most {answers} show only the beginning of the label word {named}, which has "
                "several tokens: choose words of one token, such as ' A' and ' B' (the slot "
                f"{{name: codes, candidates: codes}} explains them), or {SAMPLES_ADVICE}"
            )
        elif self._written:
            problem = (
                f"{count.unseen} {answers} are none of the label words {named}, so they count as "
                f"wrong: {advice}, or set reasoning_effort: none for a model "
                "that reasons until its tokens are used up"
            )
        else:
            problem = (
                f"{count.unseen} {answers} show none of the label words {named} among the "
                "likeliest tokens, so their losses are meaningless: choose label words that the "
                f"model writes, {advice}, set api: completions for a base model or api: chat for "
                f"an instruct model, or {SAMPLES_ADVICE}"
            )
        return LabelsNotShown(
            problem,
            url=self._url,
            said=f"most often {', '.join(common)}" if common and not split else "",
            usage=NOTHING,
        )
