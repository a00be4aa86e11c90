"""Client for a server with OpenAI's HTTP API: requests, errors, keys, rate limits and usage."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from aiohttp import ClientConnectorCertificateError, ClientConnectorError

from fedone_sdk import errors
from fedone_sdk.backends.base import P, PreparingBackend, RateLimits, setting_error
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.clock import wait_until_s
from fedone_sdk.errors import BackendBlocked, BackendError, BackendRefused, BackendUnavailable
from fedone_sdk.messages import is_sendable

OPENAI_URL = "https://api.openai.com/v1"

ONE_REQUEST = Usage(requests=1)
"""The cost of a refused request."""

_QUOTA_CODES = frozenset({"insufficient_quota", "billing_not_active", "billing_hard_limit_reached"})
# Error codes when the service tier `flex` has no capacity; the refused requests are not billed.
_NO_CAPACITY = frozenset({"resource_unavailable", "resource_unavailable_error"})
_CAPACITY_WAIT_S = 30.0
# 498: Groq has no capacity in the tier flex. 499: Gemini has cancelled the request.
_RETRYABLE = frozenset({408, 409, 425, 429, 498, 499})
# Sent by proxies; the server behind the proxy may have processed the request.
_OUTCOME_UNKNOWN = frozenset({502, 504, *range(520, 528)})
_NOT_SENT = ClientConnectorError, aiohttp.ClientHttpProxyError, aiohttp.ConnectionTimeoutError
# TLS errors of a broken connection; all other TLS errors are errors of configuration.
_TLS_BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_CONNECT_S = 10.0
# Headers for the billed organisation and project, and the environment variables of their values.
_ACCOUNT = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
_SECRET_NAME = re.compile(r"(?i)(^|_)(api_?keys?|keys?|tokens?|secrets?|credentials?)(_|$)|passw")
_MIN_SECRET_CHARS = 8
_SECRET_SHAPE = re.compile(
    r"(?i:\bbearer\s+)(?=\S*\d)[^\s\"',;]+"
    r"|\b(?i:(?:sk|pk|rk|gsk|xai)[-_]|hf_)[^\s\"',;]{6,}"
    r"|(?i:\b(?:api[-_ ]?key|token|password|secret)\s*[=:]\s*)[^\s\"',;]{6,}"
    r"|(?<=://)[^\s/@]+(?=@)"
)
_MAX_BYTES = 64 * 1024 * 1024
"""Maximum length of an answer. It may have log-probabilities of many inputs and tokens."""
_MAX_TOKENS = 2**32
"""A larger reported number of tokens is replaced by this, so that sums stay below 2**53."""
# Takes linear time on any text.
_MARKUP = re.compile(r"(?is)<(script|style)\b.*?(?:</\1>|\Z)|<[a-z/!][^<>]*>")
_MESSAGE_FIELDS = (
    *("loc", "error", "errors", "message", "msg", "detail", "details", "title", "metadata"),
    *("raw", "reason", "error_msg", "error_message", "base_resp", "status_msg"),
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_STATED_WAIT = re.compile(r"(?i)(?:retryDelay\W+|(?:again|retry) (?:in|after) )([\d.hms]+)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Reply(NamedTuple):
    """What a server answers to one request.

    Attributes:
        status: The HTTP status. If a 200 answer contains an error, the status in that error.
        body: The parsed JSON; a text if it is not JSON.
    """

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def is_error(self) -> bool:
        """Whether the server refused the request, or failed."""
        return self.status >= 300

    def error_field(self, name: str) -> str:
        """Return a field of the error, such as its ``code``."""
        body = self.body if isinstance(self.body, dict) else {}
        error = body.get("error")
        return str((error if isinstance(error, dict) else body).get(name))

    @property
    def codes(self) -> set[str]:
        """The error's ``code`` and ``type``."""
        return {self.error_field("code"), self.error_field("type")}


