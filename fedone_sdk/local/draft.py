"""The task and the slots of a new run, derived from public rows by the model that it is for."""

from __future__ import annotations

import itertools
import json
import re
import string
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import nlargest
from statistics import median_high
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedone_sdk import assets
from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.backends.label_words import spellings_of, valid_words
from fedone_sdk.candidates import instructions, label_sets
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable
from fedone_sdk.task import Filling, Rendered, TaskSpec, render

_SCREEN_CHARS = 300
"""Characters of a text that the model reads to derive words."""

FRAME_CHARS = 100
"""Characters around a text that the model reads for each row."""

_WORDS_PER_LABEL = 24
_MOST_SETS = 4
_LAST = 1000.0
"""Nats, more than log-probabilities differ."""

_MAX_PERMUTED = 3
"""Up to so many labels without a name, shipped words are tried in every order."""

_DEMONSTRATION_CHARS = 1000
"""Characters of a block of demonstrations, which every query reads once."""

_SPELLS_SEVERAL = ("llama_cpp", "transformers")

_ANY_LABELS = {"0": " a", "1": " b"}
"""Labels of a form that is asked before the label words are known."""

_Floats = NDArray[np.float64]


@cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads(assets.path("draft.toml").read_text("utf-8"))


def _slots_of(form: str) -> dict[str, list[str]]:
    slots: dict[str, list[str]] = _shipped()["slots"]["cloze" if form == "cloze" else "answer"]
    return slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a new run asks its model.

    Attributes:
        task: The section ``task`` without metric; texts are not cut yet.
        slots: The candidates of each slot.
        several: Whether label words have several tokens.
        char_s: Seconds that the model takes for a character of text; None if it was not asked.
    """

    task: dict[str, Any]
    slots: dict[str, Any]
    several: bool
    char_s: float | None


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
    await reader.find_form()
    noun = text or _named(columns[0]) or await reader.noun()
    about = aspect or _named(columns[1])
    opening = f"{(about or 'category').capitalize()}:"
    reader.opening = f" {opening}" if reader.form == "cloze" else opening
    chosen = await _words(reader, words, kind)
    about = about or _aspect_of(chosen.main)
    blank = not chosen.several and await reader.takes(chosen.main.values(), "")
    sets = [[*one.values()] for one in chosen.others]
    if blank:
        sets = [one for one in sets if await reader.takes(one, "")]
    names = {"noun": noun, "about": about, "Noun": noun.capitalize(), "About": about.capitalize()}
    slots: dict[str, Any] = {
        slot: [text.format(**names) for text in texts]
        for slot, texts in _slots_of(reader.form).items()
    }
    if not blank:
        slots["opening"].remove("")
    if reader.form != "cloze":
        slots["instruction"] = {"kind": "instructions", "size": 6}
        if len(shots := _shots(rows)) > 1:
            source = {"kind": "demonstrations", "file": public}
            slots["demonstrations"] = {**source, "shots": shots, "blocks": 2}
    if sets:
        slots["labels"] = {"kind": "labels", "sets": sets}
    form = _shipped()["forms"][reader.form]
    if reader.coded and reader.form != "cloze":
        said = words or {label: label for label in reader.labels}
        slots["codes"] = [*instructions.code_candidates(said)]
        form = json.loads(json.dumps(form).replace("{text}", "{codes}{text}"))
    task = {**form, "description": {"text": noun, "aspect": about}, "labels": chosen.main}
    return Draft(task=task, slots=slots, several=chosen.several, char_s=reader.char_s)


def _named(column: str) -> str | None:
    """Return what a column's name says of its content; None if it says nothing."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).casefold()
    kept = [
        word for word in re.split(r"[\W\d_]+", words) if word and word not in _shipped()["vague"]
    ]
    return " ".join(kept)[:60] or None


def _aspect_of(words: Mapping[str, str]) -> str:
    likely = {word.strip() for words in label_sets.shipped_label_sets(words) for word in words}
    return "sentiment" if "good" in likely else "category"


