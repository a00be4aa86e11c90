"""The task and the slots of a new run, derived from public rows by the model that it is for."""

from __future__ import annotations

import itertools
import re
import string
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.backends.label_words import spellings_of, valid_words
from fedone_sdk.candidates import shipped_label_sets
from fedone_sdk.candidates.label_sets import label_families
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable
from fedone_sdk.task import Filling, Rendered, TaskSpec, render

_FORMS: Mapping[str, Mapping[str, Any]] = {
    "chat": {"chat": {"user": "{instruction}{demonstrations}{text}", "assistant": "{opening}"}},
    "cloze": {"template": "{context}{text}{opening}{mask}."},
    "plain": {"template": "{instruction}{demonstrations}{text}\n{opening}"},
}
_SLOTS = {"cloze": ("context", "opening")}

_NOUNS = (
    *("review", "email", "message", "question", "comment", "article", "story", "title", "request"),
    *("letter", "headline", "sentence", "report", "post", "answer", "description"),
)
_VAGUE = {
    *("text", "body", "content", "sentence", "document", "data", "input", "raw", "clean", "v1"),
    *("v2", "label", "labels", "class", "target", "y", "x", "tag", "type", "gold", "output", "id"),
    *("value", "name", "key", "code", "col", "column", "field", "str", "column1", "column2"),
}

_SCREEN_CHARS = 300
"""Characters of a text that the model reads to derive words."""

_WORDS_PER_LABEL = 24
_MOST_SETS = 4
_MAX_PERMUTED = 3
"""Up to so many labels without a name, shipped words are tried in every order."""

_TELLING = 0.95
"""Cross-entropy, as a share of that of a guess, up to which shipped words fit nameless labels."""

_DEMONSTRATION_CHARS = 1600
"""Characters of a block of demonstrations, which every query reads once."""

_SPELLS_SEVERAL = ("llama_cpp", "transformers", "vllm")

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a new run asks its model.

    Attributes:
        task: The section ``task`` without metric; texts are not cut yet.
        slots: The section ``prompt.slots``.
        several: Whether label words have several tokens.
        char_s: Seconds that the model takes for a character of text; None if it was not asked.
        unchecked: Why the label words could not be checked; None if they were.
    """

    task: dict[str, Any]
    slots: list[dict[str, Any]]
    several: bool
    char_s: float | None
    unchecked: str | None


async def draft(
    model: LLMBackend,
    kind: str,
    rows: Sequence[Mapping[str, str]],
    *,
    columns: tuple[str, str],
    public: str,
    text: str | None = None,
    aspect: str | None = None,
    words: Mapping[str, str] | None = None,
) -> Draft:
    """Derive a task and its slots.

    A model in this process reads the public rows: it chooses the noun for a text, and the label
    words, by how much likelier a word is after texts of its class than after others. A model behind
    an API is only asked what is free.

    Args:
        model: The model.
        kind: Its kind in RUN.yaml.
        rows: Public rows, with ``text`` and ``label``.
        columns: Names of the columns that these were.
        public: The file of the public rows, for demonstrations.
        text: A noun for a text; None derives it.
        aspect: A noun for what labels say; None derives it.
        words: Label words by label; None derives them.
    """
    reader = _Reader(model, rows)
    unchecked = None
    try:
        await reader.find_form()
        noun = text or _named(columns[0]) or await reader.noun()
        about = aspect or _named(columns[1])
        opening = f"{(about or 'category').capitalize()}:"
        reader.opening = f" {opening}" if reader.form == "cloze" else opening
        found = await _words(reader, words, kind)
    except (BackendBlocked, BackendUnavailable) as exc:
        unchecked = str(exc).splitlines()[0]
        noun, about = text or _named(columns[0]) or "text", aspect or _named(columns[1])
        found = _Words(words or {label: f" {label}" for label in reader.labels})
    about = about or _aspect_of(found.main)
    blank = not found.several and await reader.takes(found.main.values(), "")
    sets = [[*one.values()] for one in found.others]
    if blank:
        sets = [one for one in sets if await reader.takes(one, "")]
    if reader.form == "cloze":
        slots = _cloze_slots(noun, about)
    else:
        slots = _slots(reader, noun, about, public, blank=blank)
    if sets:
        slots.append({"name": "labels", "candidates": {"kind": "labels", "sets": sets}})
    return Draft(
        task={
            **_FORMS[reader.form],
            "description": {"text": noun, "aspect": about},
            "labels": dict(found.main),
        },
        slots=slots,
        several=found.several,
        char_s=reader.char_s,
        unchecked=unchecked,
    )


def _named(column: str) -> str | None:
    """Return what a column's name says of its content; None if it says nothing."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).casefold()
    kept = [word for word in re.split(r"[\W\d_]+", words) if word and word not in _VAGUE]
    return " ".join(kept)[:60] or None