class ModelServer:
    """HTTP client for one model of a server.

    Args:
        model: The server's name for the model.
        base_url: URL up to ``/v1``, or an Azure URL with its query; None means `OPENAI_URL`.
        api_key_env: Environment variable that contains the key; if None, no key is sent.
        timeout_s: Time limit of a request, in seconds. The connect timeout is half of it, at most
            10 s.
        max_bytes: Maximum length of an answer; a longer answer is an error.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None,
        api_key_env: str | None,
        timeout_s: float,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self.model, self.timeout_s, self._key_env = model, timeout_s, api_key_env
        self.url, self._query = _address(base_url or OPENAI_URL)
        self._proxy = _proxy_for(self.url)
        self._max_bytes = max_bytes
        # No compression, because a small compressed answer could expand beyond `max_bytes`.
        self._headers = {"User-Agent": "fedone-sdk", "Accept-Encoding": "identity"}
        self._headers["Content-Type"] = "application/json"
        if api_key_env is not None:
            key = read_key(api_key_env)
            self._headers["Authorization"] = f"Bearer {key}"
            host = urlsplit(self.url).hostname or ""
            if host.endswith(".azure.com"):
                self._headers["api-key"] = key
            if host == urlsplit(OPENAI_URL).hostname:
                for name, env in _ACCOUNT.items():
                    if is_sendable(value := os.environ.get(env, "").strip()):
                        self._headers[name] = value
        self._session: aiohttp.ClientSession | None = None

    async def send(self, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """Send a GET request, or a POST request if there is a body. The reply may be an error.

        Raises:
            BackendUnavailable: There is no reply, or it is cut off or too long.
            BackendBlocked: TLS failed.
            BackendError: The body is not valid Unicode.
        """
        try:
            content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as exc:
            raise BackendError(
                "an input is not valid Unicode (it has a lone surrogate)", usage=NOTHING
            ) from exc
        if self._session is None:  # Created here, because a session belongs to its event loop.
            self._session = aiohttp.ClientSession(
                # Servers close idle connections after 5 s or more. A request sent at that moment
                # is lost, at unknown cost, so the client closes idle connections earlier.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                # Shorter than `timeout_s`, to tell a failure to connect (free) from a slow answer.
                timeout=aiohttp.ClientTimeout(connect=min(_CONNECT_S, self.timeout_s / 2)),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        request = self._session.request(
            "GET" if content is None else "POST",
            self.url + path,
            data=content,
            headers=self._headers,
            params=self._query,
            proxy=self._proxy,
            allow_redirects=False,  # The texts may be sent to `url` only.
        )
        received = bytearray()
        try:
            async with asyncio.timeout(self.timeout_s), request as response:
                async for chunk in response.content.iter_any():
                    received += chunk
                    if len(received) > self._max_bytes:
                        problem = f"the answer is longer than {self._max_bytes} bytes"
                        raise BackendUnavailable(problem, url=self.url)
        except (aiohttp.ClientError, OSError) as exc:
            raise self._connection_error(exc) from exc
        return _parsed(response.status, bytes(received), response.headers)

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request like `send`, and return the JSON object of its answer."""
        reply = await self.send(path, body)
        if reply.is_error:
            raise self.error_of(reply)
        if not isinstance(reply.body, dict):
            raise self.unreadable(reply)
        return reply.body

    def blocked(self, problem: str) -> BackendBlocked:
        """Return an error that remains until a setting is changed."""
        return BackendBlocked(problem, url=self.url)

    def unreadable(self, reply: Reply, wrong: str = "") -> BackendUnavailable:
        """Return the error for an answer that cannot be parsed; its cost is unknown."""
        said, body = "", reply.body if isinstance(reply.body, dict) else None
        if body is not None:  # Without choices, it may be a message of the provider.
            said = ("" if body.get("choices") else self.message_of(reply)) or wrong
        return BackendUnavailable(
            "the answer is cut off or not a completion (if this repeats, check base_url and api)",
            url=self.url,
            said=_short(said, self._key_env),
        )

    def message_of(self, reply: Reply) -> str:
        """Return the message of an error in one line of limited length, without the key."""
        return _short(_message(reply.body), self._key_env)

    def error_of(self, reply: Reply) -> BackendError:
        """Map an error of the server to the SDK's errors.

        Returns:
            `BackendUnavailable` for 408, 409, 425, 429, 498, 499 and 5xx; `BackendBlocked` for 401,
            402, 404, 405, a redirect, and an exhausted quota; `BackendRefused` for all others.
        """
        status, message = reply.status, self.message_of(reply)
        facts: dict[str, Any] = {"url": self.url, "said": message, "usage": ONE_REQUEST}
        if status == 401:  # The message is left out, because it may contain the key.
            change = "set api_key_env" if self._key_env is None else "put a valid one in its place"
            facts |= {"said": "", "key_env": self._key_env}
            return BackendBlocked(f"the key is missing or not valid: {change}", **facts)
        if status == 402 or _QUOTA_CODES & reply.codes:
            problem = "the account has no quota left: add credit or raise its limit"
            return BackendBlocked(problem, **facts)
        if status in (404, 405) or status < 400:
            return BackendBlocked(
                f"HTTP {status}: there is no model {self.model!r} here, or the key has no access "
                "to it: check model and base_url",
                **facts,
            )
        problem = f"HTTP {status}"
        if status in _RETRYABLE or status >= 500:
            if status in _OUTCOME_UNKNOWN:
                facts["usage"] = None
            wait_s = retry_after_s(reply.headers, str(reply.body))
            if _NO_CAPACITY & reply.codes:
                wait_s = _CAPACITY_WAIT_S if wait_s is None else wait_s
                problem += ": service_tier flex has no capacity now; other tiers cost more"
            return BackendUnavailable(problem, retry_after_s=wait_s, **facts)
        if status == 403:
            problem += f": the text is not allowed, or the key may not use model {self.model!r}"
            return BackendRefused(problem, key_env=self._key_env, **facts)
        return BackendRefused(f"{problem}: the request was refused", **facts)

    def _connection_error(self, exc: Exception) -> BackendError:
        facts: dict[str, Any] = {"url": self.url, "usage": None}
        if isinstance(exc, _NOT_SENT):
            facts["usage"] = NOTHING
        if isinstance(exc, ClientConnectorCertificateError):
            reason = getattr(exc.certificate_error, "verify_message", exc.certificate_error)
            return BackendBlocked(
                f"the server's certificate is not accepted ({reason}): check base_url, or trust "
                "its authority through SSL_CERT_FILE",
                **facts,
            )
        cause = exc.os_error if isinstance(exc, ClientConnectorError) else exc
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _TLS_BROKEN):
            return BackendBlocked(
                f"TLS failed ({cause.reason}): check http or https, and the port, in base_url",
                **facts,
            )
        if isinstance(exc, TimeoutError):
            return BackendUnavailable("no answer in time", **facts)
        facts["said"] = _short(str(exc), self._key_env) or type(exc).__name__
        sent = facts["usage"] is None
        return BackendUnavailable("the connection broke" if sent else "no connection", **facts)

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class ServerBackend(PreparingBackend[P]):
    """Base of the backends that send requests to a server."""

    def __init__(self, server: ModelServer) -> None:
        super().__init__()
        self._server = server

    async def aclose(self) -> None:
        await super().aclose()
        await self._server.aclose()


