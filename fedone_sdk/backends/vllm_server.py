"""Client of a vLLM server: description of its model, requests, log-probabilities in answers."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fedone_sdk.backends.base import float32
from fedone_sdk.backends.openai_api import make_client, message_of, translated
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendBlocked

Rows = tuple[tuple[float, ...], ...]
"""Log-probabilities: one row per input, float32 numbers."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of the functions here for an answer of another form."""

# Tokenisers differ in scripts, numbers, line breaks and runs of spaces.
PROBE = "The film's  cast: 3 naïve\n actors, 1 24 日本 Ω."
"""A text that tells tokenisers apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server's description of its model.

    Attributes:
        root: The model's folder or its name on the hub, as configured on the server.
        max_length: Maximum tokens per input, generated ones included.
        masked: Whether it is a masked model with the SDK's plugin.
        start: The special tokens that the server puts before a text.
        probe: The server's tokens of `PROBE`, without special tokens.
    """

    root: str
    max_length: int
    version: str
    masked: bool
    start: list[int]
    probe: list[int]


class VllmServer:
    """Client of a server, for one of its models.

    `describe`, `tokenise` and `post` raise the errors of `openai_api.translated`.

    Attributes:
        url: The server's root, without ``/v1``.

    Raises:
        SpecError: The key's variable is not set.
    """

    def __init__(
        self, model: str, *, base_url: str, api_key_env: str | None, timeout_s: float
    ) -> None:
        self.model, self.timeout_s = model, timeout_s
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self._key_env = api_key_env
        self._client = make_client(
            base_url=f"{self.url}/v1", api_key_env=api_key_env, timeout_s=timeout_s
        )

    async def describe(self) -> ServedModel:
        """Fetch the description of the model.

        Raises:
            BackendBlocked: It is not a vLLM server, it does not have the model, or the model
                neither generates nor runs with the SDK's plugin.
        """
        listed = (await self._get("/v1/models")).get("data")
        cards = listed if isinstance(listed, list) else []
        names = {card.get("id"): card for card in cards if isinstance(card, dict)}
        card = names.get(self.model)
        if card is None:
            raise BackendBlocked(
                f"there is no model {self.model!r}, only "
                f"{', '.join(map(repr, names)) or 'none'}: change model",
                url=self.url,
            )
        if not isinstance(card.get("max_model_len"), int):
            raise self._no_vllm()
        probe, _ = await self.tokenise(PROBE)
        whole, _ = await self.tokenise(PROBE, special=True)
        before = next(
            (n for n in range(len(whole)) if whole[n : n + len(probe)] == probe), len(whole)
        )
        return ServedModel(
            root=str(card.get("root") or self.model),
            max_length=card["max_model_len"],
            version=str((await self._get("/version")).get("version")),
            masked=await self._is_masked(),
            start=whole[:before],
            probe=probe,
        )

    async def tokenise(self, text: str, *, special: bool = False) -> tuple[list[int], list[str]]:
        """Return the ids and names of a text's tokens.

        Raises:
            BackendBlocked: It is not a vLLM server.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": special}
        found = await self.post("/tokenize", {**body, "return_token_strs": True})
        ids, names = found.get("tokens"), found.get("token_strs")
        if not isinstance(ids, list) or not isinstance(names, list) or len(ids) != len(names):
            raise self._no_vllm()
        return ids, names

    async def apply_template(self, messages: list[dict[str, str]]) -> str | None:
        """Apply the server's chat template to messages.

        Returns:
            The text, special tokens included; None if the server refuses, because the model has no
            chat template or one that does not support such messages.
        """
        import openai

        answered = messages[-1]["role"] == "assistant"
        body = {
            "model": self.model,
            "messages": messages,
            "add_generation_prompt": not answered,
            "continue_final_message": answered,
        }
        with self._translated():
            try:
                ids = (await self._send("/tokenize", body)).get("tokens")
            except openai.APIStatusError as exc:
                if exc.status_code not in (400, 422):
                    raise
                return None
            text = (await self._send("/detokenize", {"model": self.model, "tokens": ids})).get(
                "prompt"
            )
        if not isinstance(text, str):
            raise self._no_vllm()
        return text

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request."""
        with self._translated():
            return await self._send(path, body)

    def unreadable(self, usage: Usage | None = None) -> BackendBlocked:
        """Return the error for an answer without the requested log-probabilities."""
        return BackendBlocked(
            "the answer is not that of a vLLM with log-probabilities of chosen "
            "tokens: update the server (0.32 is known to work), or check base_url",
            url=self.url,
            usage=usage,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _is_masked(self) -> bool:
        """Whether the server runs the SDK's plugin, by a request that the plugin refuses."""
        import openai

        with self._translated():
            try:
                await self._send("/pooling", {"model": self.model, "data": {}})
            except openai.APIStatusError as exc:
                if exc.status_code in (403, 404, 405):
                    return False  # Causal; a proxy may hide this endpoint.
                if exc.status_code == 400 and "token_ids" in message_of(exc, self._key_env):
                    return True
                if exc.status_code not in (400, 422, 501):
                    raise
        raise BackendBlocked(
            f"the model {self.model!r} neither generates, nor runs behind the "
            "SDK's plugin: start vLLM with --io-processor-plugin fedone_roberta",
            url=self.url,
        )

    def _no_vllm(self) -> BackendBlocked:
        return BackendBlocked("this is not a vLLM server: change base_url", url=self.url)

    async def _get(self, path: str) -> dict[str, Any]:
        with self._translated():
            async with asyncio.timeout(self.timeout_s):
                return _object(await self._client.get(self.url + path, cast_to=str))

    async def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(self.timeout_s):
            # As plain text, because the client's parsing to objects is the slowest part.
            return _object(await self._client.post(self.url + path, body=body, cast_to=str))

    def _translated(self) -> AbstractContextManager[None]:
        return translated(model=self.model, url=self.url, key_env=self._key_env)


def _object(body: str) -> dict[str, Any]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise json.JSONDecodeError("not an object", body, 0)
    return found


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
