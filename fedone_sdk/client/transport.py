"""How a device reaches its server: proxies, certificates, and the protocol over HTTP."""

from __future__ import annotations

import base64
import math
import ssl
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import structlog
from pydantic import TypeAdapter, ValidationError
from yarl import URL

from fedone_sdk import errors, messages
from fedone_sdk.clock import wait_until_s
from fedone_sdk.errors import ArgumentError, system_errors


def server_url(text: str) -> URL:
    """Return the base URL of an aggregator in one form: different spellings give equal results."""
    url = _http_url(text)
    if url is None:
        raise ArgumentError(f"server: {text!r} is not an http(s) URL")
    if url.user is not None or url.password is not None:
        # aiohttp would send user and password instead of the credential.
        raise ArgumentError("server: must not have a user or password")
    if url.raw_query_string or url.raw_fragment:
        raise ArgumentError("server: must not have a query (?) or a fragment (#)")
    return url.with_path(url.raw_path.rstrip("/"), encoded=True)


def _http_url(text: str) -> URL | None:
    """Parse an http(s) URL; None if it is malformed, or has no host or another scheme."""
    try:
        url = URL(text.strip())
        (url.raw_host or "").encode("idna")  # The resolver would raise the same error later.
    except (AttributeError, TypeError, ValueError):
        return None
    return url if url.scheme in ("http", "https") and url.host else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How a device reaches its server, and how it identifies itself there.

    Attributes:
        proxy: ``http://[user:password@]host:port``. None applies ``HTTPS_PROXY``, ``HTTP_PROXY``,
            ``ALL_PROXY`` and ``NO_PROXY``, or the system's settings.
        ca_file: Certificate authorities to trust instead of the system's, a PEM file.
        cert_file: The device's certificate for a server that requires one (mTLS), a PEM file.
        key_file: Private key of `cert_file`, unencrypted; None if `cert_file` contains it.
        ssl_context: TLS settings that replace the three files.
        timeout_s: Longest wait for an answer, seconds; a claim also waits `wait_s`.
        wait_s: How long a claim may wait at the server for work, seconds, from 0 to 60.
        name: Display name that the device enrols with, 1 to 200 characters.
        transport: Replaces HTTP, for tests and other protocols; proxy, files, `ssl_context` and
            `timeout_s` then have no effect.
    """

    proxy: str | None = field(default=None, repr=False)
    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    ssl_context: ssl.SSLContext | None = None
    timeout_s: float = 60.0
    wait_s: float = 25.0
    name: str | None = None
    transport: Transport | None = None

    def __post_init__(self) -> None:
        # aiohttp takes 0 and below for no limit.
        if not (isinstance(self.timeout_s, int | float) and self.timeout_s > 0):
            raise ArgumentError(f"network.timeout_s: must be above 0, not {self.timeout_s!r}")

    def options(self, server: URL) -> dict[str, Any]:
        """Return aiohttp's options for requests to a server: proxy and certificates.

        Raises:
            SpecError: A file is missing or malformed, or the proxy's URL is malformed.
        """
        context = self.context()
        options: dict[str, Any] = {} if context is None else {"ssl": context}
        key, proxy = "proxy", self.proxy
        # Not aiohttp's `trust_env`, which also reads passwords from ~/.netrc.
        if proxy is None and not urllib.request.proxy_bypass(f"{server.host}:{server.port}"):
            proxies = urllib.request.getproxies()
            key = f"{server.scheme.upper()}_PROXY or ALL_PROXY"
            proxy = proxies.get(server.scheme) or proxies.get("all")
        return options if proxy is None else options | _through(proxy, key, server)

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS settings; None for the system's certificate authorities."""
        if self.ssl_context is not None:
            if (self.ca_file, self.cert_file, self.key_file) != (None, None, None):
                raise ArgumentError("ssl_context: cannot be combined with ca_file or cert_file")
            return self.ssl_context
        if self.key_file is not None and self.cert_file is None:
            raise ArgumentError("key_file: needs cert_file")
        if self.ca_file is None and self.cert_file is None:
            return None
        with system_errors(ArgumentError, f"ca_file: {self.ca_file} cannot be used"):
            context = ssl.create_default_context(cafile=self.ca_file)
        if self.cert_file is not None:
            with system_errors(ArgumentError, f"cert_file: {self.cert_file} cannot be used"):
                # Without a password OpenSSL would ask for one on the terminal.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        return context


def _through(proxy: str, key: str, server: URL) -> dict[str, Any]:
    """Return aiohttp's options for a proxy. Errors omit the URL, which may contain a secret."""
    url = _http_url(proxy)
    if url is None:
        allowed = "http://[user:password@]host:port"
        raise ArgumentError(f"{key}: is not a proxy; it must be {allowed}")
    options: dict[str, Any] = {"proxy": url.with_user(None).origin()}
    if url.user is not None or url.password is not None:
        pair = f"{url.user or ''}:{url.password or ''}".encode()
        secret = {"Proxy-Authorization": f"Basic {base64.b64encode(pair).decode('ascii')}"}
        options["proxy_headers" if server.scheme == "https" else "headers"] = secret
    return options


