"""The candidates of a prompt's positions, from PMI n-grams (Diao et al. 2022), a list or a file."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from fedone_sdk._values import Frozen
from fedone_sdk.errors import DataError
from fedone_sdk.files import user_path

__all__ = ["FileVocabulary", "ListVocabulary", "PmiVocabulary", "Slot", "Vocabulary"]

_MAX_CANDIDATES = 65_536
MAX_CANDIDATE_CHARS = 4000
"""Maximum length of a candidate, characters."""

MAX_PROPOSAL_CHARS = 400
"""Maximum length of a candidate that a device proposes, characters."""

MAX_PROPOSALS = 2
"""Maximum number of candidates that one device may propose in a run."""

_MAX_NGRAM_CHARS = 200
_MAX_SLOTS = 64

CHARS_PER_TOKEN = 4
"""Mean length of a token of English text, characters."""

LABELS = "labels"
"""The name of the slot whose candidates are sets of label words."""

_Size = Annotated[int, Field(ge=2, le=_MAX_CANDIDATES)]

_NAMES = "bos|eos|pad|unk|mask|cls|sep|/?s|/?think|/?tool_call|(start|end)_of_(turn|image)"
_MISTRAL = "/?(inst|system_prompt|available_tools|tool_results|tool_content)|tool_calls|args|img"
_SPECIAL = re.compile(
    # <| or |>: ChatML, Llama 3, Phi, DeepSeek. <...>: Llama 2, Gemma, T5. [...]: Mistral, BERT.
    rf"<\||\|>|<</?sys>>|<({_NAMES}|(unused|extra_id_)\d+)>"
    rf"|\[({_MISTRAL}|g?mask|cls|sep|pad|unk|bos|eos|unused\d+)\]",
    re.IGNORECASE,
)


def special_token(text: str) -> str | None:
    """Return the first special token of a common tokeniser or chat template in a text, if any.

    The text is normalised before the search, as tokenisers do.
    """
    match = _SPECIAL.search(text if text.isascii() else unicodedata.normalize("NFKC", text))
    return None if match is None else match[0]


def _check_plain(text: str) -> str:
    if token := special_token(text):
        raise ValueError(f"contains the special token {token!r}; it must be plain text")
    return text


Token = Annotated[str, Field(max_length=MAX_CANDIDATE_CHARS), AfterValidator(_check_plain)]
"""A candidate's text, without special tokens of models."""

SlotName = Annotated[str, Field(pattern=r"^[^\W\d]\w{0,63}$")]

Layout = tuple[tuple[int, int, int | None], ...]
"""Per slot: number of positions, number of candidates, and index of the blank one, if any."""


def are_prompts(rows: Iterable[Sequence[float]], layout: Layout) -> bool:
    """Whether each row is a prompt: one valid candidate index per position."""
    sizes = [size for repeat, size, _ in layout for _ in range(repeat)]
    return all(
        len(row) == len(sizes) and min(row, default=0) >= 0 and all(map(operator.lt, row, sizes))
        for row in rows
    )


def _blank(candidates: tuple[str, ...]) -> int | None:
    return candidates.index("") if "" in candidates else None


