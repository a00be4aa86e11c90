"""Backend for vLLM servers: causal models, and RoBERTa with the SDK's plugin."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from fedone_sdk.backends import chat, tokens
from fedone_sdk.backends.base import EVERY_UNIT, Answer, Query, float32, one_query
from fedone_sdk.backends.completions import version_of
from fedone_sdk.backends.encoders import CausalEncoder, ClozeEncoder
from fedone_sdk.backends.model_server import ModelServer, ServerBackend, usage_of
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendBlocked, BackendError, MissingExtraError
from fedone_sdk.task import Part, Rendered

_PROBE = "The film's  cast: 3 naïve\n actors, 1 24 日本 Ω."
"""A text to compare tokenisers; it has several scripts, numbers, line breaks and spaces."""

_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions from reading an answer whose format is not vLLM's."""

_T = TypeVar("_T")
_Rows = tuple[tuple[float, ...], ...]
_Read = Callable[[Any], tuple[_Rows, tuple[str, ...]]]
"""Returns the log-probabilities and texts of an answer, as in `Answer`."""


class _Request(NamedTuple):
    path: str
    body: dict[str, Any]
    worst: Usage
    read: _Read


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server's description of its model."""

    root: str  # The model's folder, or its name on the hub.
    max_length: int
    version: str
    masked: bool
    start: list[int]  # The special tokens before a text.
    probe: list[int]  # The tokens of `_PROBE`, without special tokens.

    def __str__(self) -> str:
        return f"{self.root} (vLLM {self.version}, maximum length {self.max_length})"


