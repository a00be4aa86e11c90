"""Backend for OpenAI's models and servers with its API, chat or completions."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import structlog
from pydantic import ValidationError

from fedone_sdk.backends.base import Answer, Query, Want
from fedone_sdk.backends.chat import Message, is_chat, messages_of
from fedone_sdk.backends.completions import (
    WITHOUT,
    Choice,
    Completion,
    LabelWatch,
    chosen_label,
    label_log_probs,
    spellings,
)
from fedone_sdk.backends.openai_http import (
    ModelServer,
    ServerBackend,
    cached_tokens,
    rate_limits,
    usage_of,
)
from fedone_sdk.backends.sampled import requests_of
from fedone_sdk.backends.tokens import (
    CHAT_OVERHEAD,
    OPENAI_CHAT_OVERHEAD,
    TokenCounter,
    find_tokenizer,
    token_counter,
)
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendRefused,
    BackendUnavailable,
    FormChanged,
    LabelWordError,
)
from fedone_sdk.messages.base import SERVED_BY
from fedone_sdk.task import Rendered

if TYPE_CHECKING:
    import openai

_log = structlog.get_logger(__name__)

MAX_INPUT_TOKENS = 1024
"""Default of `max_input_tokens`."""

_TOP = 20  # OpenAI's maximum of top_logprobs.
_SMALL_TOP = 5  # The maximum of many other servers.
_MOST_BYTES = 4 * 1024 * 1024  # Of an answer to one input, or of the list of models.
_CHOICE_TOKENS = 64  # Enough for a label word inside JSON.
_COMPLETIONS_OVERHEAD = 4  # The start token, for models that have one.
_OTHER_NAME = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
_UNKNOWN = re.compile("un(supported|recognized|known|expected)|not (support|permit|allow)|extra")
_SYSTEM = (
    *("system role", "system message", "system prompt", "system instruction", "'system'"),
    *("developer instruction", "roles", ".role"),
)
_CODES = "take codes, such as ' A', with a slot of candidates: codes"
_TOO_LONG = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_ONE_REQUEST = Usage(requests=1)
_CONTINUING: Mapping[str, Mapping[str, Any]] = {
    "llamacpp": {},
    "vllm": {"add_generation_prompt": False, "continue_final_message": True},
}
"""Servers that continue a last message of the assistant, by the `owned_by` of their models, with
the extra fields that their requests need."""

Content = list[tuple[str, str]]
"""One input as messages: (role, text) pairs."""


class _Prepared(NamedTuple):
    """A query as messages.

    Attributes:
        least: Prompt tokens that each input has at least.
        shortened: Per input its contents if it was too long, else None.
    """

    contents: list[Content]
    least: list[int]
    worst: Usage
    shortened: list[Content | None]


class OpenAIBackend(ServerBackend[_Prepared]):
    """Backend for a model behind OpenAI's API; one input is one request.

    Log-probabilities come from the most likely tokens that the provider shows, up to 20. A label's
    log-probability is the logsumexp over the shown tokens that spell its whole word, ignoring case
    and a leading space; a token that is only the start of the word does not count. A label that is
    not shown gets an upper bound: the smaller of the least likely shown token and the probability
    that the shown tokens leave. `Answer.censored` counts these labels.

    From refusals the backend detects the name of the completion token limit, the number of tokens
    that the server shows, whether it takes a temperature, and the form of its messages; such a
    refusal is a `FormChanged`. Each is detected once, and logged.

    The arguments are keys of ``kind: openai``. A `model` in the form of a result's ``models``, with
    its ``system_fingerprint``, refuses answers of another one. Without `log_probs` it answers
    ``choice`` instead of ``labels``, and with a number of samples ``counts``.
    """

    bounds = frozenset({"queries", "requests", "tokens", "prompt_tokens", "completion_tokens"})
    max_inputs = 1

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        api: Literal["chat", "completions"] = "chat",
        log_probs: bool | Mapping[Literal["samples"], int] = True,
        structured: bool = True,
        reasoning_effort: str | None = None,
        service_tier: str | None = None,
        max_input_tokens: int = MAX_INPUT_TOKENS,
        tokenizer: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if api == "completions" and log_probs is not True:
            raise ValueError("log_probs must be true for api completions")
        model, _, pinned = model.partition(SERVED_BY)
        self._pinned = pinned.removesuffix(")")
        server = ModelServer(
            model,
            base_url=base_url,
            api_key_env=api_key_env,
            timeout_s=timeout_s,
            max_bytes=_MOST_BYTES,
        )
        super().__init__(server)
        # Resolved here: the attribute's import takes half a second, which would count as the
        # server's time.
        self._create: Callable[..., Awaitable[Any]] = (
            server.client.chat.completions.with_raw_response.create
            if api == "chat"
            else server.client.completions.with_raw_response.create
        )
        self._model, self._url = model, server.url
        self._api = api
        self._log_probs = log_probs is True
        self.samples = 0 if isinstance(log_probs, bool) else log_probs["samples"]
        self.at_once = self.samples
        self._structured = structured
        self._reasoning_effort = reasoning_effort
        self._service_tier = service_tier
        self._max_input_tokens = max_input_tokens
        self._host = urlsplit(self._url).netloc
        self._is_openai = self._host == "openai.com" or self._host.endswith(".openai.com")
        if api == "completions":
            self._overhead = _COMPLETIONS_OVERHEAD
        else:
            self._overhead = OPENAI_CHAT_OVERHEAD if self._is_openai else CHAT_OVERHEAD
        if tokenizer is not None:
            find_tokenizer(tokenizer, model)  # Raises for a wrong path.
        self._tokenizer = tokenizer
        self.answers = frozenset[Want](
            {"labels" if self._log_probs else "counts" if self.samples else "choice", "text"}
        )
        self.censors = self._log_probs
        self._counter: TokenCounter | None = None
        self._loading = asyncio.Lock()
        self._weights = ""  # Set by `check`.
        # Extra fields of requests that continue an assistant message; None if the server is not
        # known to support that.
        self._continuing: Mapping[str, Any] | None = None
        self._down: BackendError | None = None  # Why the list of models was not read.
        # Detected from the server's answers.
        self._max_name = "max_completion_tokens" if self._is_openai else "max_tokens"
        self._changes: set[str] = set()
        self._num_top = _TOP
        self._shows_labels = False
        self._watch = LabelWatch(model=model, url=self._url, written=not self._log_probs)

    @property
    def fingerprint(self) -> str:
        """``openai:<host>:<model>``, plus settings that change scores and differ from the default.

        After `check`, it also has the size and quantisation of the weights if the server lists
        them (llama.cpp, where the model's name is arbitrary). `Answer.model` has the version that
        the provider reports.
        """
        return f"openai:{self._host}:{self._model}{self._manner}{self._weights}"

    async def score(self, query: Query) -> Answer:
        """Send one request for a query of one input.

        The answer is None if the provider filters the answer, the model refuses it, or it is empty.
        With several samples, those count that are none of these.

        Raises:
            BackendError: The input has a mask, or is too long without its text fields.
            BackendRefused: The provider filters the input, or refuses it or its form.
            BackendUnavailable: The server is unavailable, or the next attempt has another form.
            BackendBlocked: Key, quota, model or settings must change.
            LabelsNotShown: Most of the first answers showed none of the label words; no request
                is sent.
            SpecError: Two label words differ only in case or space.
            ValueError: The query has more than one input.
        """
        self.check_query(query)
        if len(query.inputs) != 1:
            raise ValueError(f"one input at a time, not {len(query.inputs)}")
        words = spellings(query.label_words)
        if query.want != "text":
            self._watch.admit(query.label_words)
        prepared = await self._prepared(query)
        return await self._asked(query, prepared, words)

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Check label words, form, and that the server lists the model, at no cost."""
        words = spellings(label_words)
        counter = await self._loaded()
        if self._log_probs and counter.exact:
            for given, word in zip(label_words, words, strict=True):
                spelled = {word, word.capitalize(), word.upper(), given.strip()}
                if all(counter.count(space + one) != 1 for one in spelled for space in ("", " ")):
                    raise LabelWordError(given, counter.tokens(given), _CODES)
        entry = await self._listed()
        if entry is not None:
            self._continuing = _CONTINUING.get(str(entry.get("owned_by")))
        self._check_form(form)
        if entry is not None:
            self._read_weights(entry)

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """`batch_size` inputs of the maximum length."""
        scores: Want = "labels" if self._log_probs or self.samples else "choice"
        written = self._written("text" if max_tokens else scores, max_tokens)
        return Usage(
            queries=1,
            requests=batch_size * len(written),
            prompt_tokens=batch_size * len(written) * (self._max_input_tokens + self._overhead),
            completion_tokens=batch_size * sum(written),
        )

    def reset(self) -> None:
        """Reset the count of answers that show the label words."""
        self._watch.reset()

    @property
    def _manner(self) -> str:
        """The fingerprint's suffix: settings that change scores and differ from the default."""
        asked = {
            "system_fingerprint": self._pinned or None,
            "api": None if self._api == "chat" else self._api,
            "samples": self.samples or None,
            "structured": None if self._structured or self._log_probs else "false",
            "reasoning_effort": self._reasoning_effort,
            "max_input_tokens": (
                None if self._max_input_tokens == MAX_INPUT_TOKENS else self._max_input_tokens
            ),
        }
        found = ",".join(f"{name}={value}" for name, value in asked.items() if value is not None)
        return f":{found}" if found else ""

    async def special_tokens(self, text: str) -> list[str]:
        """Return the special tokens of the model in a text, if its tokeniser is at hand."""
        return (await self._loaded()).special_tokens(text)

    async def _loaded(self) -> TokenCounter:
        async with self._loading:
            if self._counter is None:
                self._counter = await asyncio.to_thread(
                    token_counter, model=self._model, tokenizer=self._tokenizer
                )
            return self._counter

    def _check_form(self, parts: Rendered) -> None:
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
            raise self._down or BackendError(
                "the server is not known to continue an answer that the task begins: remove "
                "task.chat.assistant (llama.cpp's server and vLLM support it)",
                url=self._url,
            )

    async def _prepare(self, query: Query) -> _Prepared:
        counter = await self._loaded()
        return await self._in(self._token_thread, lambda: self._counted(query, counter))

    def _counted(self, query: Query, counter: TokenCounter) -> _Prepared:
        contents: list[Content] = []
        least: list[int] = []
        shortened: list[Content | None] = []
        worst = Usage(queries=1)
        for parts in query.inputs:
            self._check_form(parts)
            messages = messages_of(parts) if is_chat(parts) else [Message("user", parts)]
            # The frames of all messages after the first, and the JSON schema.
            around = self._around(query) + (len(messages) - 1) * OPENAI_CHAT_OVERHEAD
            texts = [message.parts for message in messages]
            fitted, num_tokens = counter.fit(texts, self._max_input_tokens - around)
            contents.append(
                [
                    (message.role, "".join(part.text for part in text))
                    for message, text in zip(messages, fitted, strict=True)
                ]
            )
            least.append(counter.least(num_tokens))
            shortened.append(None if fitted == texts else contents[-1])
            written = self._written(query.want, query.max_tokens, query.samples)
            worst += Usage(
                requests=len(written),
                prompt_tokens=len(written) * (num_tokens + around + self._overhead),
                completion_tokens=sum(written),
            )
        return _Prepared(contents, least, worst, shortened)

    def _written(self, want: Want, max_tokens: int, samples: int = 1) -> list[int]:
        """Return the largest number of tokens that each request of one input may write."""
        if want == "text":
            return [max_tokens]
        if want == "labels" and self.samples:
            return [_CHOICE_TOKENS * more for more in requests_of(self.samples, self.at_once)]
        return [1 if want == "labels" else _CHOICE_TOKENS * samples]

    def _around(self, query: Query) -> int:
        """Upper bound on the tokens of the JSON schema, which counts as input."""
        schema = self._schema(query)
        return 0 if schema is None else len(json.dumps(schema).encode())

    def _schema(self, query: Query) -> dict[str, Any] | None:
        if query.want == "text" or self._log_probs or not self._structured:
            return None
        words = [word.strip() for word in query.label_words]
        return {
            "type": "object",
            "properties": {"label": {"type": "string", "enum": words}},
            "required": ["label"],
            "additionalProperties": False,
        }

    async def _asked(self, query: Query, prepared: _Prepared, words: Sequence[str]) -> Answer:
        import openai

        with self._server.translated():
            try:
                async with asyncio.timeout(self._server.timeout_s):
                    raw = await self._create(**self._body(query, prepared.contents[0]))
                found = self._completion(raw)
            except openai.APIStatusError as exc:
                self._adapt(exc, prepared.contents[0], query.samples)
                raise
            choices = found.choices or []
            if len(choices) < min(query.samples, self.at_once):
                self._give_at_once(len(choices))
            num_written = sum(1 for choice in choices if choice.written)
            if query.want == "text":
                counter = await self._loaded()
                num_written = counter.least(counter.count(choices[0].written or ""))
            least = Usage(prompt_tokens=prepared.least[0], completion_tokens=num_written)
            usage = usage_of(found.usage, prepared.worst, least)
            try:
                self._check_server(found)
                answer = self._read(query, found, choices, words)
            except BackendError as exc:
                exc.usage = usage
                raise
        return replace(
            answer,
            usage=usage,
            cached_tokens=cached_tokens(found.usage, usage.prompt_tokens),
            model=found.version,
            limits=rate_limits(raw.headers),
        )

    def _check_server(self, found: Completion) -> None:
        if self._pinned and found.system_fingerprint != self._pinned:
            raise BackendBlocked(
                f"the answer is of {found.version!r}, the run asks for system_fingerprint "
                f"{self._pinned}: change model"
            )
        if found.service_tier not in (None, self._service_tier or found.service_tier):
            raise BackendBlocked(
                f"the answer is of service_tier {found.service_tier!r}, which costs more than "
                f"{self._service_tier!r}: leave service_tier out"
            )

    def _read(
        self, query: Query, found: Completion, choices: Sequence[Choice], words: Sequence[str]
    ) -> Answer:
        """Return what the choices say, without the facts of the request."""
        if query.want == "labels":
            row, censored = self._shown(query, choices[0], words)
            return Answer(log_probs=(row,), censored=censored, usage=NOTHING)
        answers = [choice for choice in choices if not choice.withheld]
        for choice in answers:
            self._refuse_only_reasoning(choice, found.usage)
        if query.want == "text":
            written = answers[0].written if answers else None
            row = None if written is None else ()
            return Answer(log_probs=(row,), texts=(written,), usage=NOTHING)
        rows = [row for one in answers if (row := self._chosen(query, one, words))]
        row = rows[0] if rows else None
        if rows and query.want == "counts":
            columns = zip(*rows, strict=True)
            row = (*(float(column.count(0.0)) for column in columns), float(len(rows)))
        return Answer(log_probs=(row,), usage=NOTHING)

    def _shown(
        self, query: Query, choice: Choice, words: Sequence[str]
    ) -> tuple[tuple[float, ...] | None, int]:
        """Return the labels' log-probabilities, and how many of them are upper bounds."""
        top = None if choice.withheld else choice.top()
        if top is None and not choice.withheld:
            # llama.cpp's server omits them if a token ends inside a character.
            self._refuse_no_log_probs(shows=self._continuing is not None)
        if not top:
            return None, 0
        try:
            row, censored = label_log_probs(top, choice.first_token(), words)
        except ValueError as exc:
            raise BackendRefused(
                f"{exc}, so they are no probabilities: {WITHOUT}, or take another server"
            ) from exc
        shown = [token.text for token in top]
        self._watch.note(query.label_words, shown, device=query.device)
        self._shows_labels = True
        return row, censored

    def _chosen(
        self, query: Query, choice: Choice, words: Sequence[str]
    ) -> tuple[float, ...] | None:
        row = None if choice.written is None else chosen_label(choice.written, words)
        if row is not None:
            label = words[row.index(0.0)] if 0.0 in row else choice.written or ""
            self._watch.note(query.label_words, [label], device=query.device)
        return row

    def _completion(self, raw: Any) -> Completion:
        """Parse an answer; an error in its place is raised as its HTTP status would be."""
        import openai

        try:
            found = Completion.model_validate_json(raw.content)
        except ValidationError:
            found = Completion()
        if (failure := found.failure()) is not None:
            status, body = failure
            error = openai.APIStatusError("", response=raw.http_response, body=body)
            error.status_code = status
            raise error
        if not found.choices:
            # Without the cause, which quotes the answer.
            raise BackendUnavailable(
                "the answer is cut off or not a completion (if that stays so, check "
                "base_url and api)"
            )
        return found

    def _body(self, query: Query, content: Content) -> dict[str, Any]:
        labels, max_tokens = query.want == "labels", self._written(query.want, query.max_tokens)[0]
        body: dict[str, Any] = {"model": self._model}
        if self._service_tier is not None:
            body["service_tier"] = self._service_tier
        if "temperature" not in self._changes:
            # Servers may scale log-probabilities by it; a written answer must not be random.
            body["temperature"] = 0 if query.want in ("choice", "text") else 1
        if "system" in self._changes and content[0][0] == "system":
            (_, system), (role, text), *rest = content
            content = [(role, f"{system}\n\n{text}"), *rest]
        if self._api == "completions":
            body |= {"prompt": content[0][1], "max_tokens": max_tokens}
            body |= {"stop": list(query.stop)} if query.stop else {}
            return body | ({"logprobs": self._num_top} if labels else {})
        body["messages"] = [
            {
                "role": role,
                "content": [{"type": "text", "text": text}] if "parts" in self._changes else text,
            }
            for role, text in content
        ]
        if self._continuing and content[-1][0] == "assistant":
            body["extra_body"] = self._continuing
        body[self._max_name] = max_tokens
        if (answers := min(query.samples, self.at_once)) > 1:
            body["n"] = answers
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

    def _adapt(self, exc: openai.APIStatusError, content: Content, samples: int) -> None:
        """Change the form of the next requests to what the server names, each part once.

        Raises:
            FormChanged: The next attempt has another form.
            BackendRefused: The input does not fit the model.
            BackendBlocked: A setting must change.
        """
        if exc.status_code not in (400, 403, 422):
            return
        said, param = self._server.message_of(exc), str(exc.param)
        text, sent = f"{param} {said}".lower(), " ".join(text for _, text in content).lower()
        facts: dict[str, Any] = {"said": said, "usage": _ONE_REQUEST}

        def names(*words: str) -> bool:
            # A server may quote the input.
            return any(word == param or (word in text and word not in sent) for word in words)

        if {str(exc.code), str(exc.type)} & _TOO_LONG:
            raise BackendRefused(
                "an input is longer than the model's context: shorten the template "
                "or the prompt, lower max_input_tokens (a tokenizer counts them exactly), or start "
                "the server with a longer context",
                **facts,
            )
        if names("output limit was reached"):
            raise self._only_reasons()
        if names("logprobs", "top_logprobs"):
            never = ("unsupported", "not support", "not allowed")
            if self._num_top == _TOP and not any(word in f"{exc.code} {text}" for word in never):
                self._num_top = _SMALL_TOP
                raise self._again(f"it shows at most {_SMALL_TOP} tokens")
            self._refuse_no_log_probs()
        # Some servers name it in refusals of an input that is too long.
        renamed = _OTHER_NAME[self._max_name] in text or _UNKNOWN.search(text)
        if names(self._max_name) and renamed and "context" not in text and self._once("max_name"):
            self._max_name = _OTHER_NAME[self._max_name]
            raise self._again(f"it expects {self._max_name}")
        if self.at_once > 1 and (param == "n" or re.search(r"\bn\b|candidate_?count", text)):
            self._give_at_once(max(min(samples, self.at_once) // 2, 1))
            raise self._again(f"at most {self.at_once} answers to one request")
        if names("temperature") and self._once("temperature"):
            raise self._again("without temperature, so written answers are random")
        if content[0][0] == "system" and names(*_SYSTEM) and self._once("system"):
            raise self._again("the system message is the beginning of the user's")
        if names("array", "list") and names("content", "messages") and self._once("parts"):
            raise self._again("messages are lists of parts")
        if names("response_format", "json_schema"):
            raise BackendBlocked(
                f"model {self._model!r} offers no JSON schema: set structured: false", **facts
            )
        if self._reasoning_effort is not None and names("reasoning"):
            raise BackendBlocked(
                f"model {self._model!r} does not take reasoning_effort "
                f"{self._reasoning_effort!r}: change it or leave it out",
                **facts,
            )

    def _give_at_once(self, answers: int) -> None:
        self.at_once = answers
        _log.warning("samples need more requests", url=self._url, answers_per_request=answers)

    def _once(self, change: str) -> bool:
        if (self._api == "completions" and change != "temperature") or change in self._changes:
            return False
        self._changes.add(change)
        return True

    def _again(self, change: str) -> FormChanged:
        _log.warning("requests are adapted to the model's server", url=self._url, change=change)
        return FormChanged(
            f"the server does not accept this form of request ({change}); the next attempt adapts",
            usage=_ONE_REQUEST,
        )

    def _refuse_no_log_probs(self, *, shows: bool = False) -> None:
        """Raise an error that a retry may mend only if the model is known to show them."""
        if shows or self._shows_labels:  # Services with several servers differ per answer.
            raise BackendUnavailable("an answer without log-probabilities", usage=_ONE_REQUEST)
        effort = ""
        if self._api == "chat" and self._reasoning_effort is None:
            effort = " (a reasoning model may show them with reasoning_effort: none)"
        raise BackendBlocked(
            f"model {self._model!r} shows no log-probabilities: {WITHOUT}, or take another "
            f"model{effort}",
            usage=_ONE_REQUEST,
        )

    def _refuse_only_reasoning(self, choice: Choice, reported: object) -> None:
        details = reported.get("completion_tokens_details") if isinstance(reported, dict) else None
        reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else None
        if choice.finish_reason == "length" and not choice.written and reasoning:
            raise self._only_reasons()

    def _only_reasons(self) -> BackendRefused:
        return BackendRefused(
            f"model {self._model!r} reasons until its tokens are used up: set reasoning_effort: "
            "none (or its lowest), or take another model",
            usage=_ONE_REQUEST,
        )

    def _read_weights(self, entry: Mapping[str, Any]) -> None:
        meta = entry.get("meta")
        meta = meta if isinstance(meta, dict) else {}
        found = [f"{name}={meta[name]}" for name in ("n_params", "size", "ftype") if name in meta]
        self._weights = f":{','.join(found)}" if found else ""

    async def _listed(self) -> Mapping[str, Any] | None:
        """Return the server's entry for the model; None if the server has no list of models."""
        import openai

        models = self._server.client.models.with_raw_response
        with self._server.translated():
            async with asyncio.timeout(self._server.timeout_s):
                try:
                    raw = await models.retrieve(self._model)
                    return _object(raw.content)
                except openai.APIStatusError as exc:
                    if exc.status_code == 401:
                        raise
                # Either the model is unknown, or the server supports only the list.
                try:
                    listing = await models.list()
                except openai.APIStatusError as exc:
                    if exc.status_code == 401:
                        raise
                    # The list may be forbidden, or down; the first request decides.
                    self._down = self._server.failure(exc) if exc.status_code >= 500 else None
                    return None
                found = _object(listing.content).get("data")
        entries = found if isinstance(found, list) else []
        by_name = {
            name: entry for entry in entries if isinstance(entry, dict) for name in _names(entry)
        }
        if self._model in by_name:
            return by_name[self._model]
        near = get_close_matches(self._model, by_name, n=5, cutoff=0.3) or sorted(by_name)[:5]
        exist = f"; models that exist: {', '.join(near)}" if near else ""
        raise BackendBlocked(
            f"model {self._model!r} does not exist, or the key has no access to it{exist}",
            url=self._url,
        )


def _object(content: bytes) -> Mapping[str, Any]:
    found = json.loads(content)
    return found if isinstance(found, dict) else {}


def _names(entry: Mapping[str, Any]) -> list[str]:
    aliases = entry.get("aliases")
    return [str(entry.get("id")), *map(str, aliases if isinstance(aliases, list) else [])]