def rate_limits(headers: Mapping[str, str]) -> RateLimits | None:
    """Parse the ``x-ratelimit-*`` headers, with durations such as ``1m30s`` or ``12ms``."""
    limits = RateLimits(
        requests=_count(headers.get("x-ratelimit-remaining-requests")),
        requests_reset_s=_duration(headers.get("x-ratelimit-reset-requests")),
        tokens=_count(headers.get("x-ratelimit-remaining-tokens")),
        tokens_reset_s=_duration(headers.get("x-ratelimit-reset-tokens")),
    )
    return None if limits == RateLimits() else limits


def retry_after_s(headers: Mapping[str, str], said: str = "") -> float | None:
    """Return the pause, in seconds, that the headers or the message of an error ask for."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if value is None:
        stated = _STATED_WAIT.search(said)
        return None if stated is None else _duration(stated[1].rstrip("."))
    seconds = _number(value)
    return wait_until_s(value, headers.get("date")) if seconds is None else seconds


def usage_of(usage: object, quoted: Usage, minimum: Usage) -> Usage:
    """Return the usage of one answered request.

    Args:
        usage: The provider's report.
        quoted: Upper bound on the usage. It replaces a number of tokens that is not reported.
        minimum: Lower bound on the usage. `quoted` replaces a reported number below it.
    """
    prompt = _tokens(usage, "prompt_tokens")
    completion = _tokens(usage, "completion_tokens")
    total = _tokens(usage, "total_tokens") or 0
    if prompt is None or prompt < minimum.prompt_tokens:
        prompt = quoted.prompt_tokens
    if completion is None:
        completion = quoted.completion_tokens
    # Some providers count reasoning tokens only in the total, and charge for them.
    completion = max(completion, total - prompt)
    if completion < minimum.completion_tokens:
        completion = max(quoted.completion_tokens, minimum.completion_tokens)
    return Usage(requests=1, prompt_tokens=prompt, completion_tokens=completion)


def cached_tokens(usage: object, prompt_tokens: int) -> int:
    """Return how many of a request's prompt tokens the provider reports as cached."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = _tokens(details, "cached_tokens") or _tokens(usage, "prompt_cache_hit_tokens") or 0
    return min(cached, prompt_tokens)


