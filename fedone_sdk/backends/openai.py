"""Backend for OpenAI's models, and for servers with OpenAI's chat or completions API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlsplit

from pydantic import ValidationError

from fedone_sdk.backends import completions, model_server, tokens
from fedone_sdk.backends.base import Answer, Query, Want, one_query
from fedone_sdk.backends.chat import Message, is_chat, messages_of, refuse_mask
from fedone_sdk.backends.completions import Choice, Completion, requests_of
from fedone_sdk.backends.label_words import LabelWatch
from fedone_sdk.backends.model_server import ModelServer, ServerBackend
from fedone_sdk.backends.request_form import CONTINUING, SAMPLES_ADVICE, Contents, RequestForm
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BackendBlocked, BackendError, BackendRefused, LabelWordError
from fedone_sdk.messages.base import SERVED_BY, first_error
from fedone_sdk.task import Rendered

MAX_INPUT_TOKENS = 1024

_MAX_BYTES = 4 * 1024 * 1024  # An answer to one input, or the list of models, is shorter.
_CHOICE_TOKENS = 64  # Enough for a label word inside JSON.
_COMPLETIONS_OVERHEAD = 4  # Bound on the start tokens of a prompt.
_WEIGHTS = ("n_params", "size", "ftype")
_ADVICE = "use codes, such as ' A', and explain them by a slot {name: codes, candidates: codes}"


class _Prepared(NamedTuple):
    contents: Contents
    min_tokens: int  # Lower bound on the prompt tokens.
    worst: Usage
    is_shortened: bool


class OpenAIBackend(ServerBackend[_Prepared]):
    """Backend for a model behind OpenAI's API; one input is one request.

    The provider shows the most likely tokens, up to 20. The probability of a label is the sum of
    the probabilities of all shown tokens that are the label word; case and a leading space are
    ignored. A token that is only the start of the word does not count. If no shown token is the
    word, the label gets an upper bound: the lowest shown probability, or 1 minus the sum of the
    shown probabilities if this is lower. `Answer.censored` counts these labels.

    After a server's refusal, the format of requests is changed (`RequestForm`).

    The arguments are keys of ``kind: openai``. `log_probs` decides the kind of the answers: true
    for ``labels``, false for ``choice``, ``{samples: N}`` for ``counts``. `model` may end with a
    fingerprint, as results print it: ``NAME (system_fingerprint fp_1)``. Answers with another
    fingerprint are then refused.
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
        reasoning_effort: str | None = None,
        service_tier: str | None = None,
        max_input_tokens: int = MAX_INPUT_TOKENS,
        tokenizer: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if api == "completions" and log_probs is not True:
            raise ValueError("log_probs must be true for api completions")
        self._model, _, pinned = model.partition(SERVED_BY)
        self._pinned = pinned.removesuffix(")")
        server = ModelServer(
            self._model,
            base_url=base_url,
            api_key_env=api_key_env,
            timeout_s=timeout_s,
            max_bytes=_MAX_BYTES,
        )
        super().__init__(server)
        self.takes_schema = api == "chat"
        self._path = "/chat/completions" if api == "chat" else "/completions"
        self._api = api
        self._log_probs = log_probs is True
        self.samples = 0 if isinstance(log_probs, bool) else log_probs["samples"]
        self._reasoning_effort = reasoning_effort
        self._max_input_tokens = max_input_tokens
        self._host = urlsplit(server.url).netloc
        is_openai = self._host == "openai.com" or self._host.endswith(".openai.com")
        # Without a tier, OpenAI takes the project's, which may cost more than the price table.
        self._service_tier = service_tier or ("default" if is_openai and api == "chat" else None)
        self._form = RequestForm(
            server,
            api=api,
            max_tokens_name="max_completion_tokens" if is_openai else "max_tokens",
            reasoning_effort=reasoning_effort,
            service_tier=self._service_tier,
            samples=self.samples,
        )
        frame = tokens.OPENAI_CHAT_OVERHEAD if is_openai else tokens.CHAT_OVERHEAD
        self._overhead = frame if api == "chat" else _COMPLETIONS_OVERHEAD
        if tokenizer is not None:
            tokens.find_tokenizer(tokenizer, model)  # Raises for a wrong path.
        self._tokenizer = tokenizer
        self.answers = frozenset[Want](
            {"labels" if self._log_probs else "counts" if self.samples else "choice", "text"}
        )
        self._counter: tokens.TokenCounter | None = None
        self._weights = ""  # Set by `check`.
        self._list_error: BackendError | None = None  # Why the list of models was not read.
        self._watch = LabelWatch(model=self._model, url=server.url, written=not self._log_probs)

    @property
    def fingerprint(self) -> str:
        """``openai:<host>:<model>``, plus settings that change scores and differ from the default.

        After `check` it also contains the size and quantisation of the weights, if the server lists
        them, as llama.cpp's server does.
        """
        settings = {
            "system_fingerprint": self._pinned or None,
            "api": None if self._api == "chat" else self._api,
            "samples": self.samples or None,
            "reasoning_effort": self._reasoning_effort,
            "max_input_tokens": (
                None if self._max_input_tokens == MAX_INPUT_TOKENS else self._max_input_tokens
            ),
        }
        return f"openai:{self._host}:{self._model}{_suffix(settings)}{self._weights}"

    @property
    def at_once(self) -> int:
        return self._form.at_once

    async def score(self, query: Query) -> Answer:
        """Send one request for a query of one input.

        An answer is None if it is empty, a refusal, or filtered by the provider. If several answers
        are sampled, such answers are not counted.

        Raises:
            LabelsNotShown: Most of the first answers showed none of the label words.
            SpecError: Two label words differ only in case or space.
        """
        self.check_query(query)
        if len(query.inputs) != 1:
            raise ValueError(f"one input at a time, not {len(query.inputs)}")
        words = completions.spellings(query.label_words)
        if query.want != "text":
            self._watch.admit(query.label_words)
        prepared = await self._prepared(query)
        max_tokens = self._max_written(query.want, query.max_tokens)[0]
        body = self._form.body(query, prepared.contents, max_tokens, self._schema(query))
        usage: Usage | None = None
        try:
            reply = await self._server.send(self._path, body)
            if reply.is_error:
                self._form.adapt(reply, prepared.contents, query.samples)
                raise self._server.error_of(reply)
            completion = Completion.model_validate(reply.body)
            usage = await self._usage(query, prepared, completion)
            self._check_served(completion)
            answer = self._read(query, completion, words)
        except ValidationError as exc:  # Its message quotes the answer.
            raise self._server.unreadable(reply, first_error(exc)) from None
        except BackendError as exc:
            exc.url, exc.usage = self._server.url, usage or exc.usage
            raise
        return replace(
            answer,
            usage=usage,
            cached_tokens=model_server.cached_tokens(completion.usage, usage.prompt_tokens),
            model=completion.version,
            limits=model_server.rate_limits(reply.headers),
        )

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        words = completions.spellings(label_words)
        counter = await self._in(self._token_thread, self._load_counter)
        if self._log_probs and counter.exact:
            for label_word, word in zip(label_words, words, strict=True):
                texts = {word, word.capitalize(), word.upper(), label_word.strip()}
                if all(counter.count(space + text) != 1 for text in texts for space in ("", " ")):
                    parts = [label_word[begin:end] for begin, end in counter.spans(label_word)]
                    raise LabelWordError(label_word, parts, _ADVICE)
        entry = await self._fetch_model_entry()
        if entry is not None:
            self._form.continuing = CONTINUING.get(str(entry.get("owned_by")))
            meta = entry.get("meta")
            if isinstance(meta, dict):
                self._weights = _suffix({name: meta.get(name) for name in _WEIGHTS})
        self._check_form(form)

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        scores: Want = "labels" if self._log_probs or self.samples else "choice"
        written = self._max_written("text" if max_tokens else scores, max_tokens)
        requests = batch_size * len(written)
        num_tokens = requests * (self._max_input_tokens + self._overhead)
        return one_query(num_tokens, batch_size * sum(written), requests)

    async def quote(self, query: Query) -> Usage:
        inputs = [await self._prepared(query.part([at])) for at in range(len(query.inputs))]
        return sum((each.worst.without_queries() for each in inputs), Usage(queries=1))

    async def shortened(self, query: Query) -> Sequence[object]:
        inputs = [await self._prepared(query.part([at])) for at in range(len(query.inputs))]
        return [each.contents if each.is_shortened else None for each in inputs]

    async def special_tokens(self, text: str) -> list[str]:
        counter = await self._in(self._token_thread, self._load_counter)
        return counter.special_tokens(text)

    def reset(self) -> None:
        self._watch.reset()

    def _load_counter(self) -> tokens.TokenCounter:
        """Load the counter, if it is not loaded; called in the token thread only."""
        if self._counter is None:
            self._counter = tokens.token_counter(model=self._model, tokenizer=self._tokenizer)
        return self._counter

    async def _prepare(self, query: Query) -> _Prepared:
        return await self._in(self._token_thread, lambda: self._fit_messages(query))

    def _fit_messages(self, query: Query) -> _Prepared:
        counter = self._load_counter()
        (parts,) = query.inputs
        self._check_form(parts)
        messages = messages_of(parts) if is_chat(parts) else [Message("user", parts)]
        schema = self._schema(query)
        # Bound on the tokens that the JSON schema and all messages after the first one add.
        around = (len(messages) - 1) * tokens.OPENAI_CHAT_OVERHEAD
        around += 0 if schema is None else len(json.dumps(schema).encode())
        texts = [message.parts for message in messages]
        fitted, num_tokens = counter.fit(texts, self._max_input_tokens - around)
        pairs = zip((message.role for message in messages), fitted, strict=True)
        written = self._max_written(query.want, query.max_tokens, query.samples)
        prompt_tokens = len(written) * (num_tokens + around + self._overhead)
        return _Prepared(
            contents=[(role, "".join(part.text for part in text)) for role, text in pairs],
            min_tokens=counter.min_tokens(num_tokens),
            worst=one_query(prompt_tokens, sum(written), len(written)),
            is_shortened=fitted != texts,
        )

    def _check_form(self, parts: Rendered) -> None:
        refuse_mask(parts)
        if not is_chat(parts):
            return
        if self._api == "completions":
            raise BackendError("the task is a chat, which needs api: chat, not api: completions")
        if self._form.continuing is None and messages_of(parts)[-1].role == "assistant":
            raise self._list_error or BackendError(
                "task.chat.assistant begins the answer, and only llama.cpp's server and vLLM are "
                "known to continue an answer: remove this key, or use one of these servers",
                url=self._server.url,
            )

    def _max_written(self, want: Want, max_tokens: int, samples: int = 1) -> list[int]:
        """Return the maximum number of generated tokens of each request for one input."""
        if want == "text":
            return [max_tokens]
        if want == "labels" and self.samples:
            return [_CHOICE_TOKENS * num for num in requests_of(self.samples, self.at_once)]
        return [1 if want == "labels" else _CHOICE_TOKENS * samples]

    def _schema(self, query: Query) -> dict[str, Any] | None:
        if query.want == "text":
            return json.loads(query.schema) if query.schema else None
        if self._log_probs:
            return None
        words = [word.strip() for word in query.label_words]
        return {
            "type": "object",
            "properties": {"label": {"type": "string", "enum": words}},
            "required": ["label"],
            "additionalProperties": False,
        }

    async def _usage(self, query: Query, prepared: _Prepared, completion: Completion) -> Usage:
        choices = completion.choices
        if len(choices) < min(query.samples, self.at_once):
            self._form.limit_answers(len(choices))
        num_written = sum(bool(choice.written) for choice in choices)
        if query.want != "labels":
            counter = await self._in(self._token_thread, self._load_counter)
            # llama.cpp's server reports the tokens of one of several answers.
            counts = [counter.count(choice.written or "") for choice in choices]
            num_written = sum(map(counter.min_tokens, counts))
        minimum = Usage(prompt_tokens=prepared.min_tokens, completion_tokens=num_written)
        return model_server.usage_of(completion.usage, prepared.worst, minimum)

    def _check_served(self, completion: Completion) -> None:
        if self._pinned and completion.system_fingerprint != self._pinned:
            raise BackendBlocked(
                f"the answer is from {completion.version!r}, but backend.model has "
                f"system_fingerprint {self._pinned}: change model"
            )
        if completion.service_tier not in (None, self._service_tier or completion.service_tier):
            raise BackendBlocked(
                f"the answer is of service_tier {completion.service_tier!r}, which costs more than "
                f"{self._service_tier!r}: change service_tier, or the provider's settings"
            )

    def _read(self, query: Query, completion: Completion, words: Sequence[str]) -> Answer:
        choices = completion.choices
        if query.want == "labels":
            row, censored = self._read_labels(query, choices[0], words)
            return Answer(log_probs=(row,), censored=censored, usage=NOTHING)
        answers = [choice for choice in choices if not choice.withheld]
        if any(choice.finish_reason == "length" and not choice.written for choice in answers):
            raise self._form.only_reasons()
        if query.want == "text":
            written = answers[0].written if answers else None
            return Answer(
                log_probs=(None if written is None else (),), texts=(written,), usage=NOTHING
            )
        rows = [row for choice in choices if (row := self._read_choice(query, choice, words))]
        row = rows[0] if rows else None
        if rows and query.want == "counts":
            columns = zip(*rows, strict=True)
            row = (*(float(column.count(0.0)) for column in columns), float(len(rows)))
        return Answer(log_probs=(row,), usage=NOTHING)

    def _read_labels(
        self, query: Query, choice: Choice, words: Sequence[str]
    ) -> tuple[tuple[float, ...] | None, int]:
        """Return the labels' log-probabilities, and how many of them are upper bounds."""
        top = None if choice.withheld else choice.top()
        if top is None and not choice.withheld:
            # llama.cpp's server omits the tokens if the sampled token ends inside a character.
            raise self._form.no_log_probs(sometimes=(choice.written or "").endswith("\ufffd"))
        shown = [token.text for token in top or ()]
        self._watch.note(query.label_words, shown or ["(no text)"], device=query.device)
        if not top:
            return None, 0
        try:
            row, censored = completions.label_log_probs(top, choice.first_token(), words)
        except ValueError as exc:
            raise BackendRefused(
                f"{exc}, more than 1: {SAMPLES_ADVICE}, or use another server"
            ) from exc
        self._form.shows_labels = True
        return row, censored

    def _read_choice(
        self, query: Query, choice: Choice, words: Sequence[str]
    ) -> tuple[float, ...] | None:
        written = "" if choice.withheld else choice.written or ""
        row = completions.chosen_label(written, words)
        label = words[row.index(0.0)] if row and 0.0 in row else written or "(no text)"
        self._watch.note(query.label_words, [label], device=query.device)
        return row

    async def _fetch_model_entry(self) -> Mapping[str, Any] | None:
        """Return the server's entry for the model; None if the server has no list of models."""
        reply = await self._server.send(f"/models/{quote(self._model, safe='')}")
        if not reply.is_error:
            return reply.body if isinstance(reply.body, dict) else {}
        if reply.status != 401:  # The model is unknown, or the server has only a list of models.
            reply = await self._server.send("/models")
        if reply.status == 401:
            raise self._server.error_of(reply)
        if reply.is_error:  # A key may have access to the model, but not to the list.
            self._list_error = self._server.error_of(reply) if reply.status >= 500 else None
            return None
        entries = reply.body.get("data") if isinstance(reply.body, dict) else reply.body
        by_name: dict[str, Mapping[str, Any]] = {}
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict):
                aliases = entry.get("aliases")
                names = [entry.get("id"), *(aliases if isinstance(aliases, list) else [])]
                by_name |= dict.fromkeys(map(str, names), entry)
        # Lists omit suffixes such as ":nitro", and may have patterns such as "openai/*".
        names = [self._model, self._model.partition(":")[0]]
        names += [name for name in by_name if fnmatchcase(self._model, name)]
        if found := [by_name[name] for name in names if name in by_name]:
            return found[0]
        if self._host.endswith(".azure.com"):  # Azure lists models, but requests name deployments.
            return None
        near = get_close_matches(self._model, by_name, n=5, cutoff=0.3) or sorted(by_name)[:5]
        exist = f"; models that exist: {', '.join(near)}" if near else ""
        raise self._server.blocked(
            f"model {self._model!r} does not exist, or the key has no access to it{exist}"
        )


def _suffix(settings: Mapping[str, object]) -> str:
    parts = [f"{name}={value}" for name, value in settings.items() if value is not None]
    return f":{','.join(parts)}" if parts else ""
