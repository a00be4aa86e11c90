"""OpenAI's models, and those of servers that speak its API: chat, or the older completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, date, datetime
from difflib import get_close_matches
from typing import Any, Literal
from urllib.parse import urlsplit

import structlog

from fedone_sdk.backends._hosted import MAX_INPUT_TOKENS, HostedBackend, RawAnswer
from fedone_sdk.backends.openai_api import OPENAI_URL, make_client, translated
from fedone_sdk.backends.tokens import CHAT_OVERHEAD, OPENAI_CHAT_OVERHEAD
from fedone_sdk.errors import BackendBlocked
from fedone_sdk.task import Rendered

__all__ = ["OpenAIBackend"]

_log = structlog.get_logger(__name__)

_CONTINUING: Mapping[str, Mapping[str, Any]] = {
    "llamacpp": {},
    "vllm": {"add_generation_prompt": False, "continue_final_message": True},
}
"""Servers that go on with a last message of the assistant, by the owner that they give their
models, and what they must be sent for it."""

_COMPLETIONS_OVERHEAD = 4  # A token that starts the text, where the model has one.


class OpenAIBackend(HostedBackend):
    """Asks a model over HTTP; one input is one request.

    Log-probabilities come from the most likely tokens that the provider shows, 20 of them where it
    lets us. A label's is the logsumexp over the shown tokens that spell its word: the whole word,
    whatever its case and leading space; a token that is only the start of the word does not count.
    A label that is not shown gets an upper bound: no token outside of the shown ones is likelier
    than the least likely of them, or than what they leave. `Answer.censored` counts these.

    The first request goes alone, and the others wait for it: what is wrong with key, model or
    settings costs one request. The adapter also learns how the server calls the limit of
    completion tokens, and how many tokens it shows, from its refusals; such a refusal is a
    `BackendUnavailable` that may be tried again at once.

    Args:
        model: As the provider names it.
        base_url: With its ``/v1``; None is OpenAI's own.
        api_key_env: Environment variable that holds the key; None sends none.
        api: ``chat`` sends messages, an input of a template as one of the user; ``completions``
            sends a prompt.
        log_probs: Whether the model shows log-probabilities; without them it answers ``choice``
            instead of ``labels``.
        structured: For ``choice``: whether a JSON schema holds the answer to the label words.
        reasoning_effort: Sent where it is not None.
        max_input_tokens: The longest input, without the frame of the message. Longer ones lose
            the ends of their text fields.
        tokenizer: ``tokenizer.json`` to count with, or a folder with it; None looks for one by the
            model's name, takes tiktoken, or counts bytes.
        timeout_s: Until an unanswered request counts as failed.

    Raises:
        MissingExtraError: The extra ``openai`` is not installed.
        SpecError: There is no key, or no such tokeniser.
        ValueError: `log_probs` is false with ``completions``.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        api: Literal["chat", "completions"] = "chat",
        log_probs: bool = True,
        structured: bool = True,
        reasoning_effort: str | None = None,
        max_input_tokens: int = MAX_INPUT_TOKENS,
        tokenizer: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if api == "completions" and not log_probs:
            raise ValueError("log_probs must be true for api completions")
        self._client = make_client(base_url=base_url, api_key_env=api_key_env, timeout_s=timeout_s)
        # Looked up here: it imports for half a second, which would count as the server's time.
        self._create: Callable[..., Awaitable[Any]] = (
            self._client.chat.completions.with_raw_response.create
            if api == "chat"
            else self._client.completions.with_raw_response.create
        )
        self._host = urlsplit(base_url or OPENAI_URL).netloc
        self._weights = ""  # Known after `check`.
        self._is_openai = self._host == "openai.com" or self._host.endswith(".openai.com")
        overhead = OPENAI_CHAT_OVERHEAD if self._is_openai else CHAT_OVERHEAD
        super().__init__(
            model,
            url=base_url or OPENAI_URL,
            key_env=api_key_env,
            api=api,
            log_probs=log_probs,
            structured=structured,
            reasoning_effort=reasoning_effort,
            max_input_tokens=max_input_tokens,
            overhead=overhead if api == "chat" else _COMPLETIONS_OVERHEAD,
            max_name="max_completion_tokens" if self._is_openai else "max_tokens",
            tokenizer=tokenizer,
            timeout_s=timeout_s,
        )

    @property
    def fingerprint(self) -> str:
        """``openai:<host>:<model>``, and settings that move scores where they are not the default.

        After `check`, size and quantisation of the weights follow, where the server's list of
        models has them (llama.cpp): it gives any file the name that it is started with. What the
        provider adds to its answers is in `Answer.model`.
        """
        return f"openai:{self._host}:{self._model}{self._manner}{self._weights}"

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Checks label words and form, and asks the server, for free, whether it has the model."""
        await super().check(label_words)
        entry = await self._listed()
        if entry is not None:
            self._continuing = _CONTINUING.get(str(entry.get("owned_by")))
        self._check_form(form)
        if entry is None:
            return
        self._learn_weights(entry)
        end = _shutdown(entry)
        if end is None:
            return
        if end < datetime.now(UTC).date():
            raise BackendBlocked(
                f"model {self._model!r} was shut down on {end}: take another model", url=self._url
            )
        _log.warning("model_shutdown_announced", model=self._model, shutdown_date=str(end))

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def _complete(self, body: Mapping[str, Any]) -> RawAnswer:
        raw: RawAnswer = await self._create(**body)
        return raw

    def _learn_weights(self, entry: Mapping[str, Any]) -> None:
        """Reads which weights llama.cpp's server holds, and how long its inputs may be."""
        meta = entry.get("meta")
        meta = meta if isinstance(meta, dict) else {}
        found = [f"{name}={meta[name]}" for name in ("n_params", "size", "ftype") if name in meta]
        self._weights = f":{','.join(found)}" if found else ""
        context = meta.get("n_ctx")
        if isinstance(context, int) and context < self._max_input_tokens + self._overhead:
            _log.warning(
                "context_shorter_than_max_input_tokens",
                model=self._model,
                context=context,
                max_input_tokens=self._max_input_tokens,
                effect="the server refuses longer inputs",
                change="lower max_input_tokens, or start the server with a longer context",
            )

    async def _listed(self) -> Mapping[str, Any] | None:
        """The server's entry for the model; None where the server keeps no list."""
        import openai

        with translated(model=self._model, url=self._url, key_env=self._key_env):
            async with asyncio.timeout(self._timeout_s):
                try:
                    raw = await self._client.models.with_raw_response.retrieve(self._model)
                    return _object(raw.content)
                except openai.APIStatusError as exc:
                    if exc.status_code not in (404, 405, 501):
                        raise
                # There is no such model, or this server only has the list.
                try:
                    listing = await self._client.models.with_raw_response.list()
                except openai.APIStatusError as exc:
                    if self._is_openai or exc.status_code not in (404, 405, 501):
                        raise
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
    """The names of a listed model: its id, and its aliases (llama.cpp)."""
    aliases = entry.get("aliases")
    return [str(entry.get("id")), *map(str, aliases if isinstance(aliases, list) else [])]


def _shutdown(entry: Mapping[str, Any]) -> date | None:
    """When a model ends, as OpenAI (``shutdown_date``) or Azure (``deprecation``) says it."""
    value = entry.get("shutdown_date")
    deprecation = entry.get("deprecation")
    if value is None and isinstance(deprecation, dict):
        value = deprecation.get("shutdown_date", deprecation.get("inference"))
    try:
        if isinstance(value, str):
            return datetime.fromisoformat(value).date()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC).date()
    except (ValueError, OverflowError, OSError):
        pass
    return None
