"""Models on a vLLM server: causal ones, and RoBERTa with the SDK's plugin."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.fitting import CausalEncoder, ClozeEncoder
from fedone_sdk.backends.openai_api import make_client, message_of, translated, usage_of
from fedone_sdk.backends.tokenizer import (
    LocalEncoder,
    ServerEncoder,
    ServerTokenizer,
    UnknownText,
    find_tokenizer,
)
from fedone_sdk.budget import Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    LabelWordError,
    MissingExtraError,
)
from fedone_sdk.task import Part, Rendered

__all__ = ["VllmBackend"]

R = TypeVar("R")

_Found = tuple[tuple[tuple[float, ...], ...], tuple[str, ...]]
"""Log-probabilities and texts, as in `Answer`."""

# Scripts, numbers, line breaks and runs of spaces are where tokenisers differ.
_PROBE = "The film's  cast: 3 naïve\n actors, 1 24 日本 Ω."
_LONG = 20_000
"""Characters; tokenising more is left to a thread. It is about 6 ms of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """What a server says about the model it serves.

    Attributes:
        root: The model's folder or its name on the hub, as the server was started.
        max_length: Tokens per input, what is generated included.
        version: Of vLLM.
        masked: Whether it is a masked model, behind the SDK's plugin.
        start: The special tokens that it puts before a text.
        probe: What it makes of `_PROBE`, without special tokens.
    """

    root: str
    max_length: int
    version: str
    masked: bool
    start: list[int]
    probe: list[int]


class _Request(NamedTuple):
    """One request, and how to read its answer.

    Attributes:
        path: Below the server's root.
        body: What is sent.
        worst: The most that it uses.
        read: From the answer to log-probabilities and texts.
    """

    path: str
    body: dict[str, Any]
    worst: Usage
    read: Callable[[Any], _Found]


