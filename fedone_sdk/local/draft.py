"""The task and the slots of a new run, derived from public rows by the model that it is for."""

from __future__ import annotations

import itertools
import re
import string
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk import assets
from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.backends.label_words import spellings_of, valid_words
from fedone_sdk.candidates import shipped_label_sets
from fedone_sdk.candidates.label_sets import label_families
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

_SPELLS_SEVERAL = ("llama_cpp", "transformers", "vllm")

_Floats = NDArray[np.float64]


@cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads(assets.path("draft.toml").read_text("utf-8"))


def _slots_of(form: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = _shipped()["slots"]["cloze" if form == "cloze" else "answer"]
    return found


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
    found = await _words(reader, words, kind)
    about = about or _aspect_of(found.main)
    blank = not found.several and await reader.takes(found.main.values(), "")
    sets = [[*one.values()] for one in found.others]
    if blank:
        sets = [one for one in sets if await reader.takes(one, "")]
    slots = _slots(reader.form, noun, about, blank=blank)
    if "instruction" in slots:
        slots["instruction"] = {"kind": "instructions", "size": 6}
    shots = _shots(reader)
    if "demonstrations" in slots and len(shots) > 1:
        kind_of = {"kind": "demonstrations", "file": public}
        slots["demonstrations"] = {**kind_of, "shots": shots, "blocks": 2}
    if sets:
        slots["labels"] = {"kind": "labels", "sets": sets}
    return Draft(
        task={
            **_shipped()["forms"][reader.form],
            "description": {"text": noun, "aspect": about},
            "labels": dict(found.main),
        },
        slots=slots,
        several=found.several,
        char_s=reader.char_s,
    )


def _named(column: str) -> str | None:
    """Return what a column's name says of its content; None if it says nothing."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).casefold()
    kept = [
        word for word in re.split(r"[\W\d_]+", words) if word and word not in _shipped()["vague"]
    ]
    return " ".join(kept)[:60] or None


def _aspect_of(words: Mapping[str, str]) -> str:
    likely = {word.strip() for words in shipped_label_sets(words) for word in words}
    return "sentiment" if "good" in likely else "category"


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
        forms = [*_shipped()["forms"]]
        for form in forms:
            self.form = form
            try:
                await self._model.check((), self._asked({"text": ""}, "Answer:"))
            except (BackendBlocked, BackendUnavailable):
                raise
            except BackendError:
                if form == forms[-1]:
                    raise
            else:
                return

    async def valid(self, words: Iterable[str], taken: Sequence[str] = ()) -> list[str]:
        """Return the words that are one token after the opening."""
        form = self._asked({"text": ""}, self.opening or "Answer:")
        return await valid_words(self._model, [*words], form, apart_from=taken)

    async def takes(self, words: Iterable[str], opening: str | None = None) -> bool:
        """Whether all words are one token after the opening, or after another one."""
        form = self._asked({"text": ""}, self.opening if opening is None else opening)
        try:
            await self._model.check(tuple(words), form)
        except BackendError:
            return False
        return True

    async def read(self, words: Sequence[str], rows: Sequence[Mapping[str, str]]) -> _Floats:
        """Return the log-probabilities of words after rows, shape (rows, words)."""
        began = time.perf_counter(), time.process_time()
        inputs = tuple(self._asked(row, self.opening) for row in rows)
        answer = await self._model.score(Query(inputs=inputs, label_words=tuple(words)))
        chars = sum(len(row["text"][:_SCREEN_CHARS]) + FRAME_CHARS for row in rows)
        # Processor time where other programs delay the model.
        took = min(time.perf_counter() - began[0], time.process_time() - began[1])
        self.char_s = took / max(1, chars)
        return np.array(answer.log_probs)

    async def noun(self) -> str:
        """Return the noun that the rows make likelier than an empty text does."""
        if not self.reads:
            return "text"
        self.opening = " This is a" if self.form == "cloze" else "This is a"
        nouns = await self.valid(f" {noun}" for noun in _shipped()["nouns"])
        if len(nouns) < 2:
            return "text"
        some = self.rows[:: max(1, len(self.rows) // 16)]
        found = await self.read(nouns, [*some, {"text": ""}])
        lift = found[:-1].mean(axis=0) - found[-1]
        return nouns[int(lift.argmax())].strip()

    def _asked(self, row: Mapping[str, str], opening: str) -> Rendered:
        names = (*_slots_of(self.form),)
        labels = {"0": " a", "1": " b"}
        task = TaskSpec.model_validate(
            {**_shipped()["forms"][self.form], "slots": names, "labels": labels}
        )
        texts = (*[""] * (len(names) - 1), opening)
        return render(task, Filling(texts), {"text": row["text"][:_SCREEN_CHARS]})


@dataclass(frozen=True, slots=True)
class _Words:
    main: dict[str, str]
    others: Sequence[dict[str, str]] = ()
    several: bool = False


async def _words(reader: _Reader, given: Mapping[str, str] | None, kind: str) -> _Words:
    """Return the task's label words, and other sets.

    A label's word is one of its name, the one that its texts make likelier. If names are not enough
    a set is, in this order: the whole names, if the model takes several tokens; shipped words that
    fit the rows; words that the rows make likelier; letters.
    """
    labels = reader.labels
    meaning = {label: given[label] if given else label for label in labels}
    if not reader.reads:
        first = {label: next(spellings_of(meaning[label]), label) for label in labels}
        if len(set(first.values())) == len(labels) and await reader.takes(first.values()):
            return _Words(first)  # One request of a hosted model instead of one per word.
    own = {label: await reader.valid(spellings_of(meaning[label])) for label in labels}
    telling = all(map(_says_something, meaning.values()))
    whole = {label: " " + " ".join(re.findall(r"[^\W_]+", meaning[label])) for label in labels}
    several = kind in _SPELLS_SEVERAL and telling
    if not reader.reads:
        main = _assigned({label: {w: -at for at, w in enumerate(own[label])} for label in labels})
        if len(main) == len(labels):
            return _Words(main)
        return _Words(whole, several=True) if several else _Words(await _codes(reader))
    shipped = [word for words in itertools.chain(*label_families()) for word in words]
    lexicon = [*itertools.chain(*own.values()), *(f" {word}" for word in shipped)]
    seen = await _Seen.of(reader, [*lexicon, *_frequent(reader)])
    named = {label: seen.lifts(label, own[label]) if telling else {} for label in labels}
    # Words of the names first, then any other.
    derived = _assigned(
        {
            label: {word: lift - _LAST for word, lift in seen.lifts(label, seen.words).items()}
            | named[label]
            for label in labels
        }
    )
    fitting = sorted(filter(seen.knows, _orders(labels, _assigned(named))), key=seen.loss)
    main = _assigned(named)
    several = several and len(main) < len(labels) and len(set(whole.values())) == len(labels)
    if len(main) < len(labels):
        if several:
            main = whole
        elif not telling and fitting:
            main = fitting[0]
        else:
            main = derived if len(derived) == len(labels) else await _codes(reader)
    start = main if seen.knows(main) else derived
    others = [*fitting, _improved(seen, start)] if len(start) == len(labels) else fitting
    # A set that is worse already here would only cost queries.
    worst = seen.loss(start) if start == main else np.inf
    others = [one for one in others if one != main and seen.loss(one) <= worst]
    return _Words(main, sorted(others, key=seen.loss)[: _MOST_SETS - 1], several)


def _improved(seen: _Seen, start: Mapping[str, str]) -> dict[str, str]:
    """Return a set in which each word that lowers the loss has replaced the label's own."""
    best = dict(start)
    for label in start:
        lifts = seen.lifts(label, seen.words)
        for word in sorted(lifts, key=lambda word: -lifts[word])[:_WORDS_PER_LABEL]:
            trial = {**best, label: word}
            if word not in best.values() and seen.loss(trial) < seen.loss(best):
                best = trial
    return best


class _Seen:
    """How likely words are after the public rows.

    Attributes:
        words: Valid label words, no two with one spelling.
    """

    def __init__(self, reader: _Reader, words: Sequence[str], log_probs: _Floats) -> None:
        self.words = words
        self._labels, self._targets, self._log_probs = reader.labels, reader.targets, log_probs
        self._column = {word.strip().casefold(): at for at, word in enumerate(words)}
        inside = [log_probs[reader.targets == at].mean(axis=0) for at in range(len(reader.labels))]
        # Against the mean over classes, so that a frequent class does not count more.
        self._lift = np.array(inside) - np.mean(inside, axis=0)

    @classmethod
    async def of(cls, reader: _Reader, lexicon: Iterable[str]) -> _Seen:
        """Ask for the words of a lexicon that are valid."""
        alike: dict[str, str] = {}
        for word in await reader.valid(lexicon):
            alike.setdefault(word.strip().casefold(), word)
        words = [*alike.values()]
        return cls(reader, words, await reader.read(words, reader.rows))

    def knows(self, chosen: Mapping[str, str]) -> bool:
        """Whether all words of a set were asked for."""
        return all(word.strip().casefold() in self._column for word in chosen.values())

    def lifts(self, label: str, words: Iterable[str]) -> dict[str, float]:
        """Return how much likelier words are after a label's texts than after others, nats."""
        row = self._lift[self._labels.index(label)]
        columns = {self._column[word.strip().casefold()] for word in words}
        return {self.words[at]: float(row[at]) for at in columns}

    def loss(self, chosen: Mapping[str, str]) -> float:
        """Return the cross-entropy of a set, with each word's mean taken off."""
        words = (chosen[label].strip().casefold() for label in self._labels)
        found = self._log_probs[:, [self._column[word] for word in words]]
        found = found - found.mean(axis=0)
        found -= np.logaddexp.reduce(found, axis=1, keepdims=True)
        return float(-found[np.arange(len(found)), self._targets].mean())


async def _codes(reader: _Reader) -> dict[str, str]:
    letters, labels = string.ascii_uppercase, reader.labels
    pairs = map("".join, itertools.product(letters, repeat=2))
    codes: list[str] = []
    for name in itertools.chain(letters, pairs, _frequent(reader)):
        codes += await reader.valid([f" {name.strip()}"], taken=codes)
        if len(codes) == len(labels):
            return dict(zip(labels, codes, strict=True))
    raise BackendError(f"the model has no {len(labels)} label words of one token each")


def _assigned(scores: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Return one word for each label, each once, the highest scores first, in label order."""
    pairs = [(score, label, word) for label in scores for word, score in scores[label].items()]
    found: dict[str, str] = {}
    for _, label, word in sorted(pairs, key=lambda pair: -pair[0]):
        if label not in found and word not in found.values():
            found[label] = word
    return {label: found[label] for label in scores if label in found}


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


def _frequent(reader: _Reader) -> list[str]:
    """Return the words of the rows that are typical of one class."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in reader.rows:
        counts[row["label"]].update(set(re.findall(r"[^\W\d_]{3,}", row["text"].lower())))
    total = sum(counts.values(), Counter[str]())
    found: list[str] = []
    for of_label in counts.values():
        typical = sorted(of_label, key=lambda word: (-(of_label[word] ** 2) / total[word], word))
        found += [f" {word}" for word in typical[:_WORDS_PER_LABEL]]
    return found


def _says_something(name: str) -> bool:
    return re.search(r"[^\W\d_]{2}", name) is not None


def _slots(form: str, noun: str, about: str, *, blank: bool) -> dict[str, Any]:
    """Return the lists of candidates of the form's slots."""
    names = {"noun": noun, "about": about, "Noun": noun.capitalize(), "About": about.capitalize()}
    found: dict[str, Any] = {
        slot: [text.format(**names) for text in texts] for slot, texts in _slots_of(form).items()
    }
    if not blank:
        found["opening"].remove("")
    return found


def _shots(reader: _Reader) -> list[int]:
    """Return numbers of shots: every class once and twice, within the length of a block."""
    rows = Counter(row["label"] for row in reader.rows)
    sizes = sorted(min(len(row["text"]), _SCREEN_CHARS) for row in reader.rows)
    once, most = max(2, min(len(rows), 8)), _DEMONSTRATION_CHARS // (sizes[len(sizes) // 2] + 20)
    possible = (count for count in (once, 2 * once) if -(-count // len(rows)) <= min(rows.values()))
    return [0, *(count for count in possible if count <= most)]