def _aspect_of(words: Mapping[str, str]) -> str:
    family = shipped_label_sets(words)
    if any("positive" in str(one) or "yes" in str(one) for one in family):
        return "sentiment" if any("positive" in str(one) for one in family) else "answer"
    return "category"


class _Reader:
    """The model with the public rows.

    Attributes:
        form: How the model is asked.
        opening: The text before the answer.
        char_s: Seconds per character of its last reading.
    """

    def __init__(self, model: LLMBackend, rows: Sequence[Mapping[str, str]]) -> None:
        self._model = model
        self.rows = rows
        self.labels = sorted({row["label"] for row in rows})
        self.targets = np.array([self.labels.index(row["label"]) for row in rows])
        self.form = "chat"
        self.opening = ""
        self.char_s: float | None = None

    @property
    def reads(self) -> bool:
        """Whether the model may read rows at no cost."""
        return self._model.local

    async def find_form(self) -> None:
        """Find the form that the model takes."""
        for form in _FORMS:
            self.form = form
            try:
                await self._model.check((), self._asked({"text": ""}, "Answer:"))
            except (BackendBlocked, BackendUnavailable):
                raise
            except BackendError:
                if form == [*_FORMS][-1]:
                    raise
            else:
                return

    async def valid(self, words: Iterable[str], taken: Sequence[str] = ()) -> list[str]:
        """Return the words that are one token after the opening."""
        form = self._asked({"text": ""}, self.opening or "Answer:")
        return await valid_words(self._model, [*words], form, apart_from=taken)

    async def takes(self, words: Iterable[str], opening: str) -> bool:
        """Whether all words are one token after another opening."""
        try:
            await self._model.check(tuple(words), self._asked({"text": ""}, opening))
        except BackendError:
            return False
        return True

    async def read(self, words: Sequence[str], rows: Sequence[Mapping[str, str]]) -> _Floats:
        """Return the log-probabilities of words after rows, shape (rows, words)."""
        begin = time.perf_counter()
        inputs = tuple(self._asked(row, self.opening) for row in rows)
        answer = await self._model.score(Query(inputs=inputs, label_words=tuple(words)))
        chars = sum(len(row["text"][:_SCREEN_CHARS]) for row in rows)
        self.char_s = (time.perf_counter() - begin) / max(1, chars)
        return np.array(answer.log_probs)

    async def noun(self) -> str:
        """Return the noun that the rows make likelier than an empty text does."""
        if not self.reads:
            return "text"
        self.opening = " This is a" if self.form == "cloze" else "This is a"
        nouns = await self.valid(f" {noun}" for noun in _NOUNS)
        if len(nouns) < 2:
            return "text"
        some = self.rows[:: max(1, len(self.rows) // 16)]
        found = await self.read(nouns, [*some, {"text": ""}])
        lift = found[:-1].mean(axis=0) - found[-1]
        return nouns[int(lift.argmax())].strip()

    def _asked(self, row: Mapping[str, str], opening: str) -> Rendered:
        names = _SLOTS.get(self.form, ("instruction", "demonstrations", "opening"))
        labels = {"0": " a", "1": " b"}
        task = TaskSpec.model_validate({**_FORMS[self.form], "slots": names, "labels": labels})
        texts = (*[""] * (len(names) - 1), opening)
        return render(task, Filling(texts), {"text": row["text"][:_SCREEN_CHARS]})


@dataclass(frozen=True, slots=True)
class _Words:
    main: Mapping[str, str]
    others: Sequence[Mapping[str, str]] = ()
    several: bool = False


async def _words(reader: _Reader, given: Mapping[str, str] | None, kind: str) -> _Words:
    """Return the task's label words, and other sets."""
    labels = reader.labels
    meaning = {label: given[label] if given else label for label in labels}
    own = {label: await reader.valid(spellings_of(meaning[label])) for label in labels}
    if not reader.reads:
        main = _assigned({label: {w: -at for at, w in enumerate(own[label])} for label in labels})
        return await _completed(reader, main, meaning, kind)
    lexicon = [*itertools.chain(*own.values()), *_shipped(len(labels)), *_frequent(reader)]
    alike: dict[str, str] = {}
    for word in await reader.valid(lexicon):
        alike.setdefault(word.strip().casefold(), word)
    words = [*alike.values()]
    if len(words) < len(labels):
        return await _completed(reader, {}, meaning, kind)
    log_probs = await reader.read(words, reader.rows)
    inside = np.array([log_probs[reader.targets == at].mean(axis=0) for at in range(len(labels))])
    # Against the mean over classes, so that a frequent class does not count more.
    lift = inside - inside.mean(axis=0)
    column = {word: at for at, word in enumerate(words)}
    named = {
        label: {
            word: float(lift[row, column[word]])
            for one in own[label]
            if (word := alike[one.strip().casefold()]) and _says_something(meaning[label])
        }
        for row, label in enumerate(labels)
    }
    derived = _assigned(
        {
            label: {word: float(lift[row, at]) for at, word in enumerate(words)}
            for row, label in enumerate(labels)
        }
    )

    def known(word: str) -> bool:
        return word.strip().casefold() in alike

    def loss(chosen: Mapping[str, str]) -> float:
        """Return the cross-entropy of a set, with each word's mean taken off."""
        found = log_probs[:, [column[alike[chosen[label].strip().casefold()]] for label in labels]]
        found = found - found.mean(axis=0)
        found -= np.logaddexp.reduce(found, axis=1, keepdims=True)
        return float(-found[np.arange(len(found)), reader.targets].mean())

    main = _assigned(named)
    shipped = sorted(
        (one for one in _orders(labels, main) if all(map(known, one.values()))), key=loss
    )
    if not main and shipped and loss(shipped[0]) < _TELLING * np.log(len(labels)):
        main = shipped[0]
    found = await _completed(reader, main, meaning, kind, derived)
    others = [one for one in (*shipped, derived) if len(one) == len(labels) and one != found.main]
    return _Words(found.main, sorted(others, key=loss)[: _MOST_SETS - 1], found.several)


async def _completed(
    reader: _Reader,
    main: Mapping[str, str],
    meaning: Mapping[str, str],
    kind: str,
    derived: Mapping[str, str] | None = None,
) -> _Words:
    """Return label words for all labels: the found ones, whole names, derived ones, or codes."""
    labels = reader.labels
    if len(main) == len(labels):
        return _Words({label: main[label] for label in labels})
    if kind in _SPELLS_SEVERAL and all(map(_says_something, meaning.values())):
        whole = {label: " " + " ".join(re.findall(r"[^\W_]+", meaning[label])) for label in labels}
        if len({word.casefold() for word in whole.values()}) == len(labels):
            return _Words(whole, several=True)
    if derived and len(derived) == len(labels):
        rest = {label: {derived[label]: 0.0} for label in labels if label not in main}
        filled = {**main, **_assigned(rest, taken=main.values())}
        if len(filled) == len(labels):
            return _Words({label: filled[label] for label in labels})
    letters = string.ascii_uppercase
    pairs = map("".join, itertools.product(letters, repeat=2))
    codes: list[str] = []
    for name in itertools.chain(letters, pairs, _frequent(reader)):
        codes += await reader.valid([f" {name.strip()}"], taken=codes)
        if len(codes) == len(labels):
            return _Words(dict(zip(labels, codes, strict=True)))
    raise BackendError(f"the model has no {len(labels)} label words of one token each")


def _assigned(
    scores: Mapping[str, Mapping[str, float]], *, taken: Iterable[str] = ()
) -> dict[str, str]:
    """Return one word for each label, each once, the highest scores first."""
    pairs = sorted(
        ((score, label, word) for label, each in scores.items() for word, score in each.items()),
        key=lambda pair: -pair[0],
    )
    found: dict[str, str] = {}
    used = {word.strip().casefold() for word in taken}
    for _, label, word in pairs:
        if label not in found and word.strip().casefold() not in used:
            found[label] = word
            used.add(word.strip().casefold())
    return found


def _orders(labels: Sequence[str], main: Mapping[str, str]) -> Iterable[dict[str, str]]:
    """Return shipped sets: those of the labels' own words, or every order of those that fit."""
    if len(main) == len(labels):
        for own in shipped_label_sets({label: main[label] for label in labels}):
            yield dict(zip(labels, own, strict=True))
    elif len(labels) <= _MAX_PERMUTED:
        for words in itertools.chain(*label_families()):
            for order in itertools.permutations(words):
                if len(words) == len(labels):
                    yield {label: f" {word}" for label, word in zip(labels, order, strict=True)}


def _shipped(count: int) -> list[str]:
    return [
        f" {word}"
        for family in label_families()
        for words in family
        if len(words) == count
        for word in words
    ]


def _frequent(reader: _Reader) -> list[str]:
    """Return the words of the rows that are typical of one class."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in reader.rows:
        words = set(re.findall(r"[^\W\d_]{3,}", row["text"].lower()))
        counts[row["label"]].update(words)
    total = sum(counts.values(), Counter[str]())
    found = []
    for of_label in counts.values():
        typical = sorted(of_label, key=lambda w: (-(of_label[w] ** 2) / total[w], w))
        found += [f" {word}" for word in typical[:_WORDS_PER_LABEL]]
    return found


def _says_something(name: str) -> bool:
    return re.search(r"[^\W\d_]{2}", name) is not None


# Slots


def _slots(
    reader: _Reader, noun: str, about: str, public: str, *, blank: bool
) -> list[dict[str, Any]]:
    openings = [
        f"{about.capitalize()}:",
        "Answer:",
        "In one word, this is",
        f"The {about} of this {noun} is",
        f"This {noun} is about",
    ]
    slots: list[dict[str, Any]] = [
        {"name": "instruction", "candidates": {"kind": "instructions", "size": 6}}
    ]
    shots = [0, *(one for one in _shots(reader))]
    demonstrations: object = [""]
    if len(shots) > 1:
        demonstrations = {"kind": "demonstrations", "file": public, "shots": shots, "blocks": 2}
    slots.append({"name": "demonstrations", "candidates": demonstrations})
    slots.append({"name": "opening", "candidates": ["", *openings] if blank else openings})
    return slots


def _cloze_slots(noun: str, about: str) -> list[dict[str, Any]]:
    contexts = ["", f"{noun.capitalize()}: ", f"{about.capitalize()} of the {noun}: "]
    openings = [
        f" {about.capitalize()}:",
        " It was",
        " This is",
        " In summary, it is",
        " All in all,",
    ]
    return [
        {"name": "context", "candidates": contexts},
        {"name": "opening", "candidates": openings},
    ]


def _shots(reader: _Reader) -> list[int]:
    """Return numbers of shots: every class once and twice, within the length of a block."""
    rows = Counter(row["label"] for row in reader.rows)
    sizes = sorted(min(len(row["text"]), _SCREEN_CHARS) for row in reader.rows)
    size = sizes[len(sizes) // 2] + 20
    once = max(2, min(len(rows), 8))
    return [
        count
        for count in (once, 2 * once)
        if count * size <= _DEMONSTRATION_CHARS and -(-count // len(rows)) <= min(rows.values())
    ]