class VllmBackend(ServerBackend[_Request]):
    """Backend for a vLLM server, with one request per query.

    vLLM's dialect of OpenAI's API takes lists of prompts as token ids, and returns exact
    log-probabilities of chosen tokens (``logprob_token_ids``).

    Log-probabilities are over the whole vocabulary, and do not depend on the server's sampling
    settings (with ``--logprobs-mode raw_logprobs``, the default). Inputs are sent as token ids, so
    names of special tokens in a text are plain text. The backend shortens inputs that are too long.
    If this machine has no ``tokenizer.json``, the backend downloads it from the Hugging Face hub.

    `check` reads the maximum length, the start tokens and the kind of model from the server. Call
    it before `fingerprint` and `worst_case`.

    The arguments are keys of ``kind: vllm``. If a label word has several tokens
    (`multi_token_labels`), each input is sent once per label word.
    """

    bounds = EVERY_UNIT
    answers = frozenset({"labels", "reference", "text"})
    takes_schema = True

    def __init__(
        self,
        model: str,
        *,
        base_url: str = "http://127.0.0.1:8000",
        api_key_env: str | None = None,
        tokenizer: str | None = None,
        multi_token_labels: bool = False,
        timeout_s: float = 60.0,
    ) -> None:
        if find_spec("tokenizers") is None:
            raise MissingExtraError("a vLLM server", extra="vllm")
        root = base_url.rstrip("/").removesuffix("/v1")
        super().__init__(
            ModelServer(model, base_url=root, api_key_env=api_key_env, timeout_s=timeout_s)
        )
        self._model = model
        self._tokenizer_file = tokens.find_tokenizer(tokenizer, model)
        self._multi_token_labels = multi_token_labels
        self._served: ServedModel | None = None
        self._encoder: CausalEncoder | ClozeEncoder | None = None
        self._prompts_per_input = 1
        self._warns_of_raw_template = True

    @property
    def fingerprint(self) -> str:
        """``vllm:<the model's folder or hub name on the server>:<maximum length>``."""
        served = self._checked()
        return f"vllm:{served.root}:{served.max_length}"

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Read the model's description from the server, and check that the tokenisers are equal.

        Raises:
            BackendBlocked: The server lacks the model or the plugin, has another tokeniser, or has
                changed since the last check.
        """
        served = await self._describe()
        if self._served is None:
            self._encoder = await self._make_encoder(served)
            self._served = served
            if served.masked:
                self.answers = frozenset({"labels"})
        elif served != self._served:
            raise self._server.blocked(
                f"the server has changed from {self._served} to {served}: restore the first model, "
                "or start a new run"
            )
        await self._check_form(form)
        encoder = self._encoder
        assert encoder is not None
        labels = await self._in(self._token_thread, lambda: encoder.label_ids(label_words, form))
        if any(len(ids) > 1 for ids in labels):
            self._prompts_per_input = max(self._prompts_per_input, len(labels))

    async def score(self, query: Query) -> Answer:
        request = await self._prepared(query)
        answer = await self._server.call(request.path, request.body)
        try:
            log_probs, texts = request.read(answer)
        except _UNREADABLE as exc:
            raise BackendBlocked(
                "the answer has no log-probabilities of the requested tokens: update vLLM (0.32 is "
                "known to work), or check base_url",
                url=self._server.url,
                usage=request.worst.without_queries(),
            ) from exc
        served = self._checked()
        fingerprint = answer.get("system_fingerprint") or f"vllm-{served.version}"
        usage = answer["data"] if "data" in answer else answer.get("usage")
        return Answer(
            log_probs=log_probs,
            usage=usage_of(usage, request.worst, Usage(prompt_tokens=request.worst.prompt_tokens)),
            texts=texts,
            model=version_of(served.root, fingerprint),
        )

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        # An input is sent once per label word if a checked label word has several tokens.
        num_prompts, served = batch_size * self._prompts_per_input, self._checked()
        num_new = 0 if served.masked else 1
        prompt_tokens = num_prompts * (served.max_length - num_new)
        return one_query(prompt_tokens, num_prompts * max(num_new, max_tokens))

    async def _prepare(self, query: Query) -> _Request:
        if self._encoder is None:
            await self.check(())
        self.check_query(query)
        for parts in query.inputs:
            await self._fetch_frame(parts)
        return await self._in(self._token_thread, lambda: self._request(query))

    def _request(self, query: Query) -> _Request:
        encoder = self._encoder
        assert encoder is not None
        if isinstance(encoder, ClozeEncoder):
            return self._cloze_request(encoder, query)
        if query.want == "text":
            return self._text_request(encoder, query)
        endings = encoder.endings(query)
        if query.want == "labels" and all(len(ids) == 1 for ids in endings[0]):
            return self._label_request(encoder, query, [token for (token,) in endings[0]])
        return self._ending_request(encoder, query, endings)

    def _cloze_request(self, encoder: ClozeEncoder, query: Query) -> _Request:
        labels = [token for (token,) in encoder.label_ids(query.label_words)]
        ids = [encoder.encode(parts).ids for parts in query.inputs]
        data = {"token_ids": ids, "label_token_ids": labels}
        return _Request(
            path="/pooling",
            body={"model": self._model, "data": data},
            worst=one_query(sum(map(len, ids))),
            read=lambda answer: (_rows(answer["data"]["log_probs"], len(ids), len(labels)), ()),
        )

    def _label_request(self, encoder: CausalEncoder, query: Query, labels: list[int]) -> _Request:
        ids = [encoder.encode(parts, reserve=1) for parts in query.inputs]

        def read(answer: Any) -> tuple[_Rows, tuple[()]]:
            choices = _choices(answer, len(ids))
            shown = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
            rows = [[row[f"token_id:{token}"] for token in labels] for row in shown]
            return _rows(rows, len(ids), len(labels)), ()

        # Tokens are shown as ids, because two tokens may have the same text.
        return self._completion(
            ids, read, logprobs=0, logprob_token_ids=labels, return_tokens_as_token_ids=True
        )

    def _ending_request(
        self, encoder: CausalEncoder, query: Query, endings: list[list[list[int]]]
    ) -> _Request:
        ids: list[list[int]] = []
        for parts, texts in zip(query.inputs, endings, strict=True):
            start = encoder.encode(parts, reserve=max(map(len, texts)) + 1)
            ids += [[*start, *ending] for ending in texts]

        def read(answer: Any) -> tuple[_Rows, tuple[()]]:
            choices = iter(_choices(answer, len(ids)))
            rows = [
                [_ending_log_prob(next(choices)["prompt_logprobs"], ending) for ending in texts]
                for texts in endings
            ]
            return tuple(map(tuple, rows)), ()

        return self._completion(ids, read, prompt_logprobs=0)

    def _text_request(self, encoder: CausalEncoder, query: Query) -> _Request:
        ids = encoder.encode_for_text(query)

        def read(answer: Any) -> tuple[_Rows, tuple[str, ...]]:
            texts = tuple(choice["text"] for choice in _choices(answer, len(ids)))
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a text is missing")
            return ((),) * len(ids), texts

        options: dict[str, object] = {"stop": query.stop} if query.stop else {}
        if query.schema:
            schema = {"name": "answer", "schema": json.loads(query.schema)}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        return self._completion(ids, read, max_tokens=query.max_tokens, **options)

    def _completion(
        self, ids: list[list[int]], read: _Read, *, max_tokens: int = 1, **options: object
    ) -> _Request:
        # Greedy, for reproducible texts; log-probabilities do not depend on the temperature.
        body = {"model": self._model, "prompt": ids, "max_tokens": max_tokens, "temperature": 0}
        worst = one_query(sum(map(len, ids)), len(ids) * max_tokens)
        return _Request("/v1/completions", {**body, **options}, worst, read)

    async def _check_form(self, form: Rendered) -> None:
        if isinstance(self._encoder, ClozeEncoder):
            chat.refuse_chat(form)
        elif chat.is_chat(form):
            await self._fetch_frame(form)
        elif form and self._warns_of_raw_template:
            self._warns_of_raw_template = False
            if await self._apply_template([{"role": "user", "content": "a"}]) is not None:
                chat.warn_of_raw_template(self._model)

    async def _fetch_frame(self, parts: Rendered) -> None:
        """Fetch the frame of a chat (the template's text around messages), unless it is cached."""
        encoder = self._encoder
        if not chat.is_chat(parts) or not isinstance(encoder, CausalEncoder):
            return
        roles = tuple(message.role for message in chat.messages_of(parts))
        if roles in encoder.frames:
            return
        bare, spaced = [
            await self._apply_template(messages) for messages in chat.placeholder_chats(roles)
        ]
        if bare is None or spaced is None:
            raise self._server.blocked(
                f"the task is a chat, but the model {self._model!r} has no chat template, or one "
                f"that refuses messages of {', '.join(roles)}: write the task as a template, or "
                "start vLLM with --chat-template"
            )
        encoder.frames[roles] = chat.chat_frame(roles, bare, spaced, encoder.split_special)

    async def _apply_template(self, messages: list[dict[str, str]]) -> str | None:
        """Apply the server's chat template; None if it refuses the messages."""
        answered = messages[-1]["role"] == "assistant"
        flags = {"add_generation_prompt": not answered, "continue_final_message": answered}
        body = {"model": self._model, "messages": messages, **flags}
        reply = await self._server.send("/tokenize", body)
        if reply.status in (400, 422):
            return None
        if reply.is_error:
            raise self._server.error_of(reply)
        body = {"model": self._model, "tokens": self._of_vllm(reply.body, "tokens", list)}
        return self._of_vllm(await self._server.call("/detokenize", body), "prompt", str)

    def _checked(self) -> ServedModel:
        if self._served is None:
            raise BackendError(
                "the server has not been checked yet (await check first)", url=self._server.url
            )
        return self._served

    def _of_vllm(self, answer: Any, name: str, kind: type[_T]) -> _T:
        value = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise self._server.blocked("this is not a vLLM server: change base_url")
        return value

    async def _describe(self) -> ServedModel:
        listed = (await self._server.call("/v1/models")).get("data")
        entries = listed if isinstance(listed, list) else []
        models = {entry.get("id"): entry for entry in entries if isinstance(entry, dict)}
        model = models.get(self._model)
        if model is None:
            names = ", ".join(map(repr, models)) or "none"
            raise self._server.blocked(
                f"there is no model {self._model!r}, only {names}: change model"
            )
        max_length = self._of_vllm(model, "max_model_len", int)
        probe, framed = await self._tokenise(_PROBE), await self._tokenise(_PROBE, special=True)
        before = [at for at in range(len(framed)) if framed[at : at + len(probe)] == probe]
        return ServedModel(
            root=str(model.get("root") or self._model),
            max_length=max_length,
            version=str((await self._server.call("/version")).get("version")),
            masked=await self._is_masked(),
            start=framed[: before[0]] if before else framed,
            probe=probe,
        )

    async def _tokenise(self, text: str, *, special: bool = False) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": special}
        return self._of_vllm(await self._server.call("/tokenize", body), "tokens", list)

    async def _is_masked(self) -> bool:
        reply = await self._server.send("/pooling", {"model": self._model, "data": {}})
        if reply.status in (403, 404, 405):
            return False  # A causal model, or a proxy without this endpoint.
        if reply.status == 400 and "token_ids" in self._server.message_of(reply):
            return True
        if reply.is_error and reply.status not in (400, 422, 501):
            raise self._server.error_of(reply)
        raise self._server.blocked(
            f"the model {self._model!r} generates no text, and the server does not run the SDK's "
            "plugin: start vLLM with --io-processor-plugin fedone_roberta"
        )

    async def _make_encoder(self, served: ServedModel) -> CausalEncoder | ClozeEncoder:
        file = self._tokenizer_file or tokens.find_tokenizer(None, served.root)
        if file is None:
            file = await asyncio.to_thread(tokens.download_tokenizer, self._model)
        if file is None:
            raise BackendBlocked(
                f"the tokeniser of {self._model!r} is neither on this machine nor on the hub: set "
                "tokenizer to its tokenizer.json"
            )
        probe = Part("field", _PROBE)
        encoder: CausalEncoder | ClozeEncoder
        if served.masked:
            encoder = ClozeEncoder(file, served.max_length)
            cloze = encoder.encode((probe, Part("mask", "")))
            same = cloze.ids[1 : cloze.mask_index] == served.probe
        else:
            encoder = CausalEncoder(
                file,
                served.max_length,
                start=served.start,
                multi_token_labels=self._multi_token_labels,
            )
            same = encoder.encode((probe,)) == [*served.start, *served.probe]
        if not same:
            raise BackendBlocked(
                f"{file} is not the tokeniser of {self._model!r} on {self._server.url}: set "
                "tokenizer to the server's tokeniser"
            )
        return encoder


def _choices(answer: Any, num_prompts: int) -> list[Any]:
    by_index = {choice["index"]: choice for choice in answer["choices"]}
    return [by_index[index] for index in range(num_prompts)]


def _rows(rows: Any, num_rows: int, num_columns: int) -> _Rows:
    """Return log-probabilities as float32 numbers, after a check of their number."""
    checked = tuple(tuple(map(_log_prob, row)) for row in rows)
    if [len(row) for row in checked] != [num_columns] * num_rows:
        raise ValueError("log-probabilities are missing")
    return checked


def _ending_log_prob(prompt_log_probs: Any, ending: list[int]) -> float:
    last = prompt_log_probs[-len(ending) :]
    pairs = zip(last, ending, strict=True)
    return _log_prob(sum(entry[str(token)]["logprob"] for entry, token in pairs))


def _log_prob(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("not a log-probability")
    return float32(value)
