"""Servers with OpenAI's HTTP API: the client, its errors, keys, rate limits and usage."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from fedone_sdk.backends.base import P, PreparingBackend, RateLimits
from fedone_sdk.backends.completions import Completion
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendRefused,
    BackendUnavailable,
    MissingExtraError,
    SpecError,
    one_line,
)
from fedone_sdk.messages import is_sendable

if TYPE_CHECKING:
    import openai

OPENAI_URL = "https://api.openai.com/v1"
"""URL of OpenAI's API."""

_QUOTA_CODES = frozenset({"insufficient_quota", "billing_not_active", "billing_hard_limit_reached"})
# Refusals of `service_tier: flex`, which are not billed.
_NO_CAPACITY = frozenset({"resource_unavailable", "resource_unavailable_error"})
_CAPACITY_S = 30.0
_RETRYABLE = frozenset({408, 409, 425, 429})
# Sent by proxies; the server behind one may have processed the request.
_OUTCOME_UNKNOWN = frozenset({502, 504, *range(520, 528)})
# No connection was made. By name, as httpx and httpx2 (openai 2 and 3) both have these classes.
_NOT_SENT = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError"})
# The connection broke in use; other TLS errors come from its configuration.
_TLS_BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_CONNECT_S = 10.0
_SECRET_NAME = re.compile(r"(?i)(^|_)(api_?keys?|keys?|tokens?|secrets?|credentials?)(_|$)|passw")
_LEAST_CHARS = 8
_SECRET_SHAPE = re.compile(
    r"(?i:\bbearer\s+)(?=\S*\d)[^\s\"',;]+"
    r"|\b(?i:(?:sk|pk|rk|gsk|xai)[-_]|hf_)[^\s\"',;]{6,}"
    r"|(?i:\b(?:api[-_ ]?key|token|password|secret)\s*[=:]\s*)[^\s\"',;]{6,}"
    r"|(?<=://)[^\s/@]+(?=@)"
)
_ONE_REQUEST = Usage(requests=1)
_MOST_BYTES = 64 * 1024 * 1024
"""Maximal length of an answer: a list of inputs, each with the log-probabilities of many tokens."""
_MOST_TOKENS = 2**32
"""Maximal number of tokens that one answer can report, so that sums of reports stay exact."""
_MARKUP = re.compile(r"(?is)<(script|style)\b.*?</\1>|<[a-z/!][^>]*>")
_SAYING = (
    *("loc", "error", "errors", "message", "msg", "detail", "details", "title", "metadata"),
    *("raw", "reason", "error_msg", "error_message"),
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_STATED_WAIT = re.compile(
    r"(?i)(?:retryDelay\W+|try again in |retry after )((?:[\d.]+(?:ms|[smh])?)+)"
)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class ModelServer:
    """A server, for one of its models.

    Attributes:
        url: The URL in errors.

    Args:
        model: The server's name of the model.
        base_url: URL with its ``/v1``, or an address of Azure with its query; None is OpenAI's own,
            also if ``OPENAI_BASE_URL`` is set.
        api_key_env: Environment variable that holds the key; None sends no key.
        timeout_s: Time limit of each read, in seconds; connecting has half of it, at most 10 s. A
            server that sends slowly can take longer in total, so callers also apply
            ``asyncio.timeout``.
        max_bytes: Maximal length of an answer. A longer one is not read.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None,
        api_key_env: str | None,
        timeout_s: float,
        max_bytes: int = _MOST_BYTES,
    ) -> None:
        if find_spec("openai") is None:
            raise MissingExtraError("an OpenAI-compatible model", extra="openai")
        import openai

        self.model, self.timeout_s, self.key_env = model, timeout_s, api_key_env
        self.url, query = _address(base_url or OPENAI_URL)
        # The client requires a key; the hook removes it.
        key = "none" if api_key_env is None else read_key(api_key_env)
        self.client = openai.AsyncOpenAI(
            api_key=key,
            base_url=self.url,
            default_query=query,
            default_headers={"api-key": key} if api_key_env and _is_azure(self.url) else None,
            # The connect timeout expires first, and proves that nothing was sent.
            timeout=openai.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s / 2)),
            # `Retries` repeats requests, and each attempt is paid.
            max_retries=0,
            http_client=_http_client(max_bytes, sends_key=api_key_env is not None),
        )

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Convert exceptions of the `openai` client to the SDK's errors, of one line each.

        It also converts `TimeoutError` (of ``asyncio.timeout``), bodies that are not JSON, and
        texts that are not valid Unicode. The messages name the model, the URL and the key's
        variable; those of the SDK's errors that the body raises get the URL.

        Raises:
            BackendUnavailable: 408, 409, 425, 429, 5xx, no connection, timeout, broken answer.
            BackendBlocked: 401, 402, 404, 405, a redirect, no quota left, a TLS failure.
            BackendRefused: 403, and any other refusal.
        """
        import openai

        try:
            yield
        except BackendError as exc:
            exc.url = self.url
            raise
        except openai.APIStatusError as exc:
            # Servers may repeat the key in their answer, so that of 401 is dropped.
            raise self.failure(exc) from (None if exc.status_code == 401 else exc)
        except openai.APIConnectionError as exc:
            raise _of_connection(exc, self.url, self.key_env) from exc
        except TimeoutError as exc:
            raise BackendUnavailable("no answer in time", url=self.url) from exc
        except UnicodeEncodeError as exc:
            raise BackendError(
                "an input is not valid Unicode (it has a lone surrogate)", usage=NOTHING
            ) from exc
        except (openai.APIResponseValidationError, json.JSONDecodeError, UnicodeDecodeError) as exc:
            raise BackendUnavailable(
                "the answer is cut off or not JSON (if that stays so, check base_url)", url=self.url
            ) from exc
        except openai.OpenAIError as exc:
            said = _short(str(exc), self.key_env)
            raise BackendError("the request failed", url=self.url, said=said) from exc

    def message_of(self, exc: openai.APIStatusError) -> str:
        """Return the server's message of a refusal: one bounded line without the key."""
        return _short(_words(exc.body), self.key_env)

    def failure(self, exc: openai.APIStatusError) -> BackendError:
        """Return the SDK's error for a refusal."""
        return self._failure(exc.status_code, exc.body, exc.response.headers)

    def _failure(self, status: int, body: object, headers: Mapping[str, str]) -> BackendError:
        model, said = self.model, _short(_words(body), self.key_env)
        facts: dict[str, Any] = {"url": self.url, "said": said, "usage": _ONE_REQUEST}
        if status == 401:
            change = "set api_key_env" if self.key_env is None else "put a valid one in its place"
            facts |= {"said": "", "key_env": self.key_env}
            return BackendBlocked(f"the key is missing or not valid: {change}", **facts)
        codes = [str(body.get(name)) for name in ("code", "type")] if isinstance(body, dict) else []
        if status == 402 or _QUOTA_CODES.intersection(codes):
            return BackendBlocked(
                "the account has no quota left: add credit or raise its limit", **facts
            )
        if status in (404, 405) or status < 400:
            return BackendBlocked(
                f"HTTP {status}: there is no model {model!r} here, or the key has no access to "
                f"it: check model and base_url",
                **facts,
            )
        if status in _RETRYABLE or status >= 500:
            if status in _OUTCOME_UNKNOWN:
                facts["usage"] = None
            wait_s = retry_after_s(headers, str(body))
            problem = f"HTTP {status}"
            if _NO_CAPACITY.intersection(codes):
                wait_s = _CAPACITY_S if wait_s is None else wait_s
                problem += ": service_tier flex has no capacity now; without it, calls cost more"
            return BackendUnavailable(problem, retry_after_s=wait_s, **facts)
        if status == 403:
            problem = f"HTTP 403: the text is not allowed, or the key may not use model {model!r}"
            return BackendRefused(problem, key_env=self.key_env, **facts)
        return BackendRefused(f"HTTP {status}: the request was refused", **facts)

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path, relative to `url`."""
        with self.translated():
            async with asyncio.timeout(self.timeout_s):
                return _object(await self.client.get(self.url + path, cast_to=str))

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request; return the JSON object of its answer."""
        with self.translated():
            found = await self.send(path, body)
        error = found if found.get("object") == "error" else found.get("error")
        if (failed := Completion(error=error).failure()) is not None:
            raise self._failure(*failed, {})
        return found

    async def send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """`post`, with the exceptions of the client."""
        async with asyncio.timeout(self.timeout_s):
            # As plain text, because the client's parsing to objects is the slowest part.
            return _object(await self.client.post(self.url + path, body=body, cast_to=str))

    async def aclose(self) -> None:
        """Close the connections."""
        await self.client.close()


class ServerBackend(PreparingBackend[P]):
    """Base of the backends for servers, which are dialects of one API."""

    def __init__(self, server: ModelServer) -> None:
        super().__init__()
        self._server = server

    async def aclose(self) -> None:
        """Close the connections and stop the thread."""
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
    """Return the requested pause in seconds: ``retry-after-ms``, ``Retry-After`` or the text's."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if value is None:
        stated = _STATED_WAIT.search(said)
        return None if stated is None else _duration(stated[1].rstrip("."))
    seconds = _number(value)
    if seconds is not None:
        return seconds
    date = email.utils.parsedate_tz(value)
    return None if date is None else max(0.0, email.utils.mktime_tz(date) - time.time())


def usage_of(usage: object | None, quoted: Usage, least: Usage) -> Usage:
    """Return the usage of one answered request.

    Args:
        usage: As the provider reports it.
        quoted: The request's quote, which counts for tokens that are not reported.
        least: What was certainly sent and written. A report below it is wrong, and counts as none.
    """
    prompt = _tokens(usage, "prompt_tokens")
    completion = _tokens(usage, "completion_tokens")
    total = _tokens(usage, "total_tokens")
    if completion is None:
        completion = quoted.completion_tokens
    elif total is not None and prompt is not None:
        # Some providers count reasoning tokens only in the total, and charge for them.
        completion = max(completion, total - prompt)
    if completion < least.completion_tokens:
        completion = max(quoted.completion_tokens, least.completion_tokens)
    if prompt is None or prompt < least.prompt_tokens:
        prompt = quoted.prompt_tokens
    return Usage(requests=1, prompt_tokens=prompt, completion_tokens=completion)


def cached_tokens(usage: object | None, prompt_tokens: int) -> int:
    """Return how many of a request's prompt tokens the provider says were in its cache."""
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    found = _tokens(details, "cached_tokens") or _tokens(usage, "prompt_cache_hit_tokens") or 0
    return min(found, prompt_tokens)


def read_key(env: str) -> str:
    """Return the key in an environment variable.

    Raises:
        SpecError: The variable is not set; or a header cannot carry its value, which the error does
            not show.
    """
    # A newline at the end of a secret's file is common, and not allowed in a header.
    key = os.environ.get(env, "").strip()
    if not key:
        raise SpecError(
            f"api_key_env: the environment variable {env} is not set; put the key there, or name "
            "another variable (null sends no key)",
            source="backend",
        )
    if not is_sendable(key):
        raise SpecError(
            f"api_key_env: the environment variable {env} holds characters that no key has; "
            "allowed is printable ASCII",
            source="backend",
        )
    return key


def without_secrets(text: str, key_env: str | None = None) -> str:
    """Remove keys from a server's message, because servers may repeat the key of the request.

    These are the value of `key_env`, those of variables with a secret's name, and text that looks
    like a key.
    """
    secrets = {
        value.strip()
        for name, value in os.environ.items()
        if name == key_env or _SECRET_NAME.search(name)
    }
    # Longest first: one key may be a prefix of another.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_CHARS:
            text = text.replace(secret, "[removed]")
    return _SECRET_SHAPE.sub("[removed]", text)


def _address(base_url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its query and its endpoint, and the query.

    Users copy Azure's addresses with both.
    """
    try:
        parts = urlsplit(base_url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # The port, or a bracket.
        valid = False
    if not valid or any(map(str.isspace, base_url)):
        raise SpecError(
            f"base_url: {without_secrets(base_url)!r} is no address; write http(s)://host:port/v1 "
            "(a port is 1 to 65535)",
            source="backend",
        )
    path = re.sub(r"/(chat/)?completions/*$", "", parts.path)
    return parts._replace(path=path, query="", fragment="").geturl(), dict(parse_qsl(parts.query))


def _is_azure(url: str) -> bool:
    return (urlsplit(url).hostname or "").endswith(".azure.com")


def _http_client(max_bytes: int, *, sends_key: bool) -> Any:
    import openai

    class Client(openai.DefaultAsyncHttpxClient):
        """Reads an answer up to `max_bytes`, and follows no redirect: it would get the texts."""

        async def send(self, request: Any, **options: Any) -> Any:
            if not sends_key:
                request.headers.pop("Authorization", None)
            # Never decompressed: a small answer stays small.
            request.headers["Accept-Encoding"] = "identity"
            options |= {"stream": True, "follow_redirects": False}
            answer, body = await super().send(request, **options), bytearray()
            async with aclosing(answer):
                async for chunk in answer.aiter_raw():
                    body += chunk
                    if len(body) > max_bytes:
                        message = f"the answer is longer than {max_bytes} bytes"
                        raise openai.APIConnectionError(message=message, request=request)
            answer.headers.pop("Content-Encoding", None)
            return type(answer)(
                answer.status_code, headers=answer.headers, content=bytes(body), request=request
            )

    try:
        return Client(
            # Servers close idle connections after 5 s or more. A request sent at that moment is
            # lost, at unknown cost, so idle connections expire earlier here.
            limits=type(openai.DEFAULT_CONNECTION_LIMITS)(
                max_connections=1000, max_keepalive_connections=1000, keepalive_expiry=2.0
            )
        )
    except Exception as exc:  # Its errors have no common base class.
        raise SpecError(
            f"the environment's proxy or certificates cannot be used ({_short(str(exc), None)}): "
            "change HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE or SSL_CERT_DIR",
            source="backend",
        ) from exc


def _words(body: object) -> str:
    """Return what an error's body says, whatever its form: JSON of any shape, text or HTML."""
    if isinstance(body, str):
        return _MARKUP.sub(" ", body)
    if isinstance(body, Mapping):
        found = [_words(body[name]) for name in _SAYING if name in body]
    else:
        found = [_words(each) for each in body] if isinstance(body, list) else []
    return ": ".join(dict.fromkeys(filter(None, found)))


def _of_connection(exc: openai.APIConnectionError, url: str, key_env: str | None) -> BackendError:
    causes = list(_causes(exc))
    usage = NOTHING if any(type(cause).__name__ in _NOT_SENT for cause in causes) else None
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return BackendBlocked(
                f"the server's certificate is not accepted ({cause.verify_message}): "
                "check base_url, or trust its authority through SSL_CERT_FILE",
                url=url,
                usage=usage,
            )
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _TLS_BROKEN):
            return BackendBlocked(
                f"TLS failed ({cause.reason}): check http or https, and the port, in base_url",
                url=url,
                usage=usage,
            )
    import openai

    if isinstance(exc, openai.APITimeoutError):
        return BackendUnavailable("no answer in time", url=url, usage=usage)
    what = "no connection" if usage is not None else "the connection broke"
    reason = _short(str(causes[-1]), key_env) or type(causes[-1]).__name__
    return BackendUnavailable(what, url=url, said=reason, usage=usage)


def _causes(exc: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _short(text: str, key_env: str | None) -> str:
    line = without_secrets(one_line(text), key_env)
    return line if len(line) <= 300 else line[:297] + "..."


def _number(value: str | None) -> float | None:
    try:
        number = float(value) if value is not None else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _count(value: str | None) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _duration(value: str | None) -> float | None:
    if value is None:
        return None
    found = _DURATION.findall(value)
    if found and "".join(number + unit for number, unit in found) == value:
        return math.fsum(float(number) * _SECONDS[unit] for number, unit in found)
    return _number(value)


def _tokens(usage: object | None, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, Mapping) else getattr(usage, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return min(value, _MOST_TOKENS)
    return None


def _object(body: str) -> dict[str, Any]:
    found = json.loads(body)
    if not isinstance(found, dict):
        raise json.JSONDecodeError("not an object", body, 0)
    return found