def token_of(text: str | None) -> str | None:
    """Return a token without surrounding whitespace; None if it is empty."""
    # Files with a secret often end with a newline, which a header cannot carry.
    token = (text or "").strip()
    if token and not messages.is_sendable(token):
        raise ArgumentError("token: has characters other than printable ASCII")
    return token or None


class Connection:
    """The HTTP session of one server.

    Raises:
        SpecError: The URL, the proxy or a certificate cannot be used.
    """

    def __init__(self, server: str, *, network: Network | None = None) -> None:
        self.base = server_url(server)
        self.network = network or Network()
        self._options = self.network.options(self.base)
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        token: str,
        body: bytes | None = None,
        *,
        timeout: aiohttp.ClientTimeout,
        params: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to a URL-quoted path; yield the response, whose body is not read yet.

        Raises:
            MessageError: The answer is not an aggregator's.
            ProblemError: The server refuses.
            TransportError: The server cannot be reached, or the connection breaks in the body.
        """
        if self._session is None:
            # Created here, not in __init__: a session belongs to the loop that uses it.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            )
        url = self.base.joinpath(path.lstrip("/"), encoded=True)
        headers = {
            "Authorization": f"Bearer {token}",
            "Accept": "application/json",
            # No compression, so that the limits on sizes also apply to the content.
            "Accept-Encoding": "identity",
            messages.PROTOCOL_HEADER: str(messages.PROTOCOL_VERSION),
        }
        if body is not None:
            headers["Content-Type"] = "application/json"
        headers |= self._options.get("headers", {})
        try:
            async with self._session.request(
                method,
                url,
                params=params,
                data=body,
                timeout=timeout,
                allow_redirects=False,  # a redirect would carry the secret elsewhere
                **{**self._options, "headers": headers},
            ) as response:
                if response.status >= 300:
                    content = await _content(response, _MAX_PROBLEM_BYTES)
                    raise _refusal(url.path, response.status, response.headers, content)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            raise errors.TransportError(f"{self.base}: cannot be reached: {reason}") from exc

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


_log = structlog.get_logger(__name__)

T = TypeVar("T")

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)

_MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""The longest answer with arrays or candidates. The largest array takes 21 MiB in base64."""
_MAX_SHORT_BYTES = 1024 * 1024
_MAX_PROBLEM_BYTES = 64 * 1024
_MAX_RETRY_AFTER_S = 3600.0
_SCORE_S = 600.0
"""Additional wait for a model's answer, seconds."""


class Idle(messages.Message):
    """There is no work now: claim again after `retry_after_s` seconds."""

    retry_after_s: float


_ASSIGNMENT: Any = messages.Assignment  # mypy does not accept a union as a class


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the protocol.

    Attributes:
        name: A method of `Transport`.
        secret: The credential; for ``enrol`` the enrolment token.
        of: Id of the run or assignment.
        after: The version of the candidates that the client has.
    """

    name: str
    secret: str = field(repr=False)
    message: messages.Message | None = None
    of: str = ""
    after: int = 0

    @property
    def body(self) -> bytes:
        """The encoded message."""
        return b"" if self.message is None else messages.encode(self.message)


class Transport(ABC):
    """The calls of the protocol; an implementation defines `send`.

    Each call raises `TransportError` if the aggregator cannot be reached, `ProblemError` if it
    refuses, and `MessageError` if the answer does not follow the protocol.
    """

    @abstractmethod
    async def send(self, call: Call) -> bytes | Idle:
        """Return the encoded answer to a call; `Idle` for a claim without work."""

    async def aclose(self) -> None:  # noqa: B027 (not all have connections)
        """Close the connections; the next call opens new ones."""

    async def _answer(self, kind: type[T], name: str, secret: str, *rest: Any) -> T:
        answer = await self.send(Call(name, secret, *rest))
        return parsed(kind, answer if isinstance(answer, bytes) else b"")

    async def enrol(self, token: str, message: messages.Enrol) -> messages.Enrolled:
        """Enrol a new client."""
        return await self._answer(messages.Enrolled, "enrol", token, message)

    async def rotate(self, credential: str) -> messages.Rotated:
        """Replace the credential; the old one is valid until the new one is used."""
        return await self._answer(messages.Rotated, "rotate", credential)

    async def claim(self, credential: str, message: messages.Claim) -> messages.Assignment | Idle:
        """Claim work."""
        answer = await self.send(Call("claim", credential, message))
        return answer if isinstance(answer, Idle) else parsed(_ASSIGNMENT, answer)

    async def runs(self, credential: str) -> Sequence[messages.RunEntry]:
        """List the runs that the client may work for."""
        return await self._answer(tuple[messages.RunEntry, ...], "runs", credential)

    async def task(self, credential: str, run_id: str) -> messages.RunTask:
        """Fetch a run's task."""
        return await self._answer(messages.RunTask, "task", credential, None, run_id)

    async def vocabulary(
        self, credential: str, run_id: str, after: int = 0
    ) -> messages.VocabularyList:
        """Fetch a run's candidates, or the candidates added since version `after`."""
        kind = messages.VocabularyList
        return await self._answer(kind, "vocabulary", credential, None, run_id, after)

    async def score(self, credential: str, message: messages.Score) -> messages.Scores:
        """Score prompts through the gateway."""
        return await self._answer(messages.Scores, "score", credential, message)

    async def reflect(self, credential: str, message: messages.Reflect) -> messages.Reflected:
        """Let the run's model write a candidate."""
        return await self._answer(messages.Reflected, "reflect", credential, message)

    async def update(
        self, credential: str, assignment_id: str, message: messages.Update
    ) -> messages.Receipt:
        """Send an update."""
        return await self._answer(messages.Receipt, "update", credential, message, assignment_id)

    async def renew(self, credential: str, assignment_id: str) -> messages.Renewal:
        """Renew an assignment's deadline."""
        return await self._answer(messages.Renewal, "renew", credential, None, assignment_id)

    async def decline(self, credential: str, assignment_id: str, message: messages.Decline) -> None:
        """Decline an assignment."""
        await self.send(Call("decline", credential, message, assignment_id))