class _Reader:
    """The model with the public rows.

    Attributes:
        form: How the model is asked.
        opening: The text before the answer.
        coded: Whether its label words are codes.
        char_s: Seconds per character of its last reading.
    """

    def __init__(self, model: LLMBackend, rows: Sequence[Mapping[str, str]]) -> None:
        self.model, self.rows = model, rows
        self.labels = sorted({row["label"] for row in rows})
        self.targets = np.array([self.labels.index(row["label"]) for row in rows])
        self.form, self.opening, self.coded = "", "Answer:", False
        self.char_s: float | None = None

    async def find_form(self) -> None:
        """Find the form that the model takes; raise its error if it takes none."""
        for self.form in _shipped()["forms"]:
            if await self.takes(()):
                return
        await self.model.check((), self._asked("", self.opening))

    async def valid(self, words: Iterable[str]) -> list[str]:
        """Return the words that are one token after the opening, each in one spelling."""
        return await valid_words(self.model, [*words], self._asked("", self.opening))

    async def takes(self, words: Iterable[str], opening: str | None = None) -> bool:
        """Whether all words are one token after the opening, or after another one."""
        form = self._asked("", self.opening if opening is None else opening)
        try:
            await self.model.check(tuple(words), form)
        except (BackendBlocked, BackendUnavailable):
            raise
        except BackendError:
            return False
        return True

    async def read(self, words: Sequence[str], texts: Sequence[str]) -> _Floats:
        """Return the log-probabilities of words after texts, shape (texts, words)."""
        began = time.perf_counter(), time.process_time()
        inputs = tuple(self._asked(text, self.opening) for text in texts)
        answer = await self.model.score(Query(inputs=inputs, label_words=tuple(words)))
        chars = sum(len(text[:_SCREEN_CHARS]) + FRAME_CHARS for text in texts)
        # Processor time where other programs delay the model.
        took = min(time.perf_counter() - began[0], time.process_time() - began[1])
        self.char_s = took / chars
        return np.array(answer.log_probs)

    async def noun(self) -> str:
        if not self.model.local:
            return "text"
        self.opening = " This is a" if self.form == "cloze" else "This is a"
        nouns = await self.valid(f" {noun}" for noun in _shipped()["nouns"])
        if len(nouns) < 2:
            return "text"
        some = [row["text"] for row in self.rows[:: max(1, len(self.rows) // 16)]]
        log_probs = await self.read(nouns, [*some, ""])
        lift = log_probs[:-1].mean(axis=0) - log_probs[-1]
        return nouns[int(lift.argmax())].strip()

    def _asked(self, text: str, opening: str) -> Rendered:
        names = (*_slots_of(self.form),)
        form = {**_shipped()["forms"][self.form], "slots": names, "labels": _ANY_LABELS}
        texts = (*[""] * (len(names) - 1), opening)
        row = {"text": text[:_SCREEN_CHARS]}
        return render(TaskSpec.model_validate(form), Filling(texts), row)


class _Words(NamedTuple):
    main: dict[str, str]
    others: Sequence[dict[str, str]] = ()
    several: bool = False


async def _words(reader: _Reader, given: Mapping[str, str] | None, kind: str) -> _Words:
    """Return the task's label words, and other sets.

    A label's word is one of its name, the one that its texts make likelier. If names are not enough
    a set is, in this order: the whole names, if the model takes several tokens; shipped words that
    fit the rows; words that the rows make likelier; letters.
    """
    labels, names = reader.labels, given or {label: label for label in reader.labels}
    local = reader.model.local
    spelled = {  # A label word of a hosted model is one word, as it must be one token.
        one: [w for w in spellings_of(names[one]) if local or " " not in w[1:]] for one in labels
    }
    if not local:
        first = {label: next(iter(spelled[label]), label) for label in labels}
        if len(set(first.values())) == len(labels) and await reader.takes(first.values()):
            return _Words(first)  # One request of a hosted model instead of one per word.
    own = {label: await reader.valid(spelled[label]) for label in labels}
    if not local:
        by_place = {label: {w: -at for at, w in enumerate(own[label])} for label in labels}
        return _Words(_assigned(by_place) or await _codes(reader))
    telling = all(re.search(r"[^\W\d_]{2}", names[label]) for label in labels)
    shipped = (
        f" {word}" for words in itertools.chain(*label_sets.label_families()) for word in words
    )
    seen = await _Seen.of(reader, [*itertools.chain(*own.values()), *shipped, *_frequent(reader)])
    # Words of the names first, then any other.
    named = {
        label: {word: lifts[word] for word in own[label] if telling}
        for label, lifts in seen.lifts.items()
    }
    derived = _assigned(
        {
            label: {word: lift - _LAST for word, lift in lifts.items()} | named[label]
            for label, lifts in seen.lifts.items()
        }
    )
    main = _assigned(named)
    fitting = sorted(filter(seen.knows, _orders(labels, main)), key=seen.loss)
    whole = {label: " " + " ".join(re.findall(r"[^\W_]+", names[label])) for label in labels}
    distinct = telling and len(set(whole.values())) == len(labels)
    several = not main and distinct and kind in _SPELLS_SEVERAL
    if several:
        main = whole
    elif not main:
        main = fitting[0] if fitting and not telling else derived or await _codes(reader)
    start = main if seen.knows(main) else derived
    others = [*fitting, _improved(seen, start)] if start else fitting
    # A set that is worse already here would only cost queries.
    worst = seen.loss(start) if start == main else np.inf
    others = [one for one in others if one != main and seen.loss(one) <= worst]
    return _Words(main, sorted(others, key=seen.loss)[: _MOST_SETS - 1], several)


def _improved(seen: _Seen, start: Mapping[str, str]) -> dict[str, str]:
    """Return a set in which each word that lowers the loss has replaced the label's own."""
    best = dict(start)
    for label, lifts in seen.lifts.items():
        for word in nlargest(_WORDS_PER_LABEL, lifts, key=lambda word: lifts[word]):
            trial = {**best, label: word}
            if word not in best.values() and seen.loss(trial) < seen.loss(best):
                best = trial
    return best


class _Seen:
    """How likely words are after the public rows.

    Attributes:
        lifts: By label, how much likelier each word is after its texts than after others, nats.
    """

    def __init__(self, reader: _Reader, words: Sequence[str], log_probs: _Floats) -> None:
        self._targets, self._of_word = reader.targets, dict(zip(words, log_probs.T, strict=True))
        inside = [log_probs[reader.targets == at].mean(axis=0) for at in range(len(reader.labels))]
        # Against the mean over classes, so that a frequent class does not count more.
        lifts = np.array(inside) - np.mean(inside, axis=0)
        self.lifts: dict[str, dict[str, float]] = {
            label: dict(zip(words, row.tolist(), strict=True))
            for label, row in zip(reader.labels, lifts, strict=True)
        }

    @classmethod
    async def of(cls, reader: _Reader, lexicon: Iterable[str]) -> _Seen:
        """Ask for the words of a lexicon that are valid."""
        words = await reader.valid(lexicon)
        return cls(reader, words, await reader.read(words, [row["text"] for row in reader.rows]))

    def knows(self, chosen: Mapping[str, str]) -> bool:
        """Whether all words of a set were asked for."""
        return self._of_word.keys() >= {*chosen.values()}

    def loss(self, chosen: Mapping[str, str]) -> float:
        """Return the cross-entropy of a set, with each word's mean taken off."""
        scores = np.array([self._of_word[chosen[label]] for label in self.lifts]).T
        scores -= scores.mean(axis=0)
        scores -= np.logaddexp.reduce(scores, axis=1, keepdims=True)
        return float(-scores[np.arange(len(scores)), self._targets].mean())


async def _codes(reader: _Reader) -> dict[str, str]:
    letters, labels = string.ascii_uppercase, reader.labels
    codes: list[str] = []
    for name in (*letters, *map("".join, itertools.product(letters, repeat=2))):
        codes += await reader.valid([f" {name}"])
        if len(codes) == len(labels):
            reader.coded = True
            return dict(zip(labels, codes, strict=True))
    raise BackendError(f"the model has no {len(labels)} label words of one token each")


def _assigned(scores: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return a word for each label, each once, the highest scores first; none if one has none."""
    pairs = [(score, label, word) for label in scores for word, score in scores[label].items()]
    assigned: dict[str, str] = {}
    for _, label, word in sorted(pairs, key=lambda pair: -pair[0]):
        if label not in assigned and word not in assigned.values():
            assigned[label] = word
    return {label: assigned[label] for label in scores} if len(assigned) == len(scores) else {}


def _orders(labels: Sequence[str], main: Mapping[str, str]) -> Iterable[dict[str, str]]:
    """Return shipped sets: those of the labels' own words, or every order of those that fit."""
    sets: Iterable[Sequence[str]] = label_sets.shipped_label_sets(main)
    if not main and len(labels) <= _MAX_PERMUTED:
        every = [
            [f" {word}" for word in words]
            for words in itertools.chain(*label_sets.label_families())
        ]
        fit = (words for words in every if len(words) == len(labels))
        sets = itertools.chain.from_iterable(map(itertools.permutations, fit))
    return (dict(zip(labels, words, strict=True)) for words in sets)


def _frequent(reader: _Reader) -> list[str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in reader.rows:
        counts[row["label"]].update(set(re.findall(r"[^\W\d_]{3,}", row["text"].lower())))
    total = sum(counts.values(), Counter[str]())
    frequent: list[str] = []
    for of_label in counts.values():
        typical = sorted(of_label, key=lambda word: (-(of_label[word] ** 2) / total[word], word))
        frequent += [f" {word}" for word in typical[:_WORDS_PER_LABEL]]
    return frequent


def _shots(rows: Sequence[Mapping[str, str]]) -> list[int]:
    """Return numbers of shots: every class once and twice, within the length of a block."""
    labels = Counter(row["label"] for row in rows)
    chars = min(median_high(len(row["text"]) for row in rows), _SCREEN_CHARS) + 20
    once, most = max(2, min(len(labels), 8)), _DEMONSTRATION_CHARS // chars
    fewest = len(labels) * min(labels.values())
    return [0, *(count for count in (once, 2 * once) if count <= min(most, fewest))]
