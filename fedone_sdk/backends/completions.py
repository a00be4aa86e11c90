"""Label log-probabilities: from shown tokens, from a written word, or from sampled answers."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, Field

from fedone_sdk.backends.base import LOG_ZERO, Answer, Query, float32
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import SpecError
from fedone_sdk.messages.base import SERVED_BY
from fedone_sdk.scores import answer_in

# OpenAI reports -9999 for any very unlikely token.
_NOT_SHOWN = -9000.0
# Rounding error of the sum of the shown probabilities.
_ROUNDING = 1e-6
# Some servers round each probability. Their sum then exceeds 1 by less than this.
_MAX_EXCESS = 0.02
# A server may list a token twice, with log-probabilities that differ by less than this, nats.
_SAME = 0.01
# The finish reasons of filtered answers: OpenAI's, and those that Gemini and others pass on.
_FILTERED = re.compile("(?i)filter|safety|prohibited|recitation|blocklist|spii|sensitive|refus")

FIRST = 3
"""Number of answers sampled first; more follow if these differ (docs/benchmarks/sampled.md)."""

_SMOOTHING = 0.5
"""Added to each label's count, as in the estimate of Krichevsky and Trofimov (1981)."""

Counts = Sequence[float]
"""For each label the number of answers that wrote it, then the number of all answers."""

T = TypeVar("T")
# Only the first token is read, because servers differ in the format of later tokens.
_First = Annotated[list[T], BeforeValidator(lambda positions: (positions or [])[:1])]


def _joined(content: Any) -> Any:
    # A content may be a list of parts. Parts with reasoning have another type, and are left out.
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, dict)]
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")


class _Shown(BaseModel):
    token: str | None = None
    logprob: Annotated[float, BeforeValidator(lambda x: math.nan if x is None else x)] = math.nan
    bytes: Any = None


class _Position(BaseModel):
    token: str | None = None
    top_logprobs: list[_Shown | None] | None = None


class _Shows(BaseModel):
    content: _First[_Position | None] = []
    tokens: _First[str | None] = []
    top_logprobs: _First[dict[str, float | None] | None] = []


class _Message(BaseModel):
    content: Annotated[str | None, BeforeValidator(_joined)] = None
    refusal: Any = None


class Token(NamedTuple):
    """A token that the API shows (``top_logprobs``), and its log-probability, nats."""

    text: str
    log_prob: float


class Choice(BaseModel):
    """An entry of ``choices``, as the chat or the completions endpoint returns it."""

    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Shows | None = None

    @property
    def withheld(self) -> bool:
        """Whether the answer was filtered or refused."""
        refused = self.message is not None and bool(self.message.refusal)
        return refused or bool(_FILTERED.search(self.finish_reason or ""))

    @property
    def written(self) -> str | None:
        """The generated text."""
        return self.text if self.message is None else self.message.content

    def first_token(self) -> str | None:
        """Return the first generated token."""
        shows = self.logprobs or _Shows()
        if shows.content and shows.content[0]:
            return shows.content[0].token
        return shows.tokens[0] if shows.tokens else None

    def top(self) -> list[Token] | None:
        """Return the shown tokens of the first position, each once, most likely first.

        Returns an empty list if the model wrote nothing, and None if no tokens are shown.
        """
        shows = self.logprobs or _Shows()
        shown: list[_Shown | None] = []
        if shows.content and shows.content[0]:
            shown = shows.content[0].top_logprobs or []
        elif shows.top_logprobs:
            row = (shows.top_logprobs[0] or {}).items()
            shown = [_Shown.model_validate({"token": one, "logprob": value}) for one, value in row]
        wrote_nothing = self.finish_reason not in (None, "length") and not self.written
        return _distinct(shown) or ([] if wrote_nothing else None)


