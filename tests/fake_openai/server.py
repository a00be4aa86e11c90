"""The HTTP side of the fake: OpenAI's endpoints, limits and errors."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from aiohttp import web

from fedone_sdk.spec import BackendSpec
from tests.fake_openai.log import Log, Received
from tests.fake_openai.model import FakeModel
from tests.fake_openai.script import Script

_CHAT_FRAME = 7  # By OpenAI's cookbook, for one user message.


Tokens = tuple[int, int]


class _Refusal(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.body: Any = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = dict(headers or {})


class FakeOpenAI:
    """A server on a free port of this machine.

    Attributes:
        received: Every billed request, in order.
        asked: Paths of the free requests, in order.

    Args:
        script: What it does with each billed request.
        models: Name -> further fields of its entry in the list of models.
        key: The key that it wants; None wants none.
        lists_models: Whether there is ``/models``; ``list`` is the list without its entries;
            ``loading`` is 503.
        max_name: How it calls the limit of completion tokens; None takes both names.
        max_top: How many tokens it shows.
        log_probs: Whether the model shows log-probabilities: it does, leaves them out in silence,
            or refuses to be asked for them.
        takes_n: Whether it gives several answers to one request, ignores that, or refuses it.
        caches: How many prompt tokens of each request it reports as cached.
        tier: The service tier that it reports; None is the one that was asked for.
        takes_schema: Whether it knows ``response_format: json_schema``.
        takes_system: Whether it takes a system message.
        takes_text: Whether a message's content may be a text; else it is a list of parts.
        temperature: The only one that it takes; -1 takes none.
        requests_per_minute: Its own limit.
        tokens_per_minute: Its own limit.
        latency_s: Before each answer.
        bills: From the number of a request and its tokens (prompt, completion) to what it bills and
            to what it reports.
        model: Where the numbers come from.
        log: A file that gets a line for each billed request, before it is answered.
        port: 0 takes a free one.
        tls: Serves https.
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        models: Mapping[str, Mapping[str, object]] | None = None,
        key: str | None = None,
        lists_models: bool | Literal["list", "loading"] = True,
        max_name: Literal["max_tokens", "max_completion_tokens"] | None = None,
        max_top: int = 20,
        log_probs: Literal["shown", "left_out", "forbidden", "unsupported"] = "shown",
        takes_n: Literal["yes", "ignored", "refused"] = "yes",
        caches: int = 0,
        tier: str | None = None,
        takes_schema: bool = True,
        takes_system: bool = True,
        takes_text: bool = True,
        temperature: float | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        latency_s: float = 0.0,
        bills: Callable[[int, Tokens], tuple[Tokens, Tokens]] | None = None,
        model: FakeModel | None = None,
        log: str | Path | None = None,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.script = script or Script()
        self.models = dict(models if models is not None else {"fake-1": {}})
        self.key = key
        self.lists_models = lists_models
        self.max_name = max_name
        self.max_top = max_top
        self.log_probs = log_probs
        self.takes_n = takes_n
        self.caches, self.tier = caches, tier
        self.takes_schema = takes_schema
        self.takes_system = takes_system
        self.takes_text = takes_text
        self.temperature = temperature
        self.latency_s = latency_s
        self.bills = bills or (lambda _, tokens: (tokens, tokens))
        self.model = model or FakeModel()
        self.received: list[Received] = []
        self.asked: list[str] = []
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._window: deque[tuple[float, int]] = deque()
        self._log = None if log is None else Log(log)
        self._port = port
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self._closing = asyncio.Event()

    @property
    def base_url(self) -> str:
        """With its ``/v1``."""
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._port}/v1"

    def spec(self, **keys: Any) -> BackendSpec:
        """The ``backend`` of a run that asks this server."""
        ours = {"kind": "openai", "model": "fake-1", "base_url": self.base_url}
        return BackendSpec.model_validate({**ours, "api_key_env": None, **keys})

    async def start(self) -> None:
        """Listens."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._list)
        app.router.add_get("/v1/models/{name:.+}", self._retrieve)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_post("/v1/completions", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._tls)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops listening; what hangs is let go."""
        self._closing.set()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._log is not None:
            self._log.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # Free requests

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        try:
            self._authorize(request)
            if self.lists_models == "loading":  # As llama.cpp's server says.
                raise _Refusal(503, "Loading model", kind="unavailable_error")
            if not self.lists_models:
                raise _Refusal(404, "Not Found")
            rows = [self._entry(name) for name in self.models]
            return web.json_response({"object": "list", "data": rows})
        except _Refusal as refusal:
            return _refused(refusal)

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        name = request.match_info["name"]
        try:
            self._authorize(request)
            if self.lists_models is not True:  # A server without entries has still the list.
                raise _Refusal(404, "Not Found")
            if name not in self.models:
                raise _no_model(name)
            return web.json_response(self._entry(name))
        except _Refusal as refusal:
            return _refused(refusal)

    def _entry(self, name: str) -> dict[str, object]:
        entry = {"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "fake"}
        return {**entry, **self.models[name]}

    def _authorize(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        if self.key is not None and given != f"Bearer {self.key}":
            raise _bad_key(given)

    # Billed requests

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.received) + 1
        chat = request.path.endswith("/chat/completions")
        picked = self.script.pick(number, json.dumps(body, ensure_ascii=False))
        behaviour, _, argument = picked.partition(":")
        answer: dict[str, Any] | None = None
        headers: dict[str, str] = {}
        refusal: _Refusal | None = None
        try:
            self._authorize(request)
            self._check(body, chat=chat)
            _refuse(behaviour, argument, body, request)
            answer = self._answer(body, behaviour, number, chat=chat)
            headers = self._admit(answer["usage"]["total_tokens"])
        except _Refusal as exc:
            refusal, answer = exc, None
        billed = reported = (0, 0)
        if answer is not None:
            used = answer["usage"]
            counted = used["prompt_tokens"], used["completion_tokens"]
            if behaviour in ("error_body", "ended"):
                counted = 0, 0
            billed, reported = self.bills(number, counted)
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            used |= dict(zip(names, (*reported, sum(reported)), strict=True))
        received = Received(
            number=number,
            path=request.path,
            behaviour=behaviour if refusal is None else f"{behaviour}:{refusal.status}",
            prompt_tokens=billed[0],
            completion_tokens=billed[1],
            body=body,
            headers={name.lower(): value for name, value in request.headers.items()},
        )
        self.received.append(received)
        if self._log is not None:
            self._log.add(received)
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if refusal is not None:
            return _refused(refusal)
        assert answer is not None
        if behaviour == "no_usage":
            del answer["usage"]
        return await self._send(request, behaviour, argument, answer, headers)

    async def _send(
        self,
        request: web.Request,
        behaviour: str,
        argument: str,
        answer: dict[str, Any],
        headers: dict[str, str],
    ) -> web.StreamResponse:
        _distort(answer, behaviour, argument)
        content = json.dumps(answer).encode()
        if behaviour == "hang":
            await self._closing.wait()
        if behaviour == "html":
            return web.Response(text="<html>Welcome</html>", content_type="text/html")
        if behaviour == "truncated":
            content = content[: len(content) // 2]
        if behaviour not in ("slow_body", "reset"):
            return web.Response(body=content, content_type="application/json", headers=headers)
        response = web.StreamResponse(headers={**headers, "Content-Type": "application/json"})
        response.content_length = len(content)
        await response.prepare(request)
        if behaviour == "reset":
            await response.write(content[: len(content) // 2])
            if request.transport is not None:
                request.transport.abort()
            return response
        # Once the client has given up, writing raises ConnectionResetError.
        with suppress(ConnectionResetError):
            for index in range(len(content)):
                await response.write(content[index : index + 1])
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), float(argument or 0.01))
                    break
        return response

    def _check(self, body: dict[str, Any], *, chat: bool) -> None:
        """Refuses what this server does not take."""
        if body["model"] not in self.models:
            raise _no_model(body["model"])
        for name in ("max_tokens", "max_completion_tokens") if chat else ():
            if name in body and self.max_name not in (name, None):
                if self.max_name == "max_tokens":
                    raise _Refusal(400, f"Unrecognized request argument supplied: {name}")
                raise _unsupported(name, f" Use '{self.max_name}' instead.")
        top_name = "top_logprobs" if chat else "logprobs"
        if body.get("logprobs") not in (None, False):
            if self.log_probs == "forbidden":
                raise _Refusal(403, "You are not allowed to request logprobs from this model.")
            if self.log_probs == "unsupported":
                raise _unsupported("logprobs")
            if body.get(top_name, 0) > self.max_top:
                raise _Refusal(
                    400,
                    f"Invalid value for '{top_name}': must be at most {self.max_top}.",
                    param=top_name,
                )
        for message in body["messages"] if chat else ():
            if message["role"] == "system" and not self.takes_system:
                raise _Refusal(400, "System role not supported")
            if isinstance(message["content"], str) != self.takes_text:
                raise _Refusal(422, "messages.0.content: Input should be a valid list")
        temperature = body.get("temperature", -1 if self.temperature == -1 else 1)
        if self.temperature not in (None, temperature):
            raise _Refusal(
                400,
                f"Unsupported value: 'temperature' does not support {temperature} with "
                f"this model. Only the default ({self.temperature}) value is supported.",
                param="temperature",
            )
        if body.get("n", 1) > 1 and self.takes_n == "refused":
            raise _Refusal(400, "'n' : number must be at most 1", param="n")
        if "response_format" in body and not self.takes_schema:
            raise _Refusal(
                400,
                "Invalid parameter: 'response_format' of type 'json_schema' is not supported with "
                "this model.",
                param="response_format",
            )

    def _answer(
        self, body: dict[str, Any], behaviour: str, number: int, *, chat: bool
    ) -> dict[str, Any]:
        prompts: list[Any]
        if chat:
            contents = [message["content"] for message in body["messages"]]
            prompts = ["".join(c if isinstance(c, str) else c[0]["text"] for c in contents)]
            most = body.get("max_completion_tokens", body.get("max_tokens", 16))
        else:
            prompt = body["prompt"]
            many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
            prompts = prompt if many else [prompt]
            most = body.get("max_tokens", 16)
        choices = [
            self._choice(index, prompt, body, most, behaviour, number, chat=chat)
            for index, prompt in enumerate(
                prompts * (body.get("n", 1) if self.takes_n == "yes" else 1)
            )
        ]
        prompt_tokens = sum(
            len(prompt) if isinstance(prompt, list) else self.model.count(prompt)
            for prompt in prompts
        ) + (_CHAT_FRAME if chat else 0)
        completion_tokens = sum(
            most if behaviour == "reasons" else max(1, min(most, self.model.count(_text(choice))))
            for choice in choices
        )
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        if self.caches:
            usage["prompt_tokens_details"] = {"cached_tokens": self.caches}
        if behaviour == "reasons":
            usage["completion_tokens_details"] = {"reasoning_tokens": completion_tokens}
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1_700_000_000,
            "model": f"{body['model']}-2026-01-01",
            "system_fingerprint": "fp_fake",
            "service_tier": self.tier or body.get("service_tier", "default"),
            "choices": choices,
            "usage": usage,
        }

    def _choice(
        self,
        index: int,
        prompt: Any,
        body: dict[str, Any],
        most: int,
        behaviour: str,
        number: int,
        *,
        chat: bool,
    ) -> dict[str, Any]:
        text = prompt if isinstance(prompt, str) else "ids " + " ".join(map(str, prompt))
        written = self.model.write(text, most)
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
        if schema is not None:
            (name, options) = next(iter(schema["properties"].items()))
            draw = f"{number}:{index}" if body.get("temperature") else ""
            written = json.dumps({name: self.model.choose(text, options["enum"], draw)})
        silent = behaviour in ("filtered", "refused", "empty", "reasons")
        log_probs: dict[str, Any] | None = None
        if behaviour == "empty":
            log_probs = {"content": []} if chat else {"tokens": [], "top_logprobs": []}
        elif not silent and behaviour != "no_log_probs" and self.log_probs == "shown":
            log_probs = self._shown(text, body, chat=chat)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": {"filtered": "content_filter", "empty": "stop", "refused": "stop"}.get(
                behaviour, "stop" if schema is not None and behaviour != "reasons" else "length"
            ),
            "logprobs": log_probs,
        }
        if not chat:
            return {**choice, "text": "" if silent else written}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if behaviour in ("filtered", "refused") else "" if silent else written,
            "refusal": "I cannot help with that." if behaviour == "refused" else None,
        }
        return {**choice, "message": message}

    def _shown(self, text: str, body: dict[str, Any], *, chat: bool) -> dict[str, Any] | None:
        if body.get("logprobs") in (None, False):
            return None
        if "logprob_token_ids" in body:  # As vLLM does.
            ids: Sequence[int] = body["logprob_token_ids"]
            row = {f"token_id:{i}": self.model.id_log_prob(text, i) for i in ids}
            return {"tokens": ["token_id:0"], "token_logprobs": [-1.0], "top_logprobs": [row]}
        top = list(self.model.log_probs(text).items())
        top = top[: body.get("top_logprobs", 0) if chat else body["logprobs"]]
        token, log_prob = next(iter(self.model.log_probs(text).items()))
        if not chat:
            return {"tokens": [token], "token_logprobs": [log_prob], "top_logprobs": [dict(top)]}
        rows = [{"token": t, "logprob": p, "bytes": list(t.encode())} for t, p in top]
        first = {"token": token, "logprob": log_prob, "bytes": list(token.encode())}
        return {"content": [{**first, "top_logprobs": rows}], "refusal": None}

    def _admit(self, num_tokens: int) -> dict[str, str]:
        """Count a request against the limits of this server, and return what is left of them."""
        now = asyncio.get_running_loop().time()
        while self._window and self._window[0][0] <= now - 60:
            self._window.popleft()
        held = {"requests": len(self._window), "tokens": sum(n for _, n in self._window)}
        asked = {"requests": 1, "tokens": num_tokens}
        wait = self._window[0][0] + 60 - now if self._window else 0.0
        headers: dict[str, str] = {}
        short = None
        for unit, limit in self._limits.items():
            if limit is None:
                continue
            fits = held[unit] + asked[unit] <= limit
            short = short if fits else unit
            left = max(0, limit - held[unit] - (asked[unit] if fits else 0))
            headers |= {
                f"x-ratelimit-limit-{unit}": str(limit),
                f"x-ratelimit-remaining-{unit}": str(left),
                f"x-ratelimit-reset-{unit}": _duration(wait or 60.0),
            }
        if short is not None:
            headers |= {
                "retry-after": str(math.ceil(wait)),
                "retry-after-ms": str(int(wait * 1000)),
            }
            raise _rate_limited(short, headers)
        self._window.append((now, num_tokens))
        return headers


