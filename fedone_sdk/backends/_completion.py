"""Parsing of a provider's completion: the shown tokens and the labels' log-probabilities."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from fedone_sdk.backends.base import LOG_ZERO, float32
from fedone_sdk.errors import SpecError

# OpenAI reports -9999 for any very unlikely token.
_NOT_SHOWN = -9000.0
# Relative error of the sum of the shown probabilities, which are rounded to about float32.
_ROUNDING = 1e-6


class _Shown(BaseModel):
    """A token that the provider shows (chat)."""

    token: str
    logprob: float


class _Position(BaseModel):
    """The position of one generated token (chat)."""

    token: str
    top_logprobs: tuple[_Shown, ...] = ()


class _Shows(BaseModel):
    """The field ``logprobs`` of both endpoints."""

    content: list[_Position] | None = None
    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class Token(NamedTuple):
    """A shown token and its log-probability, nats."""

    text: str
    log_prob: float


class Choice(BaseModel):
    """An entry of ``choices``, of both endpoints."""

    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Shows | None = None

    @property
    def withheld(self) -> bool:
        """Whether the answer was filtered or refused."""
        refused = self.message is not None and bool(self.message.refusal)
        return refused or self.finish_reason == "content_filter"

    @property
    def written(self) -> str | None:
        """The generated text."""
        return self.text if self.message is None else self.message.content

    def first_token(self) -> str | None:
        """Return the first generated token."""
        if self.logprobs is None:
            return None
        if self.logprobs.content:
            return self.logprobs.content[0].token
        return self.logprobs.tokens[0] if self.logprobs.tokens else None

    def top(self) -> list[Token] | None:
        """Return the shown tokens of the first position, most likely first.

        Empty if the model wrote nothing; None if the model does not show tokens.
        """
        shows = self.logprobs
        if shows is None:
            return None
        if shows.content:
            top = [Token(shown.token, shown.logprob) for shown in shows.content[0].top_logprobs]
        elif shows.top_logprobs and shows.top_logprobs[0]:
            shown = shows.top_logprobs[0].items()
            top = [Token(token, value) for token, value in shown if value is not None]
        elif self.finish_reason == "stop" and not self.written:
            return []
        else:
            return None
        top = [token for token in top if math.isfinite(token.log_prob)]
        top = [token for token in top if token.log_prob > _NOT_SHOWN]
        return sorted(top, key=lambda token: -token.log_prob) or None


class Completion(BaseModel):
    """The parsed fields of a completion."""

    choices: list[Choice] = Field(min_length=1)
    model: str | None = None
    system_fingerprint: str | None = None
    usage: Any = None


def _spelling(text: str) -> str:
    """Return a token or label word, lower-cased and without leading space.

    Some servers show their tokeniser's own characters for that space.
    """
    return text.lstrip(" \t\n\u2581\u0120").casefold()


def spellings(label_words: Sequence[str]) -> list[str]:
    """Return the label words, lower-cased and stripped.

    Raises:
        SpecError: Two of them are equal then, or one is empty.
    """
    first: dict[str, str] = {}
    for word in label_words:
        spelling = _spelling(word).rstrip()
        if not spelling:
            raise SpecError(f"labels: {word!r} is no word", source="task")
        if spelling in first:
            raise SpecError(
                f"labels: {first[spelling]!r} and {word!r} are the same word for this model: case "
                "and the space in front do not count",
                source="task",
            )
        first[spelling] = word
    return list(first)


def label_log_probs(
    top: Sequence[Token], written: str | None, words: Sequence[str]
) -> tuple[tuple[float, ...], int]:
    """Return the labels' log-probabilities in nats, and the number of upper bounds among them."""
    # The generated token may be shown in addition to the most likely ones, and is no bound then.
    least = top[-2] if len(top) > 1 and top[-1].text == written else top[-1]
    bound = least.log_prob
    rest = 1.0 - math.fsum(math.exp(token.log_prob) for token in top)
    if rest > 0:
        bound = min(bound, math.log(rest + _ROUNDING))
    row, censored = [], 0
    for word in words:
        spelled = [token.log_prob for token in top if _spelling(token.text) == word]
        if spelled:
            value = spelled[0] + math.log(math.fsum(math.exp(x - spelled[0]) for x in spelled))
        else:
            value, censored = bound, censored + 1
        row.append(float32(min(value, 0.0)))
    return tuple(row), censored


def chosen_label(written: str, words: Sequence[str]) -> tuple[float, ...] | None:
    """0.0 for the written label word and `LOG_ZERO` for others; None if nothing was written."""
    try:
        found = json.loads(written)
    except ValueError:
        found = None
    text = str(found.get("label")) if isinstance(found, dict) else written
    spelling = _spelling(text).strip()
    if not spelling:
        return None
    for answer in (spelling, spelling.strip("\"'`*.!")):
        if answer in words:
            return tuple(0.0 if word == answer else LOG_ZERO for word in words)
    return (LOG_ZERO,) * len(words)
