"""The candidate tokens of a prompt: PMI n-grams (Diao et al. 2022), frequent tokens, or a file."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, assert_never

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedone_sdk.errors import DataError

__all__ = [
    "FileVocabulary",
    "ListVocabulary",
    "PmiVocabulary",
    "TopVocabulary",
    "Vocabulary",
    "VocabularySpec",
    "build_vocabulary",
]

_MAX_CANDIDATES = 65_536
_MAX_CHARS = 200

_Size = Annotated[int, Field(ge=2, le=_MAX_CANDIDATES)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


Token = Annotated[str, Field(max_length=_MAX_CHARS)]
"""A candidate's text."""


class Vocabulary(_Frozen):
    """The N candidates of every prompt position, in index order.

    Attributes:
        candidates: Unique texts; a prompt is their concatenation, so a word brings its leading
            space along. One of them may be blank (``""``): a position without a token. None at
            all for methods that need no vocabulary; never a single one.
    """

    candidates: Annotated[
        tuple[Token, ...],
        Field(max_length=_MAX_CANDIDATES),
    ]

    @field_validator("candidates")
    @classmethod
    def _check_candidates(cls, candidates: tuple[str, ...]) -> tuple[str, ...]:
        if len(candidates) == 1:
            raise ValueError("there is nothing to choose: needs at least 2")
        first: dict[str, int] = {}
        for index, text in enumerate(candidates):
            if first.setdefault(text, index) != index:
                raise ValueError(f"{text!r} stands twice, as number {first[text]} and {index}")
        return candidates

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def blank(self) -> int | None:
        """Index of the blank candidate, if there is one."""
        return self.candidates.index("") if "" in self.candidates else None

    def tokens(self, indices: Iterable[int]) -> list[str]:
        """The candidates at these indices.

        Raises:
            IndexError: An index is not in [0, N).
        """
        chosen = []
        for index in indices:
            # Python would take -1 for the last candidate and hide the mistake.
            if not 0 <= index < len(self.candidates):
                raise IndexError(f"candidate {index} is not in [0, {len(self.candidates)})")
            chosen.append(self.candidates[index])
        return chosen

    def text(self, indices: Iterable[int]) -> str:
        """The prompt that these indices spell.

        Raises:
            IndexError: An index is not in [0, N).
        """
        return "".join(self.tokens(indices))

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the candidates as canonical JSON: a UTF-8 array without white space."""
        canonical = json.dumps(self.candidates, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


class PmiVocabulary(_Frozen):
    """N-grams whose words attract each other, found in the training text.

    Adjacent words a, b have ``PMI = log(p(ab) / (p(a) p(b)))``, nats. The text is cut wherever it
    is below the threshold, and the most frequent segments become candidates (Diao et al. 2022,
    "Black-Box Prompt Learning for Pre-trained Language Models").

    Attributes:
        size: N, the blank included; fewer where the text does not have as many.
        max_ngram: Words per candidate at most.
        min_count: A pair seen less often is cut: rare pairs have a high PMI by chance.
        threshold: PMI at which two words stay together, nats.
        blank: Add the blank candidate, as index 0.
    """

    kind: Literal["pmi"] = "pmi"
    size: _Size = 200
    max_ngram: Annotated[int, Field(ge=1, le=16)] = 4
    min_count: Annotated[int, Field(ge=1)] = 3
    threshold: float = 3.0
    blank: bool = False


class TopVocabulary(_Frozen):
    """The most frequent tokens of the training text.

    Attributes:
        size: N, the blank included; fewer where the text does not have as many.
        blank: Add the blank candidate, as index 0.
    """

    kind: Literal["top"] = "top"
    size: _Size = 200
    blank: bool = False


class FileVocabulary(_Frozen):
    """Candidates from a file.

    Attributes:
        path: A text file with one candidate per line, taken verbatim; or a ``.json`` file with an
            array of texts, or with an object whose ``vocab`` is an array of texts or of objects
            with a ``text``. A relative path starts at the run file's folder.
        size: Use no more than the first N (the blank included); null uses all.
        blank: Have the blank candidate, as index 0.
    """

    kind: Literal["file"] = "file"
    path: Annotated[str, Field(min_length=1)]
    size: _Size | None = None
    blank: bool = False


class ListVocabulary(_Frozen):
    """Candidates written out.

    Attributes:
        candidates: The texts, taken verbatim.
        size: Use no more than the first N (the blank included); null uses all.
        blank: Have the blank candidate, as index 0.
    """

    kind: Literal["list"] = "list"
    candidates: Annotated[tuple[str, ...], Field(max_length=_MAX_CANDIDATES)]
    size: _Size | None = None
    blank: bool = False


VocabularySpec = Annotated[
    PmiVocabulary | TopVocabulary | FileVocabulary | ListVocabulary, Field(discriminator="kind")
]


def build_vocabulary(
    spec: VocabularySpec | None,
    texts: Iterable[str],
    base_dir: str | Path = ".",
    *,
    wanted: Iterable[str] = (),
) -> Vocabulary:
    """Makes the vocabulary that a run asks for.

    Args:
        spec: Where candidates come from; None gives a vocabulary without any.
        texts: Training text; a file vocabulary does not read it.
        base_dir: Where a relative path starts.
        wanted: Candidates that must be there; those that were not are the last.

    Returns:
        Most frequent candidates first (equal ones in text order); may be smaller than
        ``spec.size``.

    Raises:
        DataError: The file is missing or malformed, or there are fewer than 2 candidates.
    """
    if spec is None:
        return Vocabulary(candidates=())
    candidates: Sequence[str]
    match spec:
        case PmiVocabulary():
            candidates, source = _pmi_ngrams(texts, spec), "training text"
        case TopVocabulary():
            tokens = chain.from_iterable(chain.from_iterable(map(_runs, texts)))
            candidates, source = _ranked(Counter(tokens)), "training text"
        case FileVocabulary():
            path = Path(base_dir) / spec.path
            candidates, source = _read_candidates(path), str(path)
        case ListVocabulary():
            candidates, source = spec.candidates, "list"
        case _:
            assert_never(spec)
    if spec.blank:
        candidates = ["", *filter(None, candidates)]
    candidates = _with(wanted, candidates, spec.size)
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
    """At most `size` candidates, the wanted ones among them."""
    chosen = list(candidates[:size])
    missing = [text for text in dict.fromkeys(wanted) if text not in chosen]
    if size is not None and len(missing) > size - 2:
        raise DataError(f"size: {size} leaves no room for {len(missing)} tokens to begin with")
    kept = chosen if size is None else chosen[: size - len(missing)]
    return [*kept, *missing]


# A word with its inner apostrophes, hyphens and digit groups; a clitic as treebanks split it off;
# else a run of one punctuation mark.
_TOKEN = re.compile(
    r"(?P<word>\w+(?:['\u2019-]\w+|(?<=\d)[.,]\d\w*)*|['\u2019](?:s|re|ve|ll|d|m|t)\b)"
    r"|(?P<mark>[^\w\s])(?P=mark)*",
    re.IGNORECASE,
)


def _runs(text: str) -> Iterator[list[str]]:
    """Cuts a text at its punctuation.

    Yields:
        Words that follow each other with only white space between them, each with a leading space
        (also at the start of a text: the same word in the middle is the same candidate), or one
        punctuation mark alone.
    """
    run: list[str] = []
    for match in _TOKEN.finditer(text):
        if match["mark"]:
            yield run
            yield [match[0]]
            run = []
        else:
            if run and not text[match.start() - 1].isspace():  # such as 's's
                yield run
                run = []
            run.append(" " + match[0])
    yield run


def _pmi_ngrams(texts: Iterable[str], spec: PmiVocabulary) -> list[str]:
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
        if count >= spec.min_count and pmi(pair, count) >= spec.threshold
    }
    return _ranked(Counter(chain.from_iterable(_segments(r, bound, spec.max_ngram) for r in runs)))


def _segments(run: list[str], bound: set[tuple[str, str]], max_ngram: int) -> Iterator[str]:
    segment = run[:1]
    for pair in pairwise(run):
        if pair not in bound or len(segment) == max_ngram:
            yield "".join(segment)
            segment = []
        segment.append(pair[1])
    if segment:
        yield "".join(segment)


def _ranked(counts: Counter[str]) -> list[str]:
    """Most frequent first, ties in text order; without what is too long to be a candidate."""
    usable = (text for text in counts if len(text) <= _MAX_CHARS)
    return sorted(usable, key=lambda text: (-counts[text], text))


def _read_candidates(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as exc:
        raise DataError(f"{path}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise DataError(f"{path}: is not UTF-8 text") from exc
    if path.suffix.lower() != ".json":
        # Not splitlines: a candidate may hold any other character that Unicode calls a line end.
        return text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{path}: bad JSON: {exc}") from exc
    entries = value.get("vocab") if isinstance(value, dict) else value
    candidates = [_text_of(entry) for entry in entries] if isinstance(entries, list) else [None]
    if None in candidates:
        raise DataError(
            f"{path}: must be a JSON array of texts, or an object whose 'vocab' is an array of "
            "texts or of objects with a 'text'"
        )
    return [candidate for candidate in candidates if candidate is not None]


def _text_of(entry: Any) -> str | None:
    text = entry.get("text") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