class VllmBackend(LLMBackend):
    """Asks a vLLM server, one request per query.

    Texts are tokenised here, so that special tokens in somebody's text are text, tokens are
    counted before they are paid for, and too long inputs lose the ends of their text fields. With
    no ``tokenizer.json`` here the server is asked to tokenise, which costs a round trip per text.

    Log-probabilities are exact and over the whole vocabulary, whatever the sampling settings of
    the server (as long as it keeps ``--logprobs-mode raw_logprobs``, the default).

    The server says itself how long its inputs may be, how they start, and whether the model is
    causal or masked. So `check` comes before `fingerprint` and `worst_case`.

    Args:
        model: As the server names it.
        base_url: Of the server, with or without ``/v1``.
        api_key_env: Environment variable that holds the key; None sends none.
        tokenizer: ``tokenizer.json`` or a folder with it; None looks for one by the model's name.
        multi_token_labels: Lets a causal model's label words be several tokens. Each input is then
            sent once per label word.
        timeout_s: Seconds until an unanswered request counts as failed.

    Raises:
        MissingExtraError: The extra ``vllm`` is not installed.
        SpecError: The key's variable or the tokeniser's file is not there.
    """

    bounds = frozenset(
        {"queries", "requests", "tokens", "prompt_tokens", "completion_tokens", "usd"}
    )
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
        self._model = model
        self._root_url = base_url.rstrip("/").removesuffix("/v1")
        self._key_env = api_key_env
        self._tokenizer_file = find_tokenizer(tokenizer, model)
        self._multi_token_labels = multi_token_labels
        self._timeout_s = timeout_s
        self._client = make_client(
            base_url=f"{self._root_url}/v1", api_key_env=api_key_env, timeout_s=timeout_s
        )
        self._server: _Server | None = None
        self._encoder: CausalEncoder | ClozeEncoder | None = None
        self._said = ServerTokenizer()
        self._prompts_per_input = 1

    @property
    def fingerprint(self) -> str:
        """``vllm:<the model's folder or hub name on the server>:<maximum length>``.

        Raises:
            BackendError: The server has not been checked yet.
        """
        server = self._checked()
        return f"vllm:{server.root}:{server.max_length}"

    async def check(self, label_words: tuple[str, ...]) -> None:
        """Asks the server for its model, and compares its tokeniser with the one here.

        Raises:
            BackendUnavailable: The server does not answer.
            BackendBlocked: It does not serve this model, has another tokeniser or lacks the plugin;
                or it has changed since the last check.
            LabelWordError: A label word is not one token.
            BackendError: Two label words are the same token.
        """
        server = await self._ask_server()
        if self._server is None:
            encoder = await self._make_encoder(server)
            self._server, self._encoder = server, encoder
        elif server != self._server:
            raise BackendBlocked(
                f"{self._root_url}: the server has changed: it had {self._server.root} of vLLM "
                f"{self._server.version} for {self._server.max_length} tokens, now {server.root} "
                f"of {server.version} for {server.max_length}: go back, or start a new run"
            )
        labels = await self._labels(label_words)
        if any(len(ids) > 1 for ids in labels):
            self._prompts_per_input = max(self._prompts_per_input, len(labels))

    async def score(self, query: Query) -> Answer:
        """Answers one query by one request.

        Returns:
            Log-probabilities as float32 numbers, so that the wire does not change them.

        Raises:
            BackendError: An input does not fit the model (its length, ``{mask}``), or the server
                refused the request.
            BackendUnavailable: The server cannot be asked now.
            BackendBlocked: The server cannot be asked until somebody changes something.
            LabelWordError: A label word is not one token.
            ValueError: The query has no inputs.
        """
        request = await self._request(query)
        answer = await self._post(request.path, request.body)
        try:
            log_probs, texts = request.read(answer)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
            raise BackendBlocked(
                f"{self._root_url}: the answer is not that of a vLLM with log-probabilities of "
                "chosen tokens: update the server (0.32 is known to work), or check base_url",
                usage=request.worst,
            ) from exc
        said = answer.get("system_fingerprint")
        usage = answer["data"] if "data" in answer else answer.get("usage")
        return Answer(
            log_probs=log_probs,
            usage=usage_of(usage, request.worst),
            texts=texts,
            model=said if isinstance(said, str) else f"vllm-{self._checked().version}",
        )

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        """`batch_size` inputs of the maximum length, and a token more for each, or a text.

        With label words of several tokens, as many for each of the words last checked.

        Raises:
            BackendError: The server has not been checked yet.
        """
        num_prompts = batch_size * self._prompts_per_input
        server = self._checked()
        num_new = 0 if server.masked else 1
        return Usage(
            queries=1,
            requests=1,
            prompt_tokens=num_prompts * (server.max_length - num_new),
            completion_tokens=num_prompts * max(num_new, max_tokens),
        )

    async def quote(self, query: Query) -> Usage:
        """The tokens that this query sends, and the most that it can get back."""
        return (await self._request(query)).worst

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.close()

    # From a query to a request

    async def _request(self, query: Query) -> _Request:
        if not query.inputs:
            raise ValueError("a query needs at least one input")
        if self._encoder is None:
            await self.check(())
        if isinstance(self._encoder, ClozeEncoder):
            return await self._cloze_request(self._encoder, query)
        if query.want == "text":
            return await self._text_request(query)
        if query.want == "reference":
            if len(query.references) != len(query.inputs):
                raise ValueError("a query needs one reference per input")
            endings = [[await self._continuation(text)] for text in query.references]
        elif query.want == "labels":
            labels = await self._labels(query.label_words)
            if all(len(ids) == 1 for ids in labels):
                return await self._label_request(query, [ids[0] for ids in labels])
            endings = [labels] * len(query.inputs)
        else:
            raise BackendError(f"a vLLM server does not answer {query.want!r}")
        return await self._ending_request(query, endings)

    async def _cloze_request(self, encoder: ClozeEncoder, query: Query) -> _Request:
        if query.want != "labels":
            raise BackendError("a masked language model answers with label words only")
        labels = [ids[0] for ids in await self._labels(query.label_words)]
        calls = [partial(encoder.encode, parts) for parts in query.inputs]
        ids = [cloze.ids for cloze in await _in_thread_if_long(calls, query.inputs)]

        def read(answer: Any) -> _Found:
            rows = answer["data"]["log_probs"]
            return _rows(rows, len(ids), len(labels)), ()

        return _Request(
            path="/pooling",
            body={
                "model": self._model,
                "data": {"token_ids": ids, "label_token_ids": labels},
            },
            worst=_usage(ids, 0),
            read=read,
        )

    async def _label_request(self, query: Query, labels: list[int]) -> _Request:
        """Asks for the log-probabilities of chosen tokens after each input."""
        ids = await self._encoded(query.inputs, [1] * len(query.inputs))
        # As ids: two tokens may have the same text.
        keys = [f"token_id:{label}" for label in labels]

        def read(answer: Any) -> _Found:
            shown = [choice["logprobs"]["top_logprobs"][0] for choice in _choices(answer, len(ids))]
            return _rows([[row[key] for key in keys] for row in shown], len(ids), len(keys)), ()

        return self._completion(
            ids,
            read,
            logprobs=0,
            logprob_token_ids=labels,
            return_tokens_as_token_ids=True,
        )

    async def _ending_request(self, query: Query, endings: list[list[list[int]]]) -> _Request:
        """Asks for the log-probability of each of some endings of each input."""
        reserve = [max(map(len, some)) + 1 for some in endings]
        if short := [room for room in reserve if room >= self._checked().max_length]:
            raise BackendError(
                f"a reference text is {max(short) - 1} tokens, the model takes "
                f"{self._checked().max_length} together with its input: shorten it"
            )
        starts = await self._encoded(query.inputs, reserve)
        ids = [
            [*start, *ending]
            for start, some in zip(starts, endings, strict=True)
            for ending in some
        ]

        def read(answer: Any) -> _Found:
            choices = iter(_choices(answer, len(ids)))
            return tuple(
                tuple(_sum(next(choices)["prompt_logprobs"], ending) for ending in some)
                for some in endings
            ), ()

        return self._completion(ids, read, prompt_logprobs=0)

    async def _text_request(self, query: Query) -> _Request:
        most = query.max_tokens
        if not 0 < most < self._checked().max_length:
            raise BackendError(
                f"max_tokens must be from 1 to {self._checked().max_length - 1} for this server, "
                f"not {most}"
            )
        ids = await self._encoded(query.inputs, [most] * len(query.inputs))

        def read(answer: Any) -> _Found:
            texts = tuple(choice["text"] for choice in _choices(answer, len(ids)))
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("a text is missing")
            return ((),) * len(ids), texts

        return self._completion(ids, read, max_tokens=most)

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
                "model": self._model,
                "prompt": ids,
                "max_tokens": max_tokens,
                # The same text each time; log-probabilities do not depend on it.
                "temperature": 0,
                **options,
            },
            worst=_usage(ids, max_tokens),
            read=read,
        )

    # Tokens

    @property
    def _causal(self) -> CausalEncoder:
        if not isinstance(self._encoder, CausalEncoder):
            raise BackendError("a masked language model does not continue texts")
        return self._encoder

    async def _labels(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of each label word."""
        labels: list[list[int]] = []
        for word in words:
            labels.append(await self._label(word))
            if labels.index(labels[-1]) < len(labels) - 1:
                same = words[labels.index(labels[-1])]
                raise BackendError(
                    f"label words {same!r} and {word!r} are the same token of this model: "
                    "choose others"
                )
        return labels

    async def _label(self, word: str) -> list[int]:
        encoder = self._encoder
        if isinstance(encoder, ClozeEncoder):
            return [encoder.label_id(word)]
        if self._multi_token_labels:
            return await self._continuation(word)
        try:
            return [await self._learning(lambda: self._causal.label_id(word))]
        except LabelWordError as exc:
            raise LabelWordError(exc.word, exc.tokens, "set multi_token_labels: true") from None

    async def _continuation(self, text: str) -> list[int]:
        ids = await self._learning(lambda: self._causal.continuation(text))
        if not ids:
            raise BackendError("a label word or reference text is empty")
        return ids

    async def _encoded(self, inputs: Sequence[Rendered], reserve: Sequence[int]) -> list[list[int]]:
        """The token ids of inputs of a causal model, with room for as many more after each."""
        calls = [
            partial(self._causal.encode, parts, reserve=room)
            for parts, room in zip(inputs, reserve, strict=True)
        ]
        if self._tokenizer_file is None:
            return list(await asyncio.gather(*map(self._learning, calls)))
        return await _in_thread_if_long(calls, inputs)

    async def _learning(self, call: Callable[[], R]) -> R:
        """The result of a call, after the server has tokenised the texts that it needs."""
        while True:
            try:
                return call()
            except UnknownText as exc:
                self._said.learn(exc.text, *await self._tokenise(exc.text))

    # The server

    def _checked(self) -> _Server:
        if self._server is None:
            raise BackendError(
                f"{self._root_url}: the server has not been checked yet (await check first)"
            )
        return self._server

    async def _ask_server(self) -> _Server:
        listed = (await self._get("/v1/models")).get("data")
        cards = listed if isinstance(listed, list) else []
        names = {card.get("id"): card for card in cards if isinstance(card, dict)}
        card = names.get(self._model)
        if card is None:
            raise BackendBlocked(
                f"{self._root_url}: there is no model {self._model!r}, only "
                f"{', '.join(map(repr, names)) or 'none'}: change model"
            )
        if not isinstance(card.get("max_model_len"), int):
            raise self._no_vllm()
        probe, _ = await self._tokenise(_PROBE)
        whole, _ = await self._tokenise(_PROBE, special=True)
        before = next(
            (n for n in range(len(whole)) if whole[n : n + len(probe)] == probe), len(whole)
        )
        return _Server(
            root=str(card.get("root") or self._model),
            max_length=card["max_model_len"],
            version=str((await self._get("/version")).get("version")),
            masked=await self._is_masked(),
            start=whole[:before],
            probe=probe,
        )

    async def _is_masked(self) -> bool:
        """Whether the server runs the SDK's plugin: by a request that it can only refuse."""
        import openai

        with self._translated():
            try:
                await self._send("/pooling", {"model": self._model, "data": {}})
            except openai.APIStatusError as exc:
                if exc.status_code in (403, 404, 405):
                    return False  # Causal; a proxy may hide what such a model has no use for.
                if exc.status_code == 400 and "token_ids" in message_of(exc):
                    return True
                if exc.status_code not in (400, 422, 501):
                    raise
        raise BackendBlocked(
            f"{self._root_url}: the model {self._model!r} neither generates, nor runs behind the "
            "SDK's plugin: start vLLM with --io-processor-plugin fedone_roberta"
        )

    async def _tokenise(self, text: str, *, special: bool = False) -> tuple[list[int], list[str]]:
        """The ids and names of the tokens that the server makes of a text."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": special}
        found = await self._post("/tokenize", {**body, "return_token_strs": True})
        ids, names = found.get("tokens"), found.get("token_strs")
        if not isinstance(ids, list) or not isinstance(names, list) or len(ids) != len(names):
            raise self._no_vllm()
        return ids, names

    def _no_vllm(self) -> BackendBlocked:
        return BackendBlocked(f"{self._root_url}: this is not a vLLM server: change base_url")

    async def _make_encoder(self, server: _Server) -> CausalEncoder | ClozeEncoder:
        file = self._tokenizer_file
        probe = Part("field", _PROBE)
        if file is None:
            if server.masked:
                raise BackendBlocked(
                    f"the tokeniser of {self._model!r} is not on this machine: set tokenizer to "
                    "its tokenizer.json"
                )
            return await self._learning(
                lambda: ServerEncoder(self._said, server.max_length, server.start)
            )
        encoder: CausalEncoder | ClozeEncoder
        if server.masked:
            encoder = ClozeEncoder(file, server.max_length)
            cloze = encoder.encode((probe, Part("mask", "")))
            same = cloze.ids[1 : cloze.mask_index] == server.probe
        else:
            encoder = LocalEncoder(file, server.max_length, server.start)
            same = encoder.encode((probe,)) == [*server.start, *server.probe]
        if not same:
            raise BackendBlocked(
                f"{file} is not the tokeniser of {self._model!r} on {self._root_url}: "
                "set tokenizer to the server's own"
            )
        return encoder

    async def _get(self, path: str) -> dict[str, Any]:
        with self._translated():
            async with asyncio.timeout(self._timeout_s):
                return _object(await self._client.get(self._root_url + path, cast_to=str))

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._translated():
            return await self._send(path, body)

    async def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(self._timeout_s):
            # As plain text: making the client's own objects of it takes longer than all the rest.
            return _object(await self._client.post(self._root_url + path, body=body, cast_to=str))

    def _translated(self) -> AbstractContextManager[None]:
        return translated(model=self._model, url=self._root_url, key_env=self._key_env)


def _object(body: str) -> dict[str, Any]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise json.JSONDecodeError("not an object", body, 0)
    return found


async def _in_thread_if_long(
    calls: Sequence[Callable[[], R]], inputs: Sequence[Rendered]
) -> list[R]:
    if sum(len(part.text) for parts in inputs for part in parts) > _LONG:
        return await asyncio.to_thread(lambda: [call() for call in calls])
    return [call() for call in calls]


def _usage(prompts: list[list[int]], max_tokens: int) -> Usage:
    return Usage(
        requests=1,
        prompt_tokens=sum(map(len, prompts)),
        completion_tokens=len(prompts) * max_tokens,
    )


def _choices(answer: Any, num_prompts: int) -> list[Any]:
    """The choices of an answer in the order of the prompts."""
    choices = {choice["index"]: choice for choice in answer["choices"]}
    return [choices[index] for index in range(num_prompts)]


def _rows(rows: Any, num_rows: int, num_columns: int) -> tuple[tuple[float, ...], ...]:
    found = tuple(tuple(_float32(value) for value in row) for row in rows)
    if [len(row) for row in found] != [num_columns] * num_rows:
        raise ValueError("log-probabilities are missing")
    return found


def _sum(prompt_log_probs: Any, ending: list[int]) -> float:
    """The log-probability of the last tokens of a prompt."""
    last = prompt_log_probs[-len(ending) :]
    return _float32(
        sum(entry[str(token)]["logprob"] for entry, token in zip(last, ending, strict=True))
    )


def _float32(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("not a log-probability")
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