def _distinct(shown: Sequence[_Shown | None]) -> list[Token]:
    """Return the tokens, the likeliest first, each once."""
    # Entries with equal bytes are one token. Without bytes, entries with the same text are one
    # token if their log-probabilities differ by less than `_SAME`.
    last: dict[str, float] = {}
    tokens = []
    rows = [row for row in shown if row is not None and row.token is not None]
    likely = [row for row in rows if _NOT_SHOWN < row.logprob < math.inf]  # Also drops NaN.
    for row in sorted(likely, key=lambda row: -row.logprob):
        identity = str(row.bytes or row.token)
        if identity in last and (row.bytes or last[identity] - row.logprob < _SAME):
            continue
        last[identity] = row.logprob
        tokens.append(Token(str(row.token), row.logprob))
    return tokens


def version_of(model: str | None, fingerprint: str | None) -> str | None:
    """Return the reported model, followed by the ``system_fingerprint`` if there is one."""
    if model and fingerprint:
        return f"{model}{SERVED_BY}{fingerprint})"
    return model or None


class Completion(BaseModel):
    """The fields of a completion that are read."""

    choices: Annotated[list[Choice], Field(min_length=1)]
    model: str | None = None
    system_fingerprint: str | None = None
    service_tier: Any = None
    usage: Any = None

    @property
    def version(self) -> str | None:
        """The reported model and system fingerprint."""
        return version_of(self.model, self.system_fingerprint)


def spelling(text: str) -> str:
    """Return a token or label word in one Unicode form, in lower case, without leading space.

    A single capital letter stays a capital, so that the article "a" is not the label word "A".
    """
    text = unicodedata.normalize("NFKC", text).lstrip(" \t\n\u2581\u0120")
    return text if len(text.rstrip()) == 1 and text.isupper() else text.casefold()


def token_spellings(token: str) -> set[str]:
    """Return the spellings that a token matches: its `spelling`, and this in lower case."""
    return {spelling(token), spelling(token).casefold()}


def spellings(label_words: Sequence[str]) -> list[str]:
    """Return the `spelling` of each label word, without space at its end."""
    spelled = [spelling(word).rstrip() for word in label_words]
    first: dict[str, str] = {}
    for word, folded in zip(label_words, map(str.casefold, spelled), strict=True):
        if not folded:
            raise SpecError(f"labels: {word!r} is not a word", source="task")
        if folded in first:
            raise SpecError(
                f"labels: {first[folded]!r} and {word!r} are the same word for this model: case "
                "and a leading space are ignored",
                source="task",
            )
        first[folded] = word
    return spelled


def label_log_probs(
    top: Sequence[Token], written: str | None, words: Sequence[str]
) -> tuple[tuple[float, ...], int]:
    """Return the labels' log-probabilities in nats, and the number of upper bounds among them.

    Raises `ValueError` if the shown probabilities add up to more than 1.
    """
    # The last token may be the generated token, shown in addition to the most likely ones.
    last = top[-2] if len(top) > 1 and top[-1].text == written else top[-1]
    bound = last.log_prob
    shown = math.fsum(math.exp(min(token.log_prob, 1.0)) for token in top)
    if shown > 1.0 + _MAX_EXCESS:
        raise ValueError(f"the probabilities of the likeliest tokens add up to {shown:.2f}")
    # A hidden token has at most the remaining probability plus the rounding error of the sum.
    bound = min(bound, math.log(max(1.0 - shown, 0.0) + max(shown - 1.0, _ROUNDING)))
    row, censored = [], 0
    for word in words:
        spelled = [token.log_prob for token in top if word in token_spellings(token.text)]
        if spelled:
            value = spelled[0] + math.log(math.fsum(math.exp(x - spelled[0]) for x in spelled))
        else:
            value, censored = bound, censored + 1
        row.append(float32(min(value, 0.0)))
    return tuple(row), censored


def chosen_label(written: str, words: Sequence[str]) -> tuple[float, ...] | None:
    """Return 0.0 for the written label word and `LOG_ZERO` for others; None for an empty text.

    The label word may be in JSON, in a code fence, in quotes or in bold, after reasoning, or in a
    line such as "Answer: good" or "good: because ...". If there are two label words, none counts.
    """
    text = unicodedata.normalize("NFKC", answer_in(written)).casefold().strip()
    if not text:
        return None
    folded = [word.casefold() for word in words]
    labels = set(_forms(text)).intersection(folded)
    return tuple(0.0 if labels == {word} else LOG_ZERO for word in folded)