def read_key(env: str) -> str:
    """Return the key in an environment variable. No error contains the value."""
    # Secrets from files often end with a newline, which is not allowed in a header.
    key = os.environ.get(env, "").strip()
    if not is_sendable(key):
        problem = "has characters other than printable ASCII"
        raise setting_error(
            f"api_key_env: the environment variable {env} {problem if key else 'is not set'}; put "
            "the key there, or name another variable (null sends no key)"
        )
    return key


def without_secrets(text: str, key_env: str | None = None) -> str:
    """Remove keys from a server's message, because servers may repeat the key of the request.

    The keys are the value of `key_env`, the values of variables that are named like a secret, and
    text that looks like a key.
    """
    secrets = {
        value.strip()
        for name, value in os.environ.items()
        if name == key_env or _SECRET_NAME.search(name)
    }
    # Longest first: one key may be a prefix of another.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, "[removed]")
    return _SECRET_SHAPE.sub("[removed]", text)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # An invalid port or an unbalanced bracket.
        return False


def _address(base_url: str) -> tuple[str, dict[str, str]]:
    """Split a URL into its base, without an endpoint such as /chat/completions, and its query."""
    if not _is_http(base_url) or "@" in base_url or any(map(str.isspace, base_url)):
        raise setting_error(
            f"base_url: {without_secrets(base_url)!r} is not a URL; write http(s)://host:port/v1 "
            "(a port is 1 to 65535) without a password"
        )
    parts = urlsplit(base_url)
    path = re.sub(r"/(chat/)?completions/*$", "", parts.path)
    return parts._replace(path=path, query="", fragment="").geturl(), dict(parse_qsl(parts.query))


def _proxy_for(url: str) -> str | None:
    # aiohttp's `trust_env` would also read passwords from ~/.netrc.
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    if not _is_http(proxy):
        raise setting_error(
            f"the environment's proxy for {parts.scheme} is not http(s)://[user:password@]host:port"
            ": change HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or NO_PROXY"
        )
    return proxy


def _parsed(status: int, content: bytes, headers: Mapping[str, str]) -> Reply:
    text = content.decode("utf-8-sig", errors="replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = text
    if status >= 300 or not isinstance(body, dict):
        return Reply(status, body, headers)
    # A 200 answer may contain an error.
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    first = first if isinstance(first, dict) else {}
    error = body if body.get("object") == "error" else body.get("error") or first.get("error")
    # If a provider breaks off, OpenRouter shows the error only in `native_finish_reason`.
    reasons = str(first.get("finish_reason")), str(first.get("native_finish_reason"))
    failures = [one for one in reasons if re.search("(?i)error|abort|cancel|insufficient", one)]
    if not error and not failures:
        return Reply(status, body, headers)
    if not isinstance(error, dict):
        error = {"message": str(error or f"finish_reason: {failures[0]}")}
    code = str(error.get("code"))
    status = int(code) if re.fullmatch("[45][0-9][0-9]", code) else 500 if failures else 400
    # At most 500, because 502 and 504 would count as a proxy's answer, with unknown cost.
    return Reply(min(status, 500), {"error": error}, headers)


def _message(body: object, levels: int = 20) -> str:
    """Return the message in an error's body: JSON of any shape, text or HTML."""
    if isinstance(body, str):
        return _MARKUP.sub(" ", body)
    below = levels - 1
    if isinstance(body, dict) and below:
        texts = [_message(body[name], below) for name in _MESSAGE_FIELDS if name in body]
    else:
        inner = body if isinstance(body, list) and below else ()
        texts = [_message(part, below) for part in inner]
    return ": ".join(dict.fromkeys(filter(None, texts)))


def _short(text: str, key_env: str | None) -> str:
    line = without_secrets(errors.one_line(text), key_env)
    return line if len(line) <= 300 else line[:297] + "..."


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _count(value: str | None) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _duration(value: str | None) -> float | None:
    if value is None or not re.fullmatch(rf"(?:{_DURATION.pattern})+", value):
        return _number(value)
    parts = _DURATION.findall(value)
    return math.fsum(float(number) * _SECONDS[unit] for number, unit in parts)


def _tokens(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return math.ceil(min(value, _MAX_TOKENS))
    return None
