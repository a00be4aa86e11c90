"""The task and the slots of a new run (`fedone init`), derived from public rows with a model.

A form is a chat or template of ``draft.toml``. The opening is the text just before the answer.
"""

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
from fedone_sdk.vocabulary import special_token

_SCREEN_CHARS = 300
"""Maximum number of characters of a row's text that the model reads."""

FRAME_CHARS = 100
"""Assumed number of characters around a row's text in the model's input."""

_SHORTEST_CUT = 200
"""Smallest length to which a run cuts its texts, characters."""

_WORDS_PER_LABEL = 24
_MAX_SETS = 4
_PENALTY = 1000.0
"""Subtracted from the scores of words outside the label's name, so that they come last; nats."""

_MAX_PERMUTED = 3
"""Maximum number of labels for which the SDK's label words are tried in every order."""

_DEMONSTRATION_CHARS = 1000
"""Maximum length of a block of demonstrations, characters."""

_MULTI_TOKEN_KINDS = ("llama_cpp", "transformers")

_ANY_LABELS = {"0": " a", "1": " b"}
"""Labels of a form until the label words are known."""

_Floats = NDArray[np.float64]


@cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads(assets.path("draft.toml").read_text("utf-8"))


def _slots_of(form: str) -> dict[str, list[str]]:
    slots: dict[str, list[str]] = _shipped()["slots"]["cloze" if form == "cloze" else "answer"]
    return slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The task and the slots of a new run.

    Attributes:
        task: The section ``task``, without a metric and without a limit on the length of texts.
        multi_token: Whether label words have several tokens.
        char_s: Seconds that the model needs per character of text; None if not measured.
    """

    task: dict[str, Any]
    slots: dict[str, Any]
    multi_token: bool
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

    A model in this process returns the probabilities of words after the text of each public row. A
    label gets a word that is much more likely after its own texts than after other texts. A model
    behind an API gets only free requests.

    `rows` are the public rows, with the keys ``text`` and ``label``. `columns` are the original
    names of these keys. `public` is the file of the rows. `text` is a noun for a text, `aspect` a
    noun for what the label says, and `words` are the labels' meanings; None derives them.
    """
    reader = _Reader(model, rows)
    await reader.find_form()
    noun = text or _noun_of(columns[0]) or await reader.noun()
    about = aspect or _noun_of(columns[1])
    opening = f"{(about or 'category').capitalize()}:"
    reader.opening = f" {opening}" if reader.form == "cloze" else opening
    chosen = await _words(reader, words, kind)
    likely = {word.strip() for each in label_sets.shipped_label_sets(chosen.main) for word in each}
    about = about or ("sentiment" if "good" in likely else "category")
    blank = not chosen.multi_token and await reader.accepts(chosen.main.values(), "")
    sets = [[*words_of.values()] for words_of in chosen.others]
    if blank:
        sets = [label_set for label_set in sets if await reader.accepts(label_set, "")]
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
        meanings = words or {label: label for label in reader.labels}
        slots["codes"] = [*instructions.code_candidates(meanings)]
        form = json.loads(json.dumps(form).replace("{text}", "{codes}{text}"))
    task = {**form, "description": {"text": noun, "aspect": about}, "labels": chosen.main}
    return Draft(task=task, slots=slots, multi_token=chosen.multi_token, char_s=reader.char_s)


