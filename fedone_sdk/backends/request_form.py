"""Builds requests to one server, and changes their format after a refusal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import structlog

from fedone_sdk.backends.base import Query
from fedone_sdk.backends.model_server import ONE_REQUEST, ModelServer, Reply
from fedone_sdk.errors import BackendBlocked, BackendRefused, BackendUnavailable, FormChanged

_log = structlog.get_logger(__name__)

SAMPLES_ADVICE = "set log_probs: false with loss: zero_one, or log_probs: {samples: 8}"
"""Advice for a model without log-probabilities."""

_TOP = 20  # OpenAI's maximum of top_logprobs.
_SMALL_TOP = 5  # The maximum of many other servers.
_OTHER_NAME = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
_UNKNOWN = re.compile("un(supported|recognized|known|expected)|not (support|permit|allow)|extra")
_NEVER = ("unsupported", "not support", "not allowed")
_SYSTEM = (
    *("system role", "system message", "system prompt", "system instruction", "'system'"),
    *("developer instruction", "roles", ".role"),
)
_SCHEMA = (
    *("response_format", "response format", "json_schema", "json schema", "response_schema"),
    *("structured output", "grammar"),
)
_TOO_LONG = frozenset({"context_length_exceeded", "exceed_context_size_error"})
CONTINUING: Mapping[str, Mapping[str, Any]] = {
    "llamacpp": {},
    "vllm": {"add_generation_prompt": False, "continue_final_message": True},
}
"""For each kind of server (`owned_by` of its model), the fields that make it continue the last
message. For other servers, a task whose last message begins the answer is refused."""

Contents = Sequence[tuple[str, str]]
"""One input as messages: (role, text) pairs."""


def response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of a request that constrains an answer to a JSON Schema."""
    # OpenAI's strict mode supports only closed objects, and not every keyword.
    strict = schema.get("additionalProperties") is False and "maxLength" not in json.dumps(schema)
    answer = {"name": "answer", "strict": strict, "schema": schema}
    return {"type": "json_schema", "json_schema": answer}


