"""Backend for vLLM servers: causal models, and RoBERTa with the SDK's plugin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from fedone_sdk.backends.base import EVERY_UNIT, Answer, Query
from fedone_sdk.backends.chat import (
    MASKED,
    TemplateWarning,
    chat_frame,
    is_chat,
    messages_of,
    probes,
    refuse_chat,
)
from fedone_sdk.backends.completions import (
    UNREADABLE,
    Rows,
    asking_for,
    choices,
    ending_log_prob,
    log_prob_rows,
    next_tokens,
    version_of,
)
from fedone_sdk.backends.fitting import CausalEncoder, ClozeEncoder
from fedone_sdk.backends.openai_http import ServerBackend, usage_of
from fedone_sdk.backends.tokens import fetched_tokenizer, find_tokenizer
from fedone_sdk.backends.vllm_server import PROBE, ServedModel, VllmServer
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendBlocked, BackendError, MissingExtraError
from fedone_sdk.task import Part, Rendered

_Found = tuple[Rows, tuple[str, ...]]
"""Log-probabilities and texts, as in `Answer`."""


class _Request(NamedTuple):
    """One request, and the parser of its answer."""

    path: str
    body: dict[str, Any]
    worst: Usage
    read: Callable[[Any], _Found]
    shortened: tuple[()] = ()  # The fingerprint and the server's tokeniser determine it.


class VllmBackend(ServerBackend[_Request]):
    """Backend for a vLLM server, with one request per query.

    Its dialect of OpenAI's API has lists of prompts as token ids (``/tokenize``), and exact
    log-probabilities of chosen tokens (``logprob_token_ids``).

    The client tokenises texts, so that special tokens in them are plain text, tokens are counted
    before the request, and inputs that are too long are truncated. Without a local
    ``tokenizer.json`` it fetches that of the model from the hub.

    Log-probabilities are exact and over the whole vocabulary, independent of the server's sampling
    settings (with ``--logprobs-mode raw_logprobs``, the default).

    `check` reads the maximum length, the start tokens and the kind of model from the server, and
    must precede `fingerprint` and `worst_case`.

    The arguments are keys of ``kind: vllm``. With `multi_token_labels` each input is sent once per
    label word.
    """

    _server: VllmServer
    bounds = EVERY_UNIT
    answers = frozenset({"labels", "reference", "text"})

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
        if any(find_spec(name) is None for name in ("openai", "tokenizers")):
            raise MissingExtraError("a vLLM server", extra="vllm")
        super().__init__(
            VllmServer(model, base_url=base_url, api_key_env=api_key_env, timeout_s=timeout_s)
        )
        self._tokenizer_file = find_tokenizer(tokenizer, model)
        self._multi_token_labels = multi_token_labels
        self._served: ServedModel | None = None
        self._encoder: CausalEncoder | ClozeEncoder | None = None
        self._prompts_per_input = 1
        self._template_warning: TemplateWarning | None = TemplateWarning(model)

    @property
    def fingerprint(self) -> str:
        """``vllm:<the model's folder or hub name on the server>:<maximum length>``."""
        served = self._checked()
        return f"vllm:{served.root}:{served.max_length}"

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Read the model from the server, and compare its tokeniser with the local one.

        Raises:
            BackendUnavailable: The server does not answer.
            BackendBlocked: The server does not have this model, the same tokeniser or the plugin,
                or it has changed since the last check.
            LabelWordError: A label word is not one token.
            BackendError: Two label words are the same token.
        """
        served = await self._server.describe()
        if self._served is None:
            encoder = await self._make_encoder(served)
            self._served, self._encoder = served, encoder
            if served.masked:
                self.answers = frozenset({"labels"})
        elif served != self._served:
            raise BackendBlocked(
                f"the server has changed: it had {self._served.root} of vLLM "
                f"{self._served.version} for {self._served.max_length} tokens, now {served.root} "
                f"of {served.version} for {served.max_length}: go back, or start a new run",
                url=self._server.url,
            )
        await self._check_form(form)
        labels = await self._in(self._token_thread, lambda: self._label_ids(label_words, form))
        if any(len(ids) > 1 for ids in labels):
            self._prompts_per_input = max(self._prompts_per_input, len(labels))

    async def score(self, query: Query) -> Answer:
        """Answers one query by one request."""
        request = await self._prepared(query)
        answer = await self._server.post(request.path, request.body)
        try:
            log_probs, texts = request.read(answer)
        except UNREADABLE as exc:
            raise self._server.unreadable(usage=request.worst.without_queries()) from exc
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
        """`batch_size` inputs of the maximum length, each with one generated token or a text.

        With label words of several tokens, as many for each of the label words of the last check.

        Raises:
            BackendError: The server has not been checked yet.
        """
        num_prompts = batch_size * self._prompts_per_input
        served = self._checked()
        num_new = 0 if served.masked else 1
        return Usage(
            queries=1,
            requests=1,
            prompt_tokens=num_prompts * (served.max_length - num_new),
            completion_tokens=num_prompts * max(num_new, max_tokens),
        )

    # From a query to a request

    async def _prepare(self, query: Query) -> _Request:
        if self._encoder is None:
            await self.check(())
        self.check_query(query)
        for parts in query.inputs:
            await self._know_frame(parts)
        return await self._in(self._token_thread, lambda: self._request(query))

    def _request(self, query: Query) -> _Request:
        encoder = self._encoder
        assert encoder is not None
        if isinstance(encoder, ClozeEncoder):
            return self._cloze_request(encoder, query)
        if query.want == "text":
            return self._text_request(encoder, query)
        endings = encoder.endings(query, several=self._multi_token_labels)
        if query.want == "labels" and all(len(ids) == 1 for ids in endings[0]):
            return self._label_request(encoder, query, [ids[0] for ids in endings[0]])
        return self._ending_request(encoder, query, endings)

    def _label_ids(self, words: Sequence[str], like: Rendered) -> list[list[int]]:
        encoder = self._encoder
        assert encoder is not None
        several = self._multi_token_labels and isinstance(encoder, CausalEncoder)
        return encoder.label_ids(words, like, several=several)

    def _cloze_request(self, encoder: ClozeEncoder, query: Query) -> _Request:
        labels = [token for (token,) in encoder.label_ids(query.label_words)]
        ids = [encoder.encode(parts).ids for parts in query.inputs]

        def read(answer: Any) -> _Found:
            rows = answer["data"]["log_probs"]
            return log_prob_rows(rows, len(ids), len(labels)), ()

        return _Request(
            path="/pooling",
            body={
                "model": self._server.model,
                "data": {"token_ids": ids, "label_token_ids": labels},
            },
            worst=_usage(ids, 0),
            read=read,
        )

    def _label_request(self, encoder: CausalEncoder, query: Query, labels: list[int]) -> _Request:
        ids = [encoder.encode(parts, reserve=1) for parts in query.inputs]

        def read(answer: Any) -> _Found:
            return next_tokens(answer, len(ids), labels), ()

        return self._completion(ids, read, **asking_for(labels))

    def _ending_request(
        self, encoder: CausalEncoder, query: Query, endings: list[list[list[int]]]
    ) -> _Request:
        reserve = [max(map(len, some)) + 1 for some in endings]
        if short := [room for room in reserve if room >= self._checked().max_length]:
            raise BackendError(
                f"a reference text is {max(short) - 1} tokens, the model takes "
                f"{self._checked().max_length} together with its input: shorten it"
            )
        ids: list[list[int]] = []
        for parts, room, some in zip(query.inputs, reserve, endings, strict=True):
            start = encoder.encode(parts, reserve=room)
            ids += [[*start, *ending] for ending in some]

        def read(answer: Any) -> _Found:
            found = iter(choices(answer, len(ids)))
            return tuple(
                tuple(ending_log_prob(next(found)["prompt_logprobs"], ending) for ending in some)
                for some in endings
            ), ()

        return self._completion(ids, read, prompt_logprobs=0)

    def _text_request(self, encoder: CausalEncoder, query: Query) -> _Request:
        most = query.max_tokens
        if not 0 < most < self._checked().max_length:
            raise BackendError(
                f"max_tokens must be from 1 to {self._checked().max_length - 1} for this server, "
                f"not {most}"
            )
        ids = [encoder.encode(parts, reserve=most) for parts in query.inputs]

        def read(answer: Any) -> _Found:
            texts = tuple(choice["text"] for choice in choices(answer, len(ids)))
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a text is missing")
            return ((),) * len(ids), texts

        stop = {"stop": query.stop} if query.stop else {}
        return self._completion(ids, read, max_tokens=most, **stop)

    def _completion(
        self,
        ids: list[list[int]],
        read: Callable[[Any], _Found],
        *,
        max_tokens: int = 1,
        **options: object,
    ) -> _Request:
        return _Request(
            path="/v1/completions",
            body={
                "model": self._server.model,
                "prompt": ids,
                "max_tokens": max_tokens,
                # Greedy, for reproducible texts; log-probabilities do not depend on it.
                "temperature": 0,
                **options,
            },
            worst=_usage(ids, max_tokens),
            read=read,
        )

    # The frame of a chat

    async def _check_form(self, form: Rendered) -> None:
        if isinstance(self._encoder, ClozeEncoder):
            refuse_chat(form, MASKED)
        elif is_chat(form):
            await self._know_frame(form)
        elif form and self._template_warning is not None:
            if await self._server.apply_template([{"role": "user", "content": "a"}]) is not None:
                self._template_warning.check(form)
            self._template_warning = None

    async def _know_frame(self, parts: Rendered) -> None:
        """Fetch the frame of a chat from the server, unless it is cached."""
        encoder = self._encoder
        if not is_chat(parts) or not isinstance(encoder, CausalEncoder):
            return
        roles = tuple(message.role for message in messages_of(parts))
        if roles in encoder.frames:
            return
        bare, spaced = [await self._server.apply_template(said) for said in probes(roles)]
        if bare is None or spaced is None:
            raise BackendBlocked(
                f"the task is a chat, but the model {self._server.model!r} has "
                f"no chat template, or one that takes no messages of {', '.join(roles)}: write the "
                "task as a template, or start vLLM with --chat-template",
                url=self._server.url,
            )
        encoder.frames[roles] = chat_frame(roles, bare, spaced, encoder.cut)

    # The server

    def _checked(self) -> ServedModel:
        if self._served is None:
            raise BackendError(
                "the server has not been checked yet (await check first)", url=self._server.url
            )
        return self._served

    async def _make_encoder(self, served: ServedModel) -> CausalEncoder | ClozeEncoder:
        file = self._tokenizer_file or find_tokenizer(None, served.root)
        if file is None:
            file = await asyncio.to_thread(fetched_tokenizer, self._server.model)
        if file is None:
            raise BackendBlocked(
                f"the tokeniser of {self._server.model!r} is neither on this machine nor on the "
                "hub: set tokenizer to its tokenizer.json"
            )
        probe = Part("field", PROBE)
        encoder: CausalEncoder | ClozeEncoder
        if served.masked:
            encoder = ClozeEncoder(file, served.max_length)
            cloze = encoder.encode((probe, Part("mask", "")))
            same = cloze.ids[1 : cloze.mask_index] == served.probe
        else:
            encoder = CausalEncoder(file, served.max_length, start=served.start)
            same = encoder.encode((probe,)) == [*served.start, *served.probe]
        if not same:
            raise BackendBlocked(
                f"{file} is not the tokeniser of {self._server.model!r} on {self._server.url}: "
                "set tokenizer to the server's own"
            )
        return encoder


def _usage(prompts: list[list[int]], max_tokens: int) -> Usage:
    return Usage(
        queries=1,
        requests=1,
        prompt_tokens=sum(map(len, prompts)),
        completion_tokens=len(prompts) * max_tokens,
    )