def _noun_of(column: str) -> str | None:
    """Return a noun for the content of a column, from its name; None for a vague name."""
    words = re.split(r"[\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).casefold())
    vague = {"", *_shipped()["vague"]}
    return " ".join(word for word in words if word not in vague)[:60] or None


class _Reader:
    """Reads the public rows with the model."""

    def __init__(self, model: LLMBackend, rows: Sequence[Mapping[str, str]]) -> None:
        self.model, self.rows = model, rows
        self.labels = sorted({row["label"] for row in rows})
        self.targets = np.array([self.labels.index(row["label"]) for row in rows])
        self.form = ""  # The key of the task's form in draft.toml.
        self.opening = "Answer:"  # The text before the answer.
        self.coded = False  # Whether the label words are letters.
        self.char_s: float | None = None  # Seconds per character of the last query.

    async def find_form(self) -> None:
        """Find a form that the model accepts; raise the model's error if it accepts none."""
        for self.form in _shipped()["forms"]:
            if await self.accepts(()):
                return
        await self.model.check((), self._input("", self.opening))

    async def valid(self, words: Iterable[str]) -> list[str]:
        """Return the words that the model can score after the opening, in one spelling each."""
        return await valid_words(self.model, [*words], self._input("", self.opening))

    async def accepts(self, words: Iterable[str], opening: str | None = None) -> bool:
        """Return whether the model can score words after an opening (by default the reader's)."""
        form = self._input("", self.opening if opening is None else opening)
        try:
            await self.model.check(tuple(words), form)
        except (BackendBlocked, BackendUnavailable):
            raise
        except BackendError:
            return False
        return True

    async def read(self, words: Sequence[str], texts: Sequence[str]) -> _Floats:
        """Return the log-probabilities of words after texts, shape (texts, words)."""
        began, cpu_began = time.perf_counter(), time.process_time()
        inputs = tuple(self._input(text, self.opening) for text in texts)
        answer = await self.model.score(Query(inputs=inputs, label_words=tuple(words)))
        chars = sum(len(text[:_SCREEN_CHARS]) + FRAME_CHARS for text in texts)
        # Other programs may delay the model; the processor time is then smaller.
        seconds = min(time.perf_counter() - began, time.process_time() - cpu_began)
        self.char_s = seconds / chars
        return np.array(answer.log_probs)

    async def noun(self) -> str:
        """Return the noun whose probability rises most if a row's text precedes it."""
        if not self.model.local:
            return "text"
        self.opening = " This is a" if self.form == "cloze" else "This is a"
        nouns = await self.valid(f" {noun}" for noun in _shipped()["nouns"])
        if len(nouns) < 2:
            return "text"
        texts = [row["text"] for row in self.rows[:: max(1, len(self.rows) // 16)]]
        log_probs = await self.read(nouns, [*texts, ""])
        lift = log_probs[:-1].mean(axis=0) - log_probs[-1]
        return nouns[int(lift.argmax())].strip()

    def _input(self, text: str, opening: str) -> Rendered:
        names = (*_slots_of(self.form),)
        form = {**_shipped()["forms"][self.form], "slots": names, "labels": _ANY_LABELS}
        texts = (*[""] * (len(names) - 1), opening)
        row = {"text": text[:_SCREEN_CHARS]}
        return render(TaskSpec.model_validate(form), Filling(texts), row)


class _Words(NamedTuple):
    main: dict[str, str]
    others: Sequence[dict[str, str]] = ()
    multi_token: bool = False


async def _words(reader: _Reader, given: Mapping[str, str] | None, kind: str) -> _Words:
    """Return the task's label words, and alternative sets.

    A label gets the word of its name that is most likely after its texts. If a label gets none, all
    labels get the first possible set of these: (1) whole names, if the model scores words of many
    tokens; (2) words of the SDK, if the labels are not words; (3) likely words; (4) letters.
    """
    labels, names = reader.labels, given or {label: label for label in reader.labels}
    if not reader.model.local:
        return _Words(await _hosted_words(reader, names))
    words_of_names = {label: await reader.valid(spellings_of(names[label])) for label in labels}
    has_names = all(re.search(r"[^\W\d_]{2}", names[label]) for label in labels)
    lexicon = [*itertools.chain(*words_of_names.values(), *_shipped_sets()), *_frequent(reader)]
    scores = await _WordScores.of(reader, lexicon)
    # Words of the names are preferred to all others.
    named = {
        label: {word: lifts[word] for word in words_of_names[label] if has_names}
        for label, lifts in scores.lifts.items()
    }
    derived = _assigned(
        {
            label: {word: lift - _PENALTY for word, lift in lifts.items()} | named[label]
            for label, lifts in scores.lifts.items()
        }
    )
    main = _assigned(named)
    fitting = sorted(filter(scores.covers, _orders(labels, main)), key=scores.loss)
    full_names = {label: " " + " ".join(re.findall(r"[^\W_]+", names[label])) for label in labels}
    distinct = has_names and len(set(full_names.values())) == len(labels)
    multi_token = not main and distinct and kind in _MULTI_TOKEN_KINDS
    if multi_token:
        main = full_names
    elif not main:
        main = fitting[0] if fitting and not has_names else derived or await _codes(reader)
    start = main if scores.covers(main) else derived
    others = [*fitting, _improved(scores, start)] if start else fitting
    # A set with a higher loss on the public rows would only waste queries.
    worst = scores.loss(start) if start == main else np.inf
    others = [words for words in others if words != main and scores.loss(words) <= worst]
    return _Words(main, sorted(others, key=scores.loss)[: _MAX_SETS - 1], multi_token)


async def _hosted_words(reader: _Reader, names: Mapping[str, str]) -> dict[str, str]:
    """Return words of the names, or letters, each of them one token of a hosted model."""
    labels = reader.labels
    single = {
        label: [word for word in spellings_of(names[label]) if " " not in word[1:]]
        for label in labels
    }
    first = {label: next(iter(single[label]), label) for label in labels}
    if len(set(first.values())) == len(labels) and await reader.accepts(first.values()):
        return first  # One request instead of one per word.
    ranks = {
        label: {word: -rank for rank, word in enumerate(await reader.valid(single[label]))}
        for label in labels
    }
    return _assigned(ranks) or await _codes(reader)


def _improved(scores: _WordScores, start: Mapping[str, str]) -> dict[str, str]:
    """Return a set in which words of `start` are replaced by words that lower the loss."""
    best = dict(start)
    for label, lifts in scores.lifts.items():
        for word in nlargest(_WORDS_PER_LABEL, lifts, key=lambda word: lifts[word]):
            trial = {**best, label: word}
            if word not in best.values() and scores.loss(trial) < scores.loss(best):
                best = trial
    return best


class _WordScores:
    """Log-probabilities of words after the public rows."""

    def __init__(self, reader: _Reader, words: Sequence[str], log_probs: _Floats) -> None:
        self._targets, self._of_word = reader.targets, dict(zip(words, log_probs.T, strict=True))
        inside = [log_probs[reader.targets == at].mean(axis=0) for at in range(len(reader.labels))]
        # By label: a word's mean log-probability after the label's texts, minus the mean of this
        # number over all labels, so that a frequent label does not count more.
        lifts = np.array(inside) - np.mean(inside, axis=0)
        self.lifts: dict[str, dict[str, float]] = {
            label: dict(zip(words, row.tolist(), strict=True))
            for label, row in zip(reader.labels, lifts, strict=True)
        }

    @classmethod
    async def of(cls, reader: _Reader, lexicon: Iterable[str]) -> _WordScores:
        words = await reader.valid(lexicon)
        return cls(reader, words, await reader.read(words, [row["text"] for row in reader.rows]))

    def covers(self, words: Mapping[str, str]) -> bool:
        return self._of_word.keys() >= {*words.values()}

    def loss(self, words: Mapping[str, str]) -> float:
        """Return the cross-entropy of a set; the log-probabilities are centred per word."""
        scores = np.array([self._of_word[words[label]] for label in self.lifts]).T
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
    raise BackendError(f"the model has fewer than {len(labels)} label words of one token")


def _assigned(scores: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return distinct words for the labels, highest scores first; {} if a label gets no word."""
    pairs = [(score, label, word) for label in scores for word, score in scores[label].items()]
    assigned: dict[str, str] = {}
    for _, label, word in sorted(pairs, key=lambda pair: -pair[0]):
        if label not in assigned and word not in assigned.values():
            assigned[label] = word
    return {label: assigned[label] for label in scores} if len(assigned) == len(scores) else {}


def _shipped_sets() -> list[list[str]]:
    families = label_sets.label_families()
    return [[f" {word}" for word in words] for family in families for words in family]


def _orders(labels: Sequence[str], main: Mapping[str, str]) -> Iterable[dict[str, str]]:
    """Return the SDK's sets that can replace `main`; if `main` is empty, all sets in all orders."""
    sets: Iterable[Sequence[str]] = label_sets.shipped_label_sets(main)
    if not main and len(labels) <= _MAX_PERMUTED:
        fitting = (words for words in _shipped_sets() if len(words) == len(labels))
        sets = itertools.chain.from_iterable(map(itertools.permutations, fitting))
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
    """Return numbers of examples per block: 0, and one or two per label if the block has room."""
    labels = dict.fromkeys((row["label"] for row in rows), 0)
    # Blocks contain different texts, and none with a special token. Texts may be cut.
    for label, text in {(row["label"], row["text"][:_SHORTEST_CUT]) for row in rows}:
        labels[label] += special_token(text) is None
    chars = min(median_high(len(row["text"]) for row in rows), _SCREEN_CHARS) + 20
    limit = min(_DEMONSTRATION_CHARS // chars, len(labels) * min(labels.values()))
    once = max(2, min(len(labels), 8))
    return [0, *(count for count in (once, 2 * once) if count <= limit)]
