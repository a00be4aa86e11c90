"""What adapters to hosted models share: how they ask, what they read, what they learn."""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import structlog
from pydantic import ValidationError

from fedone_sdk.backends._completion import (
    Choice,
    Completion,
    chosen_label,
    label_log_probs,
    spellings,
)
from fedone_sdk.backends._label_watch import LabelWatch
from fedone_sdk.backends.base import Answer, LLMBackend, Query, Want
from fedone_sdk.backends.chat import is_chat, messages_of
from fedone_sdk.backends.openai_api import message_of, rate_limits, translated, usage_of
from fedone_sdk.backends.tokenizer import find_tokenizer
from fedone_sdk.backends.tokens import OPENAI_CHAT_OVERHEAD, TokenCounter, token_counter
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, LabelWordError
from fedone_sdk.task import Rendered

if TYPE_CHECKING:
    import openai

__all__ = ["HostedBackend", "MAX_INPUT_TOKENS", "RawAnswer"]

_log = structlog.get_logger(__name__)

MAX_INPUT_TOKENS = 1024
"""The longest input where nothing else is said."""

_TOP = 20  # The most that OpenAI shows.
_SMALL_TOP = 5  # What servers show that show less.
_CHOICE_TOKENS = 64  # A label word, in JSON too.
_FILTERED = frozenset({"content_filter", "content_policy_violation", "invalid_prompt"})
_TOO_LONG = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_ONE_REQUEST = Usage(requests=1)

Content = list[tuple[str, str]]
"""An input as it is sent: the role and the text of each message."""


class RawAnswer(Protocol):
    """An answer as it came.

    Attributes:
        content: A completion in OpenAI's form, JSON.
        headers: Of the answer.
    """

    @property
    def content(self) -> bytes: ...

    @property
    def headers(self) -> Mapping[str, str]: ...