def _check_unique(candidates: tuple[str, ...]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    for index, text in enumerate(candidates):
        if first.setdefault(text, index) != index:
            raise ValueError(f"{text!r} is repeated: candidates {first[text]} and {index}")
    return candidates


_Candidates = Annotated[
    tuple[Token, ...], Field(max_length=_MAX_CANDIDATES), AfterValidator(_check_unique)
]


class Slot(Frozen):
    """A part of the prompt with its own candidates.

    Attributes:
        name: Name of the slot. In the slot ``labels`` a candidate is a JSON array of label words.
        candidates: Unique texts, in index order. One may be blank (``""``).
        repeat: Number of positions of the slot; the candidates chosen for them are concatenated.
    """

    name: SlotName
    candidates: Annotated[_Candidates, Field(min_length=1)]
    repeat: Annotated[int, Field(ge=1, le=1000)] = 1

    @property
    def blank(self) -> int | None:
        """Index of the blank candidate; None without one."""
        return _blank(self.candidates)


class Vocabulary(Frozen):
    """The candidates of a prompt's positions: common to all positions, or per slot.

    Candidates are only appended during a run, so that indices keep their meaning.

    Attributes:
        candidates: At least two unique texts, in index order, for every position. A prompt is the
            concatenation of one candidate per position, so a word includes its leading space. The
            blank candidate (``""``) leaves a position empty. There are no `candidates` if there
            are slots, or if the method has no vocabulary.
        slots: Slots in the order of the prompt.
    """

    candidates: _Candidates = ()
    slots: Annotated[tuple[Slot, ...], Field(max_length=_MAX_SLOTS)] = ()

    @field_validator("candidates")
    @classmethod
    def _check_choice(cls, candidates: tuple[str, ...]) -> tuple[str, ...]:
        if len(candidates) == 1:
            raise ValueError("there is nothing to choose: needs at least 2 candidates")
        return candidates

    @model_validator(mode="after")
    def _check_slots(self) -> Self:
        if self.slots and self.candidates:
            raise ValueError("needs either candidates or slots")
        names = [slot.name for slot in self.slots]
        if len(set(names)) < len(names):
            raise ValueError("slots: two have the same name")
        if self.slots and all(len(slot.candidates) == 1 for slot in self.slots):
            raise ValueError("slots: nothing to choose, because each has only one candidate")
        return self

    def __len__(self) -> int:
        """Return N, the largest number of candidates of a position."""
        return max((len(slot.candidates) for slot in self.slots), default=len(self.candidates))

    @property
    def blank(self) -> int | None:
        """Index of the blank candidate that all positions share; None without one."""
        return _blank(self.candidates)

    def comes_from(self, described: Vocabulary) -> bool:
        """Return whether this vocabulary equals `described`, or lacks only sets of label words.

        A run drops the sets that its model does not support.
        """
        if len(self.slots) != len(described.slots):
            return False
        dropped = set(described.candidates_of(LABELS)) - set(self.candidates_of(LABELS))
        return self == described.without_label_sets(dropped)

    def candidates_of(self, name: str) -> tuple[str, ...]:
        """Return the candidates of the slot with this name; empty without this slot."""
        return next((slot.candidates for slot in self.slots if slot.name == name), ())

    def without_label_sets(self, dropped: Collection[str]) -> Vocabulary:
        """Return the vocabulary without some sets of label words."""
        kept = tuple(text for text in self.candidates_of(LABELS) if text not in dropped)
        slots = tuple(
            slot.model_copy(update={"candidates": kept}) if slot.name == LABELS else slot
            for slot in self.slots
        )
        return Vocabulary(candidates=self.candidates, slots=slots)

    def with_candidates(self, appended: Iterable[tuple[str, str]]) -> Vocabulary:
        """Return the vocabulary with (slot, text) candidates appended.

        Raises:
            ValueError: A slot is unknown, or has the text already.
        """
        more: dict[str, list[str]] = {slot.name: [] for slot in self.slots}
        for name, text in appended:
            if name not in more:
                raise ValueError(f"there is no slot {name!r}")
            more[name].append(text)
        slots = [
            {**slot.model_dump(), "candidates": (*slot.candidates, *more[slot.name])}
            for slot in self.slots
        ]
        return Vocabulary.model_validate({"slots": slots}) if self.slots else self

    def layout(self, prompt_len: int) -> Layout:
        """Return the `Layout` of prompts with `prompt_len` positions."""
        if not self.slots:
            return ((prompt_len, len(self), self.blank),)
        return tuple((slot.repeat, len(slot.candidates), slot.blank) for slot in self.slots)

    def of_position(self, position: int) -> tuple[str, ...]:
        """Return the candidates of a position, in index order."""
        return self._rows[position] if self.slots else self.candidates

    @cached_property
    def _rows(self) -> list[tuple[str, ...]]:
        return [slot.candidates for slot in self.slots for _ in range(slot.repeat)]

    def tokens(self, indices: Iterable[int]) -> list[str]:
        """Return the candidates at these indices, one per position."""
        indices, chosen = [*indices], []
        rows = self._rows[: len(indices)] if self.slots else [self.candidates] * len(indices)
        for candidates, index in zip(rows, indices, strict=True):
            # Python would accept -1 as the last candidate and hide the error.
            if not 0 <= index < len(candidates):
                raise IndexError(f"candidate {index} is not in [0, {len(candidates)})")
            chosen.append(candidates[index])
        return chosen

    def text(self, indices: Iterable[int]) -> str:
        """Return the concatenated candidates at these indices."""
        return "".join(self.tokens(indices))

    def length(self, indices: Sequence[int]) -> int:
        """Return the number of characters that a prompt adds to every input; label words add 0."""
        return len(self.text(indices)) - len(self.by_slot(indices).get(LABELS, ""))

    def by_slot(self, indices: Iterable[int]) -> dict[str, str]:
        """Return the text of each slot by its name; empty if there are no slots."""
        tokens = iter(self.tokens(indices))
        return {slot.name: "".join(islice(tokens, slot.repeat)) for slot in self.slots}

    def dump(self) -> str:
        """Return canonical JSON: an array of texts, or of slots."""
        value = [slot.model_dump() for slot in self.slots] or self.candidates
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read the JSON of `dump`."""
        value = json.loads(text)
        if not isinstance(value, list):
            raise ValueError("a vocabulary must be a JSON array")
        has_slots = bool(value) and isinstance(value[0], dict)
        return cls.model_validate({"slots" if has_slots else "candidates": value})

    @cached_property
    def sha256(self) -> str:
        """Hex digest of `dump` in UTF-8."""
        return hashlib.sha256(self.dump().encode()).hexdigest()


class PmiVocabulary(Frozen):
    """N-grams of words with high pointwise mutual information in the training text.

    Adjacent words a, b have ``PMI = log(p(ab) / (p(a) p(b)))``, nats. The text is split between
    words whose PMI is below a threshold, and the most frequent segments become candidates (Diao et
    al. 2022, "Black-Box Prompt Learning for Pre-trained Language Models").

    Attributes:
        size: Maximum number of candidates, including the blank one.
        blank: Whether to add the blank candidate (``""``), as index 0.
    """

    kind: Literal["pmi"] = "pmi"
    size: _Size = 200
    blank: bool = False


class FileVocabulary(Frozen):
    """Candidates from a file.

    Attributes:
        path: A text file with one verbatim candidate per line, or a ``.json`` file with an array of
            texts; relative to the run file's folder.
        blank: Whether to add the blank candidate, as index 0.
    """

    kind: Literal["file"] = "file"
    path: Annotated[str, Field(min_length=1)]
    blank: bool = False


class ListVocabulary(Frozen):
    """Candidates in the run file, used verbatim; an empty text is the blank candidate, index 0."""

    kind: Literal["list"] = "list"
    candidates: Annotated[tuple[str, ...], Field(max_length=_MAX_CANDIDATES)]

    @property
    def blank(self) -> bool:
        """Whether one of the candidates is blank."""
        return "" in self.candidates


VocabularySpec = Annotated[
    PmiVocabulary | FileVocabulary | ListVocabulary, Field(discriminator="kind")
]


def build_vocabulary(
    spec: VocabularySpec | None,
    texts: Iterable[str],
    base_dir: str | Path = ".",
    *,
    wanted: Iterable[str] = (),
) -> Vocabulary:
    """Build a run's vocabulary; it is empty if `spec` is None.

    Args:
        spec: The source of candidates.
        texts: The training texts, for `PmiVocabulary`.
        base_dir: Base of a relative path.
        wanted: Required candidates, which are appended if missing.

    Raises:
        DataError: The file is missing or malformed, or there are fewer than 2 candidates.
    """
    if spec is None:
        return Vocabulary(candidates=())
    candidates: Sequence[str]
    match spec:
        case PmiVocabulary():
            candidates, source = pmi_ngrams(texts), "training text"
        case FileVocabulary():
            path = Path(base_dir) / user_path(spec.path)
            candidates, source = _read_candidates(path), str(path)
        case ListVocabulary():
            candidates, source = spec.candidates, "list"
    if spec.blank:
        candidates = ["", *filter(None, candidates)]
    candidates = _with(wanted, candidates, getattr(spec, "size", None))
    if len(candidates) < 2:
        raise DataError(f"{source}: has {len(candidates)} candidates for the vocabulary, needs 2")
    try:
        return Vocabulary(candidates=tuple(candidates))
    except ValidationError as exc:
        problem = exc.errors()[0]
        where = "".join(f"number {step}: " for step in problem["loc"][1:])
        message = problem["msg"].removeprefix("Value error, ")
        raise DataError(f"{source}: candidates: {where}{message}") from None


def _with(wanted: Iterable[str], candidates: Sequence[str], size: int | None) -> list[str]:
    chosen = list(candidates[:size])
    missing = [text for text in dict.fromkeys(wanted) if text not in chosen]
    if size is not None and len(missing) > size - 2:
        raise DataError(f"size: {size} is too small for the {len(missing)} tokens of prompt.start")
    return [*(chosen if size is None else chosen[: size - len(missing)]), *missing]


# Matches a word with inner apostrophes, hyphens and digit groups, an ending such as 's, or a
# punctuation mark and its repetitions.
_TOKEN = re.compile(
    r"(?P<word>\w+(?:['\u2019-]\w+|(?<=\d)[.,]\d\w*)*|['\u2019](?:s|re|ve|ll|d|m|t)\b)"
    r"|(?P<mark>[^\w\s])(?P=mark)*",
    re.IGNORECASE,
)


def _runs(text: str) -> Iterator[list[str]]:
    """Yield the words between two punctuation marks as a list, and each mark as a list.

    Each word has a leading space, also at the start of a text, so that it is the same candidate
    everywhere.
    """
    run: list[str] = []
    for match in _TOKEN.finditer(text):
        if match["mark"]:
            yield run
            yield [match[0]]
            run = []
        else:
            if run and not text[match.start() - 1].isspace():
                yield run
                run = []
            run.append(" " + match[0])
    yield run


def pmi_ngrams(
    texts: Iterable[str], *, max_ngram: int = 4, min_count: int = 3, threshold: float = 3.0
) -> list[str]:
    """Return the n-grams of `PmiVocabulary`, the most frequent first; ties in text order.

    Args:
        texts: Training text.
        max_ngram: Maximum number of words per candidate.
        min_count: Pairs that occur less often are split, because their PMI may be high by chance.
        threshold: Minimum PMI at which two words stay together, nats.
    """
    runs = [run for text in texts for run in _runs(text)]
    words = Counter(chain.from_iterable(runs))
    pairs = Counter(chain.from_iterable(map(pairwise, runs)))
    num_words, num_pairs = words.total(), pairs.total()

    def pmi(pair: tuple[str, str], count: int) -> float:
        a, b = pair
        return math.log(count / num_pairs * num_words / words[a] * num_words / words[b])

    bound = {
        pair
        for pair, count in pairs.items()
        if count >= min_count and pmi(pair, count) >= threshold
    }
    counts = Counter(chain.from_iterable(_segments(run, bound, max_ngram) for run in runs))
    usable = (text for text in counts if len(text) <= _MAX_NGRAM_CHARS)
    return sorted(usable, key=lambda text: (-counts[text], text))


def _segments(run: list[str], bound: set[tuple[str, str]], max_ngram: int) -> Iterator[str]:
    segment = run[:1]
    for pair in pairwise(run):
        if pair not in bound or len(segment) == max_ngram:
            yield "".join(segment)
            segment = []
        segment.append(pair[1])
    if segment:
        yield "".join(segment)


def _read_candidates(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as exc:
        raise DataError(f"{path}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise DataError(f"{path}: is not UTF-8 text") from exc
    if path.suffix.lower() != ".json":
        # Not splitlines: a candidate may contain other Unicode line ends.
        return text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{path}: bad JSON: {exc}") from exc
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise DataError(f"{path}: must be a JSON array of texts")
    return value