_ROUTES: Mapping[str, tuple[str, str, int]] = {
    "enrol": ("POST", "/v1/clients", _MAX_SHORT_BYTES),
    "rotate": ("POST", "/v1/clients/me/credential", _MAX_SHORT_BYTES),
    "claim": ("POST", "/v1/assignments/claim", _MAX_ANSWER_BYTES),
    "runs": ("GET", "/v1/runs", _MAX_SHORT_BYTES),
    "task": ("GET", "/v1/runs/{}/task", _MAX_SHORT_BYTES),
    "vocabulary": ("GET", "/v1/runs/{}/vocabulary", _MAX_ANSWER_BYTES),
    "score": ("POST", "/v1/score", _MAX_ANSWER_BYTES),
    "reflect": ("POST", "/v1/reflect", _MAX_SHORT_BYTES),
    "update": ("POST", "/v1/assignments/{}/update", _MAX_SHORT_BYTES),
    "renew": ("POST", "/v1/assignments/{}/renew", _MAX_SHORT_BYTES),
    "decline": ("POST", "/v1/assignments/{}/decline", _MAX_SHORT_BYTES),
}
"""Method, path, and the longest answer of each call."""


class HttpTransport(Connection, Transport):
    """The protocol over HTTP."""

    async def send(self, call: Call) -> bytes | Idle:
        """Send a request."""
        method, path, max_bytes = _ROUTES[call.name]
        wait_s = call.message.wait_s if isinstance(call.message, messages.Claim) else 0.0
        extra_s = _SCORE_S if call.name in ("score", "reflect") else wait_s
        async with self.request(
            method,
            path.format(call.of),
            call.secret,
            None if call.message is None else call.body,
            timeout=aiohttp.ClientTimeout(total=self.network.timeout_s + extra_s),
            params={"after": str(call.after)} if call.after else None,
        ) as response:
            if call.name == "claim" and response.status == 204:
                return Idle(retry_after_s=_retry_after_s(response.headers))
            return await _content(response, max_bytes)


async def _content(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise errors.MessageError(f"{response.url.path}: the answer is over {max_bytes} bytes")
    return bytes(body)


_TRANSIENT = (408, 421, 425, 429)


def _refusal(path: str, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    wait_s = _retry_after_s(headers) if "Retry-After" in headers else None
    try:
        error = messages.Problem.model_validate_json(body).error()
    except ValidationError:
        # A proxy has answered in place of the aggregator.
        if status >= 500 or status in _TRANSIENT:
            return errors.TransportError(f"{path}: answered {status}", retry_after_s=wait_s)
        kind = errors.RefusedBetween if status >= 400 else errors.MessageError
        return kind(f"{path}: answered {status}, but the answer is not from an aggregator")
    error.retry_after_s = wait_s
    return error


def parsed(kind: type[T], content: bytes) -> T:
    """Parse an answer."""
    try:
        answer: T = _adapter(kind).validate_json(content)
    except ValidationError as exc:
        problem = messages.first_error(exc)
        raise errors.MessageError(f"the aggregator's answer is malformed: {problem}") from None
    return answer


def _retry_after_s(headers: Mapping[str, str]) -> float:
    text = headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        wait_s = wait_until_s(text, headers.get("Date"))  # some proxies send dates
        seconds = 1.0 if wait_s is None else wait_s
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if not math.isnan(seconds) else 1.0