_MARKUP = re.compile(r"(?m)^```\w*$|\\boxed\b|</?\w+>")
_OBJECT = re.compile(r"\{[^{}]*\}")
_SEPARATOR = re.compile(r":|\bis\b|\)\s|[.\u2013\u2014]\s|\s-\s")
_EDGES = " \t\"'`*_.,;:!()[]{}<>\u201c\u201d\u2018\u2019\u201e\u00ab\u00bb\u3002\u300c\u300d"
_MAX_WORDS_BEFORE = 5  # Words before the separator, as in "The sentiment of this text is good".


def _forms(text: str) -> Iterator[str]:
    """Yield the parts of a written answer that may be the label word."""
    yield text
    if len(objects := _OBJECT.findall(text)) == 1:
        with suppress(RecursionError, ValueError):
            fields = json.loads(objects[0])
            (value,) = fields.values() if len(fields) == 1 else [fields.get("label")]
            yield "" if value is None else spelling(str(value)).strip()
            return
    lines = [line for line in _MARKUP.sub("", text).splitlines() if line.strip(_EDGES)]
    for line in {*lines[:1], *lines[-1:]}:
        yield line.strip(_EDGES)
        before, *after = _SEPARATOR.split(line, maxsplit=1)
        yield before.strip(_EDGES)
        if after and len(before.split()) <= _MAX_WORDS_BEFORE:
            yield after[0].strip(_EDGES)


async def sampled(
    query: Query,
    samples: int,
    at_once: Callable[[], int],
    ask: Callable[[Query], Awaitable[Answer]],
) -> Answer:
    """Estimate the label log-probabilities of a query from sampled answers.

    Args:
        query: The query.
        samples: Maximum number of answers per input. If the first answers agree, they suffice.
        at_once: Returns the maximum number of answers per request.
        ask: Sends one request of kind ``counts``, and records its usage. The usage of the estimate
            is therefore 0.
    """
    counts: list[Counts | None] = [(0.0,) * (len(query.label_words) + 1) for _ in query.inputs]
    model: str | None = None
    while missing := {
        place: more for place, row in enumerate(counts) if (more := _num_missing(row, samples))
    }:
        more = min(*missing.values(), at_once())
        answer = await ask(replace(query.part([*missing]), want="counts", samples=more))
        model = model or answer.model
        for place, new in zip(missing, answer.log_probs, strict=True):
            row = counts[place]
            counts[place] = new and row and tuple(map(sum, zip(row, new, strict=True)))
    rows = tuple(None if row is None else estimated(row) for row in counts)
    return Answer(log_probs=rows, usage=NOTHING, model=model)


def requests_of(samples: int, at_once: int) -> Iterator[int]:
    """Yield the maximum number of answers of each request for one input."""
    for part in (min(FIRST, samples), samples - min(FIRST, samples)):
        for start in range(0, part, at_once):
            yield min(at_once, part - start)


def estimated(counts: Counts) -> tuple[float, ...]:
    """Return the labels' log-probabilities, nats; `LOG_ZERO` if no answer wrote a label.

    If k_c of n answers wrote label c, then ``p(c) = (k_c + 1/2) / (n + C/2)``. An answer that wrote
    no label counts as 1/C of an answer for each of the C labels.
    """
    *labels, total = counts
    if not any(labels):
        return (LOG_ZERO,) * len(labels)
    each = (total - sum(labels)) / len(labels) + _SMOOTHING
    every = total + _SMOOTHING * len(labels)
    return tuple(float32(math.log((count + each) / every)) for count in labels)


def _num_missing(counts: Counts | None, samples: int) -> int:
    if counts is None:
        return 0
    *labels, total = counts
    agree = total >= min(FIRST, samples) and max(labels) == total
    return 0 if agree else int((samples if total >= FIRST else min(FIRST, samples)) - total)