class HostedBackend(LLMBackend):
    """Asks a hosted model; one input is one request.

    `OpenAIBackend` says what its log-probabilities are, and what it learns from refusals. Who
    derives from this sends, and does nothing else.

    Args:
        model: As the provider names it.
        url: Who is asked, for messages.
        key_env: Environment variable that holds the key, for messages.
        api: ``chat`` sends messages, an input of a template as one of the user; ``completions``
            sends a prompt.
        log_probs: Whether the model shows log-probabilities; without them it answers ``choice``
            instead of ``labels``.
        structured: For ``choice``: whether a JSON schema holds the answer to the label words.
        reasoning_effort: Sent where it is not None.
        max_input_tokens: The longest input, without the frame of the message. Longer ones lose
            the ends of their text fields.
        overhead: The most tokens of that frame.
        max_name: How the server calls the limit of completion tokens, as far as is known.
        tokenizer: ``tokenizer.json`` to count with, or a folder with it; None looks for one by the
            model's name, takes tiktoken, or counts bytes.
        timeout_s: Until an unanswered request counts as failed.

    Raises:
        SpecError: There is no such tokeniser.
    """

    bounds = frozenset({"queries", "requests", "tokens", "prompt_tokens", "completion_tokens"})
    max_inputs = 1

    def __init__(
        self,
        model: str,
        *,
        url: str,
        key_env: str | None,
        api: Literal["chat", "completions"],
        log_probs: bool,
        structured: bool,
        reasoning_effort: str | None,
        max_input_tokens: int,
        overhead: int,
        max_name: str = "max_tokens",
        tokenizer: str | None,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._url = url
        self._key_env = key_env
        self._api = api
        self._log_probs = log_probs
        self._structured = structured
        self._reasoning_effort = reasoning_effort
        self._max_input_tokens = max_input_tokens
        self._overhead = overhead
        if tokenizer is not None:
            find_tokenizer(tokenizer, model)  # A wrong path is seen here.
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self.answers = frozenset[Want]({"labels" if log_probs else "choice", "text"})
        self.censors = log_probs
        self._counter: TokenCounter | None = None
        # What a request says so that the server goes on with a last message of the assistant;
        # None where it is not known to do so.
        self._continuing: Mapping[str, Any] | None = None
        self._loading = asyncio.Lock()
        # What is learned from the server.
        self._max_name = max_name
        self._max_name_learned = False
        self._num_top = _TOP
        self._first = asyncio.Lock()
        self._known: set[Want] = set()
        self._proven: set[Want] = set()
        self._refusals = 0
        self._last_refusal = BackendBlocked("")
        self._no_log_probs: str | None = None
        self._warned = False
        self._watch = LabelWatch(model=model, url=url)

    @property
    def _manner(self) -> str:
        """The end of a fingerprint: how the model is asked, as far as that moves its scores.

        Only what is not as usual, so that most fingerprints end with the model's name.
        """
        asked = {
            "api": None if self._api == "chat" else self._api,
            "structured": None if self._structured or self._log_probs else "false",
            "reasoning_effort": self._reasoning_effort,
            "max_input_tokens": (
                None if self._max_input_tokens == MAX_INPUT_TOKENS else self._max_input_tokens
            ),
        }
        found = ",".join(f"{name}={value}" for name, value in asked.items() if value is not None)
        return f":{found}" if found else ""

    @abstractmethod
    async def _complete(self, body: Mapping[str, Any]) -> RawAnswer:
        """Sends one request, once.

        Args:
            body: In OpenAI's form.

        Raises:
            openai.OpenAIError: It failed.
        """

    async def score(self, query: Query) -> Answer:
        """Answers a query of one input by one request.

        An input that the provider filters, or that the model refuses or answers with something
        else than a label word (``choice``), gets None.

        Raises:
            BackendError: The input cannot be asked: it has a mask, or is too long without fields.
            BackendUnavailable: The server cannot answer now, or has just told us how to ask.
            BackendBlocked: Key, quota, model or settings must change.
            LabelsNotShown: Most of the first answers showed none of the label words; nothing is
                sent.
            SpecError: Two label words are the same but for case and space.
            ValueError: The query has not one input, or asks what this backend does not answer.
        """
        if len(query.inputs) != 1:
            raise ValueError(f"one input at a time, not {len(query.inputs)}")
        if query.want not in self.answers:
            raise ValueError(f"this backend answers {sorted(self.answers)}, not {query.want}")
        words, refusals = spellings(query.label_words), self._refusals
        if query.want == "labels":
            self._watch.admit(query.label_words)
        (content,), quoted = await self._prepared(query)
        async with self._first_alone(query.want, refusals):
            answer = await self._asked(query, content, words, quoted)
        self._warn_beyond(answer.usage, quoted)
        return answer

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Checks label words and form, at no cost."""
        words = spellings(label_words)
        self._check_form(form)
        counter = await self._loaded()
        if self._log_probs and counter.exact:
            for given, word in zip(label_words, words, strict=True):
                forms = {word, word.capitalize(), word.upper(), given.strip()}
                if all(counter.count(space + form) != 1 for form in forms for space in ("", " ")):
                    raise LabelWordError(given, counter.tokens(given))

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """`batch_size` requests of the longest input."""
        return Usage(
            queries=1,
            requests=batch_size,
            prompt_tokens=batch_size * (self._max_input_tokens + self._overhead),
            completion_tokens=batch_size
            * (max_tokens or (1 if self._log_probs else _CHOICE_TOKENS)),
        )

    async def quote(self, query: Query) -> Usage:
        """The counted tokens of the inputs, and the longest completions.

        Raises:
            BackendError: An input has a mask, or is too long without its fields.
        """
        _, quoted = await self._prepared(query)
        return quoted

    async def shortened(self, query: Query) -> object | None:
        """The texts of inputs that are too long: where they end depends on the tokeniser.

        Raises:
            BackendError: As `quote`.
        """
        fitted = await self._fitted(query)
        return None if fitted == list(query.inputs) else fitted

    def reset(self) -> None:
        """Starts to count again how many answers show the label words."""
        self._watch.reset()

    async def _loaded(self) -> TokenCounter:
        async with self._loading:
            if self._counter is None:
                self._counter = await asyncio.to_thread(
                    token_counter, model=self._model, tokenizer=self._tokenizer
                )
            return self._counter

    def _check_form(self, parts: Rendered) -> None:
        """Raises an error if the server cannot be asked in this form.

        Raises:
            BackendError: It cannot.
        """
        if any(part.kind == "mask" for part in parts):
            raise BackendError(
                "the template has {mask}, but this model answers at the end: "
                "take {mask} and what follows it out of the template"
            )
        if not is_chat(parts):
            return
        if self._api == "completions":
            raise BackendError(
                "the task is a chat, which api: completions does not take: set api: chat"
            )
        if self._continuing is None and messages_of(parts)[-1].role == "assistant":
            raise BackendError(
                "the server is not known to go on with an answer that the task begins: take out "
                "task.chat.assistant (llama.cpp's server and vLLM take it)",
                url=self._url,
            )

    async def _prepared(self, query: Query) -> tuple[list[Content], Usage]:
        """The inputs as they are sent, shortened to fit, and what they may cost."""
        counter = await self._loaded()
        contents, num_tokens = [], 0
        for parts in await self._fitted(query):
            contents.append(_content(parts))
            num_tokens += sum(counter.count(text) for _, text in contents[-1])
            num_tokens += self._around(query) + _frames(parts) + self._overhead
        return contents, Usage(
            queries=1,
            requests=len(contents),
            prompt_tokens=num_tokens,
            completion_tokens=len(contents) * _most_written(query),
        )

    async def _fitted(self, query: Query) -> list[Rendered]:
        """The inputs, shortened to fit."""
        counter = await self._loaded()
        fitted = []
        for parts in query.inputs:
            self._check_form(parts)
            room = self._max_input_tokens - self._around(query) - _frames(parts)
            fitted.append(counter.fit(parts, room))
        return fitted

    def _around(self, query: Query) -> int:
        """Tokens of the schema, at most: it is shown to the model too, and counts as input."""
        schema = self._schema(query)
        return 0 if schema is None else len(json.dumps(schema).encode())

    def _schema(self, query: Query) -> dict[str, Any] | None:
        if query.want != "choice" or not self._structured:
            return None
        words = [word.strip() for word in query.label_words]
        return {
            "type": "object",
            "properties": {"label": {"type": "string", "enum": words}},
            "required": ["label"],
            "additionalProperties": False,
        }

    @asynccontextmanager
    async def _first_alone(self, want: Want, refusals: int) -> AsyncIterator[None]:
        """Lets one request through until it is known how the server is asked, and all of them then.

        Args:
            want: What is asked.
            refusals: How many there had been when it came.

        Raises:
            BackendBlocked: The one before met it; this one is not sent.
        """
        if want in self._known:
            yield
            return
        async with self._first:
            if self._refusals > refusals:
                last = self._last_refusal
                raise BackendBlocked(last.summary, usage=NOTHING, **last.private)
            if want == "labels" and self._no_log_probs is not None:
                raise BackendBlocked(self._no_log_probs, url=self._url, usage=NOTHING)
            if want not in self._known:
                try:
                    yield
                except BackendBlocked as exc:
                    self._refusals += 1
                    self._last_refusal = BackendBlocked(exc.summary, **exc.private)
                    raise
                except BackendUnavailable as exc:
                    if exc.retry_after_s != 0:  # It was not for how it was asked.
                        self._known.add(want)
                    raise
                return
        yield

    async def _asked(
        self, query: Query, sent: Content, words: Sequence[str], quoted: Usage
    ) -> Answer:
        import openai

        with translated(model=self._model, url=self._url, key_env=self._key_env):
            try:
                async with asyncio.timeout(self._timeout_s):
                    raw = await self._complete(self._body(query, sent))
            except openai.APIStatusError as exc:
                if str(exc.code) in _FILTERED:
                    return _answer(query.want, None, usage=_ONE_REQUEST)
                self._learn(exc)
                raise
            content: bytes = raw.content
        limits = rate_limits(raw.headers)
        try:
            found = Completion.model_validate_json(content)
        except ValidationError:
            # Without its cause, which quotes the answer.
            raise BackendUnavailable(
                "the answer is cut off or not a completion (if that stays so, check "
                "base_url and api)",
                url=self._url,
            ) from None
        usage = usage_of(found.usage, quoted)
        model = ":".join(filter(None, (found.model, found.system_fingerprint))) or None
        row: tuple[float, ...] | None = None
        written: str | None = None
        censored = 0
        choice = found.choices[0]
        if not choice.withheld:
            if query.want == "labels":
                top = choice.top()
                if top is None:
                    # llama.cpp's server leaves them out where a token ends within a character.
                    self._refuse_no_log_probs(usage, shows=self._continuing is not None)
                elif top:
                    row, censored = label_log_probs(top, choice.first_token(), words)
                    self._watch.note(query.label_words, censored, top)
            else:
                self._refuse_only_reasoning(choice, found.usage, usage)
                written = choice.written
                if query.want == "choice" and written is not None:
                    row = chosen_label(written, words)
            if row is not None or query.want != "labels":
                self._known.add(query.want)
                self._proven.add(query.want)
        return _answer(
            query.want, row, written, usage=usage, censored=censored, model=model, limits=limits
        )

    def _body(self, query: Query, content: Content) -> dict[str, Any]:
        labels = query.want == "labels"
        body: dict[str, Any] = {"model": self._model, "temperature": 1}
        if self._api == "completions":
            body |= {"prompt": content[0][1], "max_tokens": _most_written(query)}
            return body | ({"logprobs": self._num_top} if labels else {})
        body["messages"] = [{"role": role, "content": text} for role, text in content]
        if self._continuing and content[-1][0] == "assistant":
            body["extra_body"] = self._continuing
        body[self._max_name] = _most_written(query)
        if labels:
            body |= {"logprobs": True, "top_logprobs": self._num_top}
        if self._reasoning_effort is not None:
            body["reasoning_effort"] = self._reasoning_effort
        schema = self._schema(query)
        if schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": schema},
            }
        return body

    def _learn(self, exc: openai.APIStatusError) -> None:
        """Sees from a refusal how this server wants to be asked, or that it cannot be.

        Raises:
            BackendUnavailable: Asking again will be in another way.
            BackendBlocked: A setting must change.
            BackendError: The input is longer than the context.
        """
        if exc.status_code not in (400, 403, 422):
            return
        said, param = message_of(exc, self._key_env), str(exc.param)
        text = f"{param} {said}".lower()
        if {str(exc.code), str(exc.type)} & _TOO_LONG:
            raise BackendError(
                "an input is longer than the model's context: shorten the template "
                "or the prompt, lower max_input_tokens (a tokenizer counts them exactly), or start "
                "the server with a longer context",
                url=self._url,
                said=said,
                usage=_ONE_REQUEST,
            )
        if "output limit was reached" in text:
            raise self._only_reasons()
        if "logprobs" in text:
            never = ("unsupported", "not support", "not allowed")
            if self._num_top == _TOP and not any(word in f"{exc.code} {text}" for word in never):
                self._num_top = _SMALL_TOP
                raise self._again(f"it shows at most {_SMALL_TOP} tokens")
            self._refuse_no_log_probs(_ONE_REQUEST)
        about_length = self._max_name in text and "context" not in text
        if about_length and not self._max_name_learned and self._api == "chat":
            others = {"max_tokens", "max_completion_tokens"} - {self._max_name}
            self._max_name, self._max_name_learned = others.pop(), True
            raise self._again(f"it wants {self._max_name}")
        if "response_format" in text or "json_schema" in text:
            raise BackendBlocked(
                f"model {self._model!r} offers no JSON schema: set structured: false",
                url=self._url,
                said=said,
                usage=_ONE_REQUEST,
            )
        if "reasoning_effort" in text:
            raise BackendBlocked(
                f"model {self._model!r} does not take reasoning_effort "
                f"{self._reasoning_effort!r}: change it or leave it out",
                url=self._url,
                said=said,
                usage=_ONE_REQUEST,
            )

    def _again(self, what: str) -> BackendUnavailable:
        return BackendUnavailable(
            f"asked in a way this server does not take ({what}); the next attempt will be right",
            url=self._url,
            usage=_ONE_REQUEST,
            retry_after_s=0.0,
        )

    def _refuse_no_log_probs(self, usage: Usage, *, shows: bool = False) -> None:
        """Ends the run, or only this attempt where the server is known to show them."""
        if shows or "labels" in self._proven:  # Some services have several servers.
            raise BackendUnavailable(
                "an answer without log-probabilities", url=self._url, usage=usage
            )
        effort = ""
        if self._api == "chat" and self._reasoning_effort is None:
            effort = " (a reasoning model may show them with reasoning_effort: none)"
        self._no_log_probs = (
            f"model {self._model!r} shows no log-probabilities: set log_probs: false "
            f"with loss: zero_one, or take another model{effort}"
        )
        raise BackendBlocked(self._no_log_probs, url=self._url, usage=usage)

    def _refuse_only_reasoning(self, choice: Choice, reported: object, usage: Usage) -> None:
        """A model that spends its few tokens on reasoning will never answer."""
        details = reported.get("completion_tokens_details") if isinstance(reported, dict) else None
        reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
        if choice.finish_reason == "length" and not choice.written and reasoning:
            raise self._only_reasons(usage)

    def _only_reasons(self, usage: Usage | None = None) -> BackendBlocked:
        return BackendBlocked(
            f"model {self._model!r} reasons until its tokens are used up: set reasoning_effort: "
            "none (or its lowest), or take another model",
            url=self._url,
            usage=usage,
        )

    def _warn_beyond(self, usage: Usage, quoted: Usage) -> None:
        if not self._warned and usage.beyond(quoted) != NOTHING:
            self._warned = True
            _log.warning(
                "usage_beyond_quote",
                model=self._model,
                prompt_tokens=usage.prompt_tokens,
                quoted=quoted.prompt_tokens,
                effect="a cap on tokens or money may be passed by the requests under way",
                change="set tokenizer to the model's own",
            )


def _frames(parts: Rendered) -> int:
    """Tokens of frames: each message more than one has one of its own."""
    return (len(_content(parts)) - 1) * OPENAI_CHAT_OVERHEAD


def _content(parts: Rendered) -> Content:
    if is_chat(parts):
        return [(message.role, message.text) for message in messages_of(parts)]
    return [("user", "".join(part.text for part in parts))]


def _answer(
    want: Want, row: tuple[float, ...] | None, written: str | None = None, **rest: Any
) -> Answer:
    if want == "text":
        return Answer(log_probs=(None if written is None else (),), texts=(written,), **rest)
    return Answer(log_probs=(row,), **rest)


def _most_written(query: Query) -> int:
    return {"labels": 1, "choice": _CHOICE_TOKENS}.get(query.want, query.max_tokens)