def _refuse(behaviour: str, argument: str, body: dict[str, Any], request: web.Request) -> None:
    """Raises what a behaviour refuses with; others return."""
    match behaviour:
        case "rate_limited":
            raise _rate_limited("requests", {"retry-after": argument or "1"})
        case "rate_limited_ms":
            headers = {"retry-after": "1", "retry-after-ms": argument or "250"}
            raise _rate_limited("tokens", headers)
        case "no_capacity":
            raise _Refusal(429, "Resource unavailable.", code="resource_unavailable")
        case "no_quota":
            raise _Refusal(
                429,
                "You exceeded your current quota, please check your plan and billing details.",
                kind="insufficient_quota",
                code="insufficient_quota",
            )
        case "bad_key":
            raise _bad_key(request.headers.get("Authorization", ""))
        case "forbidden":
            raise _Refusal(
                403, "Project does not have access to this model.", code="model_not_found"
            )
        case "moderated":
            raise _Refusal(403, "Your input was flagged.", kind="moderation", code="403")
        case "no_model":
            raise _no_model(body["model"])
        case "too_long":
            raise _Refusal(
                400,
                "This model's maximum context length is 16385 tokens. However, your messages "
                "resulted in 20007 tokens. Please reduce the length of the messages.",
                param="messages",
                code="context_length_exceeded",
            )
        case "unsupported":
            raise _unsupported("max_tokens", " Use 'max_completion_tokens' instead.")
        case "filtered_prompt":
            raise _Refusal(
                400,
                "The response was filtered due to the prompt triggering content management policy.",
                param="prompt",
                code="content_filter",
            )
        case "error":
            raise _Refusal(
                int(argument or 500),
                "The server had an error while processing your request. Sorry about that!",
                kind="server_error",
            )
        case "raw":
            status, _, content = argument.partition(":")
            refusal = _Refusal(int(status), "")
            refusal.body = json.loads(content)
            raise refusal
        case "overloaded":
            raise _Refusal(
                503,
                "The engine is currently overloaded, please try again later.",
                kind="service_unavailable_error",
                headers={"retry-after": argument} if argument else {},
            )
        case _:
            return