class RequestForm:
    """Builds the requests to a server, and changes their format after a refusal.

    A refusal may name the field for the maximum length of an answer, the number of tokens to show
    (``top_logprobs``), the number of answers, the temperature, the JSON schema, or the format of
    messages. Later requests are then changed in this respect, and `FormChanged` is raised.
    """

    def __init__(
        self,
        server: ModelServer,
        *,
        api: Literal["chat", "completions"],
        max_tokens_name: str,
        reasoning_effort: str | None,
        service_tier: str | None,
        samples: int,
    ) -> None:
        self._server = server
        self._is_chat = api == "chat"
        self._effort, self._tier = reasoning_effort, service_tier
        self.at_once = samples  # Maximum number of sampled answers per request.
        self.continuing: Mapping[str, Any] | None = None  # One of `CONTINUING`.
        self.shows_labels = False  # Whether an answer has shown log-probabilities.
        self._max_tokens_name = max_tokens_name
        self._num_top = _TOP
        self._changes: set[str] = set()

    def body(
        self, query: Query, contents: Contents, max_tokens: int, schema: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the body of a request for one input."""
        num_top = self._num_top if query.want == "labels" else None
        body: dict[str, Any] = {"model": self._server.model, "service_tier": self._tier}
        if "temperature" not in self._changes:
            # Temperature 1 does not scale log-probabilities; at 0 a written answer is not random.
            body["temperature"] = 0 if query.want in ("choice", "text") else 1
        if not self._is_chat:
            body |= {"prompt": contents[0][1], "max_tokens": max_tokens, "logprobs": num_top}
            body["stop"] = list(query.stop) or None
        else:
            body |= {
                "messages": self._messages(contents),
                self._max_tokens_name: max_tokens,
                "n": answers if (answers := min(query.samples, self.at_once)) > 1 else None,
                "logprobs": num_top and True,
                "top_logprobs": num_top,
                "reasoning_effort": self._effort,
            }
            if contents[-1][0] == "assistant":
                body |= self.continuing or {}
            if schema is not None and "schema" not in self._changes:
                body["response_format"] = response_format(schema)
        return {name: value for name, value in body.items() if value is not None}

    def _messages(self, contents: Contents) -> list[dict[str, Any]]:
        if "system" in self._changes and contents[0][0] == "system":
            (_, system), (role, text), *rest = contents
            contents = [(role, f"{system}\n\n{text}"), *rest]
        parts = "parts" in self._changes
        return [
            {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
            for role, text in contents
        ]

    def adapt(self, reply: Reply, contents: Contents, samples: int) -> None:
        """Change the format of later requests in the respect that a refusal names.

        Args:
            reply: The refusal.
            contents: The contents of the refused request, which a server may quote.
            samples: Number of answers that the refused query asked for.

        Raises:
            FormChanged: The next attempt will have another format.
            BackendError: The input does not fit the model, or a setting must change.
        """
        if reply.status not in (400, 403, 422):
            return
        message, param = self._server.message_of(reply), reply.error_field("param")
        text, sent = f"{param} {message}".lower(), " ".join(text for _, text in contents).lower()
        facts: dict[str, Any] = {"said": message, "usage": ONE_REQUEST}

        def names(*words: str) -> bool:
            return any(word == param or (word in text and word not in sent) for word in words)

        if reply.codes & _TOO_LONG:
            raise BackendRefused(
                "an input is longer than the model's context: shorten the template or the prompt, "
                "lower max_input_tokens (the key tokenizer makes it exact), or start the server "
                "with a longer context",
                **facts,
            )
        if names("output limit was reached"):
            raise self.only_reasons()
        if names("logprobs", "top_logprobs"):
            code = reply.error_field("code")
            if self._num_top == _TOP and not any(word in f"{code} {text}" for word in _NEVER):
                self._num_top = _SMALL_TOP
                raise self._changed(f"at most {_SMALL_TOP} tokens with log-probabilities")
            raise self.no_log_probs()
        # Some servers name max_tokens if an input is too long. Then another name does not help.
        other = _OTHER_NAME[self._max_tokens_name]
        renamed = (other in text or _UNKNOWN.search(text)) and "context" not in text
        if names(self._max_tokens_name) and renamed and self._once("max_tokens"):
            self._max_tokens_name = other
            raise self._changed(f"{other} in place of {_OTHER_NAME[other]}")
        if self.at_once > 1 and (names("candidate") or re.search(r"\bn\b", text)):
            self.limit_answers(max(min(samples, self.at_once) // 2, 1))
            raise self._changed(f"at most {self.at_once} answers per request")
        if names("temperature") and self._once("temperature"):
            raise self._changed("without temperature, so written answers are random")
        if contents[0][0] == "system" and names(*_SYSTEM) and self._once("system"):
            raise self._changed("the system message moves to the start of the user's message")
        if names("array", "list") and names("content", "messages") and self._once("parts"):
            raise self._changed("messages are lists of parts")
        if names(*_SCHEMA) and self._once("schema"):
            raise self._changed("without a JSON schema, so answers may have another form")
        if self._effort is not None and names("reasoning"):
            raise BackendBlocked(
                f"model {self._server.model!r} does not support reasoning_effort "
                f"{self._effort!r}: change it or leave it out",
                **facts,
            )

    def limit_answers(self, at_once: int) -> None:
        """Set the maximum number of answers per request."""
        self.at_once = at_once
        url = self._server.url
        _log.warning("each input needs several requests", url=url, answers_per_request=at_once)

    def no_log_probs(self, *, sometimes: bool = False) -> BackendUnavailable | BackendBlocked:
        """Return the error for an answer without log-probabilities."""
        # A retry may succeed: the servers behind one service may differ.
        if sometimes or self.shows_labels:
            return BackendUnavailable("an answer without log-probabilities", usage=ONE_REQUEST)
        effort = ""
        if self._is_chat and self._effort is None:
            effort = " (a reasoning model may show them with reasoning_effort: none)"
        return BackendBlocked(
            f"model {self._server.model!r} shows no log-probabilities: {SAMPLES_ADVICE}, or use "
            f"another model{effort}",
            usage=ONE_REQUEST,
        )

    def only_reasons(self) -> BackendRefused:
        """Return the error for an answer whose tokens were all used for reasoning."""
        return BackendRefused(
            f"model {self._server.model!r} reasons until its tokens are used up: set "
            "reasoning_effort: none (or the lowest value), or use another model",
            usage=ONE_REQUEST,
        )

    def _once(self, change: str) -> bool:
        if change in self._changes or not (self._is_chat or change == "temperature"):
            return False
        self._changes.add(change)
        return True

    def _changed(self, change: str) -> FormChanged:
        url = self._server.url
        _log.warning("requests are adapted to the model's server", url=url, change=change)
        return FormChanged(
            f"the server refused the format of a request; the next attempt is changed: {change}",
            usage=ONE_REQUEST,
        )
