"""Parsing of completions: the shown tokens, and the label words' log-probabilities."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from fedone_sdk.backends.base import LOG_ZERO, float32
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import LabelsNotShown, SpecError

# OpenAI reports -9999 for any very unlikely token.
_NOT_SHOWN = -9000.0
# Relative error of the sum of the shown probabilities, which are rounded to about float32.
_ROUNDING = 1e-6


class _Shown(BaseModel):
    token: str
    logprob: float


class _Position(BaseModel):
    token: str
    top_logprobs: tuple[_Shown, ...] = ()


class _Shows(BaseModel):
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
    """Return a token or label word, lower-cased and without leading space."""
    return text.lstrip(" \t\n\u2581\u0120").casefold()


def spellings(label_words: Sequence[str]) -> list[str]:
    """Return the label words, lower-cased and stripped."""
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


NUM_WATCHED = 64
"""How many answers are counted for each set of label words."""

_MAX_SETS = 256  # Callers of a gateway may use different label words.
_MAX_NAMED = 5
# A token is named in the error only if this many answers have it as their most likely token: it is
# then how the model begins an answer, not a word of one private input.
_MIN_REPEATS = 3


@dataclass(slots=True)
class _Count:
    answers: int = 0
    unseen: int = 0
    likeliest: Counter[str] = field(default_factory=Counter)

    @property
    def refused(self) -> bool:
        return self.unseen > NUM_WATCHED // 2


class LabelWatch:
    """Counts answers that show no label word, and refuses queries once they are the majority.

    The first `NUM_WATCHED` answers for each set of label words count. As soon as more than half
    of them are certain to show none of the words, further queries with these words are refused,
    until `reset`. Queries with other label words are still sent.
    """

    def __init__(self, *, model: str, url: str) -> None:
        self._model = model
        self._url = url
        self._counts: OrderedDict[tuple[str, ...], _Count] = OrderedDict()

    def admit(self, words: tuple[str, ...]) -> None:
        """Check a query before it is sent."""
        count = self._counts.get(words)
        if count is not None and count.refused:
            raise self._refusal(words, count)

    def note(self, words: tuple[str, ...], num_censored: int, top: Sequence[Token]) -> None:
        """Count one answer: how many label words of its query it does not show, and what it shows.

        The shown tokens are at least one, the likeliest first.
        """
        count = self._counts.setdefault(words, _Count())
        self._counts.move_to_end(words)
        while len(self._counts) > _MAX_SETS:
            self._counts.popitem(last=False)
        if count.answers == NUM_WATCHED or count.refused:
            return
        count.answers += 1
        if num_censored == len(words):
            count.unseen += 1
            count.likeliest[top[0].text] += 1

    def reset(self) -> None:
        """Reset all counts."""
        self._counts.clear()

    def _refusal(self, words: tuple[str, ...], count: _Count) -> LabelsNotShown:
        named = ", ".join(map(repr, words[:_MAX_NAMED])) + (", ..." if words[_MAX_NAMED:] else "")
        common = [
            repr(text) for text, times in count.likeliest.most_common(3) if times >= _MIN_REPEATS
        ]
        return LabelsNotShown(
            f"{count.unseen} of the first {count.answers} answers of model "
            f"{self._model!r} show none of the label words {named} among the likeliest tokens, so "
            "their losses say nothing: choose label words that the model writes, ask it for one of "
            "these words and nothing else at the end of the template, ask a base model with api: "
            "completions and an instruct model with api: chat, or set log_probs: false with loss: "
            "zero_one",
            url=self._url,
            said=f"most often {', '.join(common)}" if common else "",
            usage=NOTHING,
        )


# vLLM

Rows = tuple[tuple[float, ...], ...]
"""Log-probabilities: one row per input, float32 numbers."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of the functions below for an answer of another form."""


def asking_for(tokens: list[int]) -> dict[str, Any]:
    """Return the fields of a request for the log-probabilities of given next tokens."""
    return {
        "logprobs": 0,
        "logprob_token_ids": tokens,
        # As ids: two tokens may have the same text.
        "return_tokens_as_token_ids": True,
    }


def next_tokens(answer: Any, num_prompts: int, tokens: list[int]) -> Rows:
    """Per prompt, the log-probabilities of the given tokens; see `asking_for`."""
    shown = [choice["logprobs"]["top_logprobs"][0] for choice in choices(answer, num_prompts)]
    rows = [[row[f"token_id:{token}"] for token in tokens] for row in shown]
    return log_prob_rows(rows, num_prompts, len(tokens))


def choices(answer: Any, num_prompts: int) -> list[Any]:
    """Return the choices of an answer in the order of the prompts."""
    found = {choice["index"]: choice for choice in answer["choices"]}
    return [found[index] for index in range(num_prompts)]


def log_prob_rows(rows: Any, num_rows: int, num_columns: int) -> Rows:
    """Check the shape of rows of log-probabilities."""
    found = tuple(tuple(_float32(value) for value in row) for row in rows)
    if [len(row) for row in found] != [num_columns] * num_rows:
        raise ValueError("log-probabilities are missing")
    return found


def ending_log_prob(prompt_log_probs: Any, ending: list[int]) -> float:
    """Return the log-probability of the last tokens of a prompt."""
    last = prompt_log_probs[-len(ending) :]
    return _float32(
        sum(entry[str(token)]["logprob"] for entry, token in zip(last, ending, strict=True))
    )


def _float32(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("not a log-probability")
    return float32(value)
