"""Parsing of completions: shown tokens, label words' log-probabilities, written label words."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeVar

import structlog
from pydantic import BaseModel, BeforeValidator

from fedone_sdk.backends.base import LOG_ZERO, float32
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import LabelsNotShown, SpecError
from fedone_sdk.messages.base import SERVED_BY

_log = structlog.get_logger(__name__)

# OpenAI reports -9999 for any very unlikely token.
_NOT_SHOWN = -9000.0
# Relative error of the sum of the shown probabilities, which are rounded to about float32.
_ROUNDING = 1e-6
# Rounded log-probabilities (bfloat16, two decimals) add up to more than 1 by less than this.
_MOST_BEYOND_ONE = 0.02
# Log-probabilities of one token that is listed twice differ by less than this, nats.
_SAME = 0.01

T = TypeVar("T")
# Only the first position is read; servers fill the others with anything.
_First = Annotated[list[T], BeforeValidator(lambda found: (found or [])[:1])]


def _joined(content: Any) -> Any:
    """Return the text of a content in parts; reasoning is a part of another type."""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, dict)]
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")


class _Shown(BaseModel):
    token: str | None = None
    logprob: float | None = None
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
    native_finish_reason: str | None = None
    error: Any = None
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
        shows = self.logprobs or _Shows()
        if shows.content and shows.content[0]:
            return shows.content[0].token
        return shows.tokens[0] if shows.tokens else None

    def top(self) -> list[Token] | None:
        """Return the shown tokens of the first position, each once, most likely first.

        Empty if the model wrote nothing; None if the model does not show tokens.
        """
        shows = self.logprobs or _Shows()
        if shows.content and shows.content[0]:
            shown = shows.content[0].top_logprobs or []
        elif shows.top_logprobs:
            row = (shows.top_logprobs[0] or {}).items()
            shown = [_Shown(token=token, logprob=value) for token, value in row]
        else:
            shown = []
        wrote_nothing = self.finish_reason == "stop" and not self.written
        return _distinct(shown) or ([] if wrote_nothing and self.logprobs else None)


def _distinct(shown: Sequence[_Shown | None]) -> list[Token]:
    """Return the tokens in descending order, without those that are listed again.

    Entries with the same bytes are the same token. Servers without bytes may show two tokens by the
    same text, which then differ in their log-probability.
    """
    last: dict[str, float] = {}
    found = []
    rows = [one for one in shown if one is not None and one.token is not None]
    for one in sorted(rows, key=lambda row: -(row.logprob or 0.0)):
        if one.logprob is None or not _NOT_SHOWN < one.logprob < math.inf:
            continue
        same = str(one.bytes or one.token)
        if same in last and (one.bytes or last[same] - one.logprob < _SAME):
            continue
        last[same] = one.logprob
        found.append(Token(str(one.token), one.logprob))
    return found


def version_of(model: str | None, fingerprint: str | None) -> str | None:
    """Return a reported model with the ``system_fingerprint`` of what serves it."""
    return f"{model or ''}{SERVED_BY}{fingerprint})" if fingerprint else model


class Completion(BaseModel):
    """The parsed fields of a completion, or of an error in its place."""

    choices: list[Choice] | None = None
    model: str | None = None
    system_fingerprint: str | None = None
    service_tier: Any = None
    usage: Any = None
    error: Any = None

    @property
    def version(self) -> str | None:
        """The reported model, with what serves it."""
        return version_of(self.model, self.system_fingerprint)

    def failure(self) -> tuple[int, dict[str, Any]] | None:
        """Return the HTTP status and the body of the error that stands in place of an answer."""
        first = self.choices[0] if self.choices else None
        error = self.error or (first and first.error)
        # OpenRouter reports "stop" for an answer that its provider broke off.
        reasons = (first.finish_reason, first.native_finish_reason) if first else ()
        ended = [reason for reason in reasons if reason and "error" in reason]
        if not error and not ended:
            return None
        said = str(error or f"finish_reason: {ended[0]}")
        body = error if isinstance(error, dict) else {"message": said}
        code = str(body.get("code"))
        status = int(code) if re.fullmatch("[45][0-9][0-9]", code) else 500 if ended else 400
        # 502 and 504 are a proxy's, which does not know whether the server has answered.
        return min(status, 500), body


def _spelling(text: str) -> str:
    """Return a token or label word in one Unicode form, without leading space.

    It is lower-cased, unless it is one capital letter: the article does not spell the code A.
    """
    found = unicodedata.normalize("NFKC", text).lstrip(" \t\n\u2581\u0120")
    return found if len(found.rstrip()) == 1 and found.isupper() else found.casefold()


def _spellings(token: str) -> set[str]:
    """Return the spellings of the label words that a token shows."""
    found = _spelling(token)
    return {found, found.casefold()}


def spellings(label_words: Sequence[str]) -> list[str]:
    """Return the label words, stripped and lower-cased (`_spelling`)."""
    first: dict[str, str] = {}
    for word in label_words:
        spelling = _spelling(word).rstrip()
        if not spelling:
            raise SpecError(f"labels: {word!r} is no word", source="task")
        if spelling.casefold() in map(str.casefold, first):
            same = next(one for one in first if one.casefold() == spelling.casefold())
            raise SpecError(
                f"labels: {first[same]!r} and {word!r} are the same word for this model: case "
                "and the space in front do not count",
                source="task",
            )
        first[spelling] = word
    return list(first)


def label_log_probs(
    top: Sequence[Token], written: str | None, words: Sequence[str]
) -> tuple[tuple[float, ...], int]:
    """Return the labels' log-probabilities in nats, and the number of upper bounds among them.

    Raises:
        ValueError: The shown probabilities add up to more than 1.
    """
    # The generated token may be shown in addition to the most likely ones, and is no bound then.
    least = top[-2] if len(top) > 1 and top[-1].text == written else top[-1]
    bound = least.log_prob
    shown = math.fsum(math.exp(min(token.log_prob, 1.0)) for token in top)
    if shown > 1.0 + _MOST_BEYOND_ONE:
        raise ValueError(f"the probabilities of the likeliest tokens add up to {shown:.2f}")
    # An excess over 1 measures the error. Some servers show one token with probability 1.
    bound = min(bound, math.log(max(1.0 - shown, 0.0) + max(shown - 1.0, _ROUNDING)))
    row, censored = [], 0
    for word in words:
        spelled = [token.log_prob for token in top if word in _spellings(token.text)]
        if spelled:
            value = spelled[0] + math.log(math.fsum(math.exp(x - spelled[0]) for x in spelled))
        else:
            value, censored = bound, censored + 1
        row.append(float32(min(value, 0.0)))
    return tuple(row), censored


def chosen_label(written: str, words: Sequence[str]) -> tuple[float, ...] | None:
    """0.0 for the written label word and `LOG_ZERO` for others; None if nothing was written.

    The label word may be in a JSON object, a fence, quotes or bold, at the end of reasoning, after
    ``Answer:`` or before ``: reasons``. An answer with two of them has none.
    """
    text = unicodedata.normalize("NFKC", _REASONING.sub("", written)).casefold().strip()
    if not text:
        return None
    folded = [word.casefold() for word in words]
    found = {form for form in _forms(text) if form in folded}
    label = found.pop() if len(found) == 1 else None
    return tuple(0.0 if word == label else LOG_ZERO for word in folded)


_REASONING = re.compile(r"(?is)^.*</think(?:ing)?>|^\s*<think.*")
_MARKUP = re.compile(r"(?m)^```\w*$|\\boxed\b|</?\w+>")
_OBJECT = re.compile(r"\{[^{}]*\}")
_SEPARATOR = re.compile(r":|\bis\b|\)\s|[.\u2013\u2014]\s|\s-\s")
_EDGES = " \t\"'`*_.,;:!()[]{}<>\u201c\u201d\u2018\u2019\u201e\u00ab\u00bb\u3002\u300c\u300d"
_MOST_WORDS = 5  # before a label word: "The sentiment of this text is"


def _forms(text: str) -> Iterator[str]:
    """Yield what may be the label word in a written answer."""
    yield text
    if len(objects := _OBJECT.findall(text)) == 1:
        try:
            found = json.loads(objects[0])
        except ValueError:
            pass
        else:
            value = found.get("label", *found.values()) if len(found) == 1 else found.get("label")
            yield "" if value is None else _spelling(str(value)).strip()
            return
    lines = [line for line in _MARKUP.sub("", text).splitlines() if line.strip(_EDGES)]
    for line in {*lines[:1], *lines[-1:]}:
        yield line.strip(_EDGES)
        before, *after = _SEPARATOR.split(line, maxsplit=1)
        yield before.strip(_EDGES)
        if after and len(before.split()) <= _MOST_WORDS:
            yield after[0].strip(_EDGES)


WITHOUT = "set log_probs: false with loss: zero_one, or log_probs: {samples: 8}"
"""What to change for a model without log-probabilities."""

NUM_WATCHED = 64
"""How many answers are counted for each set of label words."""

_OF_A_DEVICE = NUM_WATCHED // 4
_MAJORITY = NUM_WATCHED // 2
_FEW = 8  # Answers that all have no label word: a warning, also for a small table.
_MAX_SETS = 256  # Callers of a gateway may use different label words.
_MAX_NAMED = 5
# A token, or the beginning of a written answer, is named in the error only if this many answers
# have it: it is then how the model begins an answer, not a word of one private input.
_MIN_REPEATS = 3
_BEGINNING = 3  # words


@dataclass(slots=True)
class _Count:
    """Counts of answers.

    Attributes:
        unseen: Answers without any of the label words.
        seen: Answers with each label word.
        prefixed: Answers with a token that begins each label word, but is shorter.
        devices: Answers to each device of a gateway.
    """

    answers: int = 0
    unseen: int = 0
    likeliest: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    prefixed: Counter[str] = field(default_factory=Counter)
    devices: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @property
    def split(self) -> list[str]:
        """The label words of several tokens: most answers begin them, and none shows them."""
        return [w for w, n in self.prefixed.items() if n > _MAJORITY and not self.seen[w]]

    @property
    def refused(self) -> bool:
        return self.unseen > _MAJORITY or bool(self.split)


class LabelWatch:
    """Counts answers without label words, and refuses queries once they are the majority.

    The first `NUM_WATCHED` answers for each set of label words count. As soon as more than half
    of them are certain to have none of the words, or to show only the beginning of a word that none
    shows whole, further queries with these words are refused, until `reset`. Queries with other
    label words are still sent.

    Args:
        model: The model, for errors.
        url: Its server, for errors.
        written: Whether the answers are written words, not shown tokens.
    """

    def __init__(self, *, model: str, url: str, written: bool = False) -> None:
        self._model = model
        self._url = url
        self._written = written
        self._counts: OrderedDict[tuple[str, ...], _Count] = OrderedDict()

    def admit(self, words: tuple[str, ...]) -> None:
        """Check a query before it is sent."""
        count = self._counts.get(words)
        if count is not None and count.refused:
            raise self._refusal(words, count)

    def note(
        self, words: tuple[str, ...], shown: Sequence[str], *, device: tuple[str, ...] | None = None
    ) -> None:
        """Count one answer: its shown tokens, the likeliest first, or the written label word.

        Of one device at most `_OF_A_DEVICE` answers count, so that its texts cannot block others.
        """
        count = self._counts.setdefault(words, _Count())
        self._counts.move_to_end(words)
        while len(self._counts) > _MAX_SETS:
            self._counts.popitem(last=False)
        if count.answers == NUM_WATCHED or count.refused:
            return
        if device is not None:
            if count.devices[device] == _OF_A_DEVICE:
                return
            count.devices[device] += 1
        count.answers += 1
        tokens = set().union(*map(_spellings, shown))
        spelled = {word: _spelling(word).rstrip() for word in words}
        seen = [word for word in words if spelled[word] in tokens]
        count.seen.update(seen)
        if not seen:
            count.unseen += 1
            count.likeliest[" ".join(shown[0].split(" ")[: _BEGINNING + 1])] += 1
        if not self._written:
            beginnings = tokens - {"", *spelled.values()}
            count.prefixed.update(
                word for word in words if any(map(spelled[word].startswith, beginnings))
            )
        never = [word for word in words if not count.seen[word]]
        if count.answers == (_FEW if len(never) == len(words) else NUM_WATCHED) and never:
            _log.warning(
                "label words that no answer has",
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
            repr(text) for text, times in count.likeliest.most_common(3) if times >= _MIN_REPEATS
        ]
        split = [] if count.unseen > _MAJORITY else count.split
        named = ", ".join(map(repr, (split or words)[:_MAX_NAMED]))
        named += ", ..." if (split or words)[_MAX_NAMED:] else ""
        answers = f"of the first {count.answers} answers of model {self._model!r}"
        one_of = "ask it for one of these words and nothing else at the end of the template"
        if split:
            problem = (
                f"none {answers} shows the label word {named}, and most show its beginning, so it "
                "is several tokens: choose label words of one token, such as ' A', ' B' with a "
                f"slot of candidates: codes, or {WITHOUT}"
            )
        elif self._written:
            problem = (
                f"{count.unseen} {answers} are none of the label words {named}, so they count as "
                f"wrong: {one_of}, set structured: true, or reasoning_effort: none for a model "
                "that reasons until its tokens are used up"
            )
        else:
            problem = (
                f"{count.unseen} {answers} show none of the label words {named} among the "
                f"likeliest tokens, so their losses say nothing: choose label words that the model "
                f"writes, {one_of}, ask a base model with api: completions and an instruct model "
                f"with api: chat, or {WITHOUT}"
            )
        return LabelsNotShown(
            problem,
            url=self._url,
            said=f"most often {', '.join(common)}" if common and not split else "",
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