def _distort(answer: dict[str, Any], behaviour: str, argument: str) -> None:
    """Changes an answer in ways of real providers."""
    (choice, *_), error = answer["choices"], {"message": "Insufficient credits"}
    message, log_probs = choice.get("message", {}), choice["logprobs"] or {}
    match behaviour:
        case "error_body":
            answer.clear()
            answer["error"] = error | ({"code": int(argument)} if argument else {})
        case "ended":
            choice |= {"finish_reason": "error", "logprobs": None}
            if argument:
                choice["error"] = error | {"code": int(argument)}
        case "parts":
            reasoning = {"type": "thinking", "thinking": [{"type": "text", "text": "great?"}]}
            message["content"] = [reasoning, {"type": "text", "text": message["content"]}]
            if log_probs:
                log_probs["content"].append({"token": None, "logprob": None, "top_logprobs": None})
        case "twice":
            first = log_probs["content"][0]
            again = {"token": argument + first["token"], "logprob": first["logprob"]}
            again |= {} if argument else {"bytes": first["bytes"]}
            first["top_logprobs"].append(again)
        case "says":
            written = message["content"]
            with suppress(ValueError):
                written = next(iter(json.loads(written).values()))
            message["content"] = argument.replace("\\n", "\n").replace("{}", written)
        case "system":
            answer["system_fingerprint"] = argument
        case "merged":
            changes = json.loads(argument)
            _merge(answer if changes.keys() <= answer.keys() else choice, changes)


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _rate_limited(unit: str, headers: Mapping[str, str]) -> _Refusal:
    return _Refusal(
        429,
        f"Rate limit reached for fake-1 on {unit} per min. Please try again later.",
        kind=unit,
        code="rate_limit_exceeded",
        headers=headers,
    )


def _bad_key(authorization: str) -> _Refusal:
    # OpenAI masks most of the key; others do not.
    given = authorization.removeprefix("Bearer ")
    return _Refusal(401, f"Incorrect API key provided: {given}.", code="invalid_api_key")


def _no_model(name: str) -> _Refusal:
    return _Refusal(
        404,
        f"The model `{name}` does not exist or you do not have access to it.",
        code="model_not_found",
    )


def _unsupported(param: str, hint: str = "") -> _Refusal:
    return _Refusal(
        400,
        f"Unsupported parameter: '{param}' is not supported with this model.{hint}",
        param=param,
        code="unsupported_parameter",
    )


def _refused(refusal: _Refusal) -> web.Response:
    return web.json_response(
        refusal.body, status=refusal.status, headers={**refusal.headers, "x-request-id": "req_fake"}
    )


def _text(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or choice.get("message", {}).get("content") or "")


def _duration(seconds: float) -> str:
    """As OpenAI writes it: ``12ms``, ``6.5s``, ``1m30s``."""
    if seconds < 1:
        return f"{int(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3f}s"
    return f"{int(seconds // 60)}m{int(seconds % 60)}s"
