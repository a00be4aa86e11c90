"""Rate limits, CORS for web pages (Fetch standard), and TLS of the server's port."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Hashable
from contextlib import asynccontextmanager
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Self

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from pydantic import AfterValidator, Field, model_validator

from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.files import user_path
from fedone_sdk.messages import PROTOCOL_HEADER, check_protocol
from fedone_sdk.spec import Spec

_log = structlog.get_logger(__name__)

_BYTES_PER_REQUEST = 64 * 1024
_TLS_CHECK_S = 5.0
"""Interval at which the TLS files are checked for changes, seconds."""


def _network(text: str) -> str:
    try:
        ip_network(text)
    except ValueError as exc:
        raise ValueError(
            f"must be an address or a network such as 10.0.0.0/8 (got {text!r})"
        ) from exc
    return text


PerMinute = Annotated[float, Field(gt=0, le=1e9)]
Network = Annotated[str, AfterValidator(_network)]


class Limits(Spec):
    """Limits of request rates and connection times. Null disables a rate limit.

    Attributes:
        requests_per_minute_per_ip: Requests per address (IPv6: per /64). Requests of enrolled
            clients to device routes do not count, because many devices may share an address.
        requests_per_minute_per_client: Requests per enrolled client. Each 64 KiB of a request's
            body count as one more request.
        enrolments_per_minute_per_ip: Enrolments with a valid token, per address.
        failures_per_minute_per_ip: Failed authentications per address. Above the limit, only
            enrolled clients are served.
        trusted_proxies: Addresses and networks of proxies whose ``X-Forwarded-For`` is used.
        keepalive_s: Maximal idle time of a connection between requests, seconds.
        first_request_s: Time within which a new connection must send the head of its first request,
            seconds.
    """

    requests_per_minute_per_ip: PerMinute | None = 1200.0
    requests_per_minute_per_client: PerMinute | None = 1200.0
    enrolments_per_minute_per_ip: PerMinute | None = 60.0
    failures_per_minute_per_ip: PerMinute | None = 30.0
    trusted_proxies: tuple[Network, ...] = ()
    keepalive_s: Annotated[float, Field(ge=1, le=3600)] = 75.0
    first_request_s: Annotated[float, Field(ge=1, le=600)] = 20.0


NO_LIMITS = Limits(
    requests_per_minute_per_ip=None,
    requests_per_minute_per_client=None,
    enrolments_per_minute_per_ip=None,
    failures_per_minute_per_ip=None,
)
"""No rate limits: for tests and for aggregators in a private network."""


class Buckets:
    """Token buckets, one per caller. A bucket holds one minute's requests and refills evenly.

    Args:
        per_minute: Requests per minute and caller; None is unlimited.
        now: Returns the time, seconds.
        capacity: Maximal number of buckets; beyond it, the least recently used bucket is dropped.
    """

    def __init__(
        self, per_minute: float | None, now: Callable[[], float], *, capacity: int = 65_536
    ) -> None:
        self._per_minute = per_minute
        self._now = now
        self._capacity = capacity
        # Caller -> time at which its bucket is full again; the content is computed from this time.
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def wait_s(self, caller: Hashable) -> float:
        """Return how long a caller must wait before its next request, seconds."""
        if self._per_minute is None:
            return 0.0
        now, refill_s = self._now(), 60.0 / self._per_minute
        return max(self._full_at.get(caller, now) + refill_s - now - max(60.0, refill_s), 0.0)

    def admit(self, caller: Hashable, count: int = 1) -> None:
        """Count requests, or refuse a caller whose bucket is empty (``rate_limited``)."""
        wait_s = self.wait_s(caller)
        if wait_s > 0:
            text = f"more than {self._per_minute:g} requests a minute"
            raise ProblemError("rate_limited", text, retry_after_s=wait_s)
        self.take(caller, count)

    def take(self, caller: Hashable, count: int = 1) -> None:
        """Count requests of a caller, even if they are more than its bucket holds."""
        if self._per_minute is None:
            return
        now, taken_s = self._now(), count * 60.0 / self._per_minute
        self._full_at[caller] = max(self._full_at.get(caller, now), now) + taken_s
        self._full_at.move_to_end(caller)
        while self._full_at and (
            len(self._full_at) > self._capacity or next(iter(self._full_at.values())) <= now
        ):
            self._full_at.popitem(last=False)


class Limiter:
    """Counts requests, and refuses requests above the limits.

    Attributes:
        clients: Requests of each enrolled client, by index.
        enrolments: Enrolments from each address.
    """

    def __init__(self, limits: Limits, *, now: Callable[[], float] = time.monotonic) -> None:
        self._proxies = [ip_network(network) for network in limits.trusted_proxies]
        self._by_address = Buckets(limits.requests_per_minute_per_ip, now)
        self._failures = Buckets(limits.failures_per_minute_per_ip, now)
        self.clients = Buckets(limits.requests_per_minute_per_client, now)
        self.enrolments = Buckets(limits.enrolments_per_minute_per_ip, now)

    def address(self, request: web.Request) -> str:
        """Return the IPv4 address, or the IPv6 /64, whose limits apply to a request."""
        peer = _address(request.remote or "")
        if peer is None:
            return ""  # The peer is connected by a Unix socket.
        # A trusted proxy appends the last entry; earlier entries may be forged.
        entries = ",".join(request.headers.getall("X-Forwarded-For", ())).split(",")
        while entries and any(peer in network for network in self._proxies):
            forwarded = _address(entries.pop().strip())
            if forwarded is None:
                break
            peer = forwarded
        return _network_key(peer)

    def unknown_caller(self, address: str) -> None:
        """Count a request of an unknown caller, or refuse it (``rate_limited``)."""
        wait_s = self._failures.wait_s(address)
        if wait_s > 0:
            text = "too many failed authentications"
            raise ProblemError("rate_limited", text, retry_after_s=wait_s)
        self._by_address.admit(address)

    def body(self, client_index: int, num_bytes: int) -> None:
        """Count a request by its body's size, or refuse it; called before the body is read."""
        self.clients.admit(client_index, num_bytes // _BYTES_PER_REQUEST)

    def failed(self, address: str) -> None:
        """Count a failed authentication; a failure above the limit does not extend the wait."""
        if self._failures.wait_s(address) <= 0:
            self._failures.take(address)


LIMITER: web.AppKey[Limiter] = web.AppKey("limiter", Limiter)


def guarding(
    limiter: Limiter, known: Callable[[web.Request], bool], *, unlimited: Collection[str]
) -> Middleware:
    """Return the middleware that applies the limits; it must run inside `requests.problems`.

    `known` says whether a request is from a known client; such a request does not count towards
    the limit of its address. The paths in `unlimited` have no limits.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in unlimited:
            return await handler(request)
        address = limiter.address(request)
        if not known(request):
            limiter.unknown_caller(address)
        if request.path.startswith("/v1/"):
            check_protocol(request.headers.get(PROTOCOL_HEADER))
        try:
            return await handler(request)
        except ProblemError as exc:
            if exc.code == "unauthorized":
                limiter.failed(address)
            raise

    return guard


def _address(text: str) -> IPv4Address | IPv6Address | None:
    # Some proxies add the port: 192.0.2.7:80 or [2001:db8::7]:80.
    host = text.rpartition(":")[0] if text.count(":") == 1 or "]:" in text else text
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@lru_cache(maxsize=4096)
def _network_key(address: IPv4Address | IPv6Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    # An IPv6 host usually controls its whole /64.
    return str(IPv6Network((address, 64), strict=False))


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}

_ALLOWED_METHODS = "GET, POST"
_ALLOWED_HEADERS = ("Authorization", "Content-Type", PROTOCOL_HEADER, "X-Request-ID")
_EXPOSED_HEADERS = ("Retry-After", "Date", PROTOCOL_HEADER, "X-Request-ID")
_MAX_AGE_S = 7200
"""Time for which browsers may cache a preflight (the maximum in Chromium), seconds."""


def _origin(text: str) -> str:
    lowered = text.lower()
    if not _ORIGIN.fullmatch(lowered):
        raise ValueError(
            "must be an origin as a browser sends it, such as https://app.example or "
            f"capacitor://localhost, without a path or * (got {text!r})"
        )
    scheme, _, _ = lowered.partition(":")
    return lowered.removesuffix(_DEFAULT_PORTS.get(scheme, " "))


class CorsConfig(Spec):
    """Origins (scheme, host and port) of web pages that may take part as devices; no wildcards."""

    origins: Annotated[
        tuple[Annotated[str, AfterValidator(_origin)], ...], Field(max_length=1000)
    ] = ()


NO_ORIGINS = CorsConfig()
"""No cross-origin requests."""


class Cors:
    """Answers preflights, and sets the CORS headers of routes whose handlers are `reachable`.

    Browser credentials (cookies) are not allowed: pages send tokens in ``Authorization``.
    """

    def __init__(self, origins: Collection[str], reachable: Collection[Handler]) -> None:
        self._origins = frozenset(origins)
        self._reachable = reachable

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer preflights (middleware, before authentication)."""
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD, "")
        if request.method != "OPTIONS" or not wanted or not self._origin_of(request):
            return await handler(request)
        matched = await request.app.router.resolve(request.clone(method=wanted))
        if not self._is_shared(matched):
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _ALLOWED_METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: ", ".join(_ALLOWED_HEADERS),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S),
            hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: self._origin_of(request),
        }
        return web.Response(status=204, headers=headers)

    async def stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        """Set the headers of a response (``on_response_prepare``)."""
        # `Vary` is set for every origin: a cache must not reuse a response for another origin.
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = self._origin_of(request)
        if origin and self._is_shared(request.match_info):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ", ".join(_EXPOSED_HEADERS)

    def _is_shared(self, matched: web.UrlMappingMatchInfo) -> bool:
        # If a path has no route, the page must get the 404 instead of a network error.
        refusal = matched.http_exception
        return matched.handler in self._reachable or getattr(refusal, "status", 0) == 404

    def _origin_of(self, request: web.Request) -> str:
        origin = request.headers.get(hdrs.ORIGIN, "")
        return origin if origin in self._origins else ""


class TlsConfig(Spec):
    """TLS 1.2 or newer; TLS 1.3 with `client_ca`. Client certificates do not replace credentials.

    Attributes:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with the certificate's private key, unencrypted.
        client_ca: PEM file with the authorities that sign client certificates. If it is null,
            the server requests no client certificates.
        require_client_certificate: Whether connections without a client certificate are refused.
    """

    certificate: str
    key: str
    client_ca: str | None = None
    require_client_certificate: bool = True

    @model_validator(mode="after")
    def _check_authorities(self) -> Self:
        if self.client_ca is None and "require_client_certificate" in self.model_fields_set:
            raise ValueError("require_client_certificate: needs client_ca")
        return self


class ServerTls:
    """A TLS context whose certificates can be reloaded.

    New connections use the newest valid files; open connections keep the files they began with.

    Raises:
        SpecError: The files cannot be used.
    """

    def __init__(self, config: TlsConfig, folder: Path) -> None:
        self._config = config
        self._certificate = folder / user_path(config.certificate)
        self._key = folder / user_path(config.key)
        self._client_ca = None if config.client_ca is None else folder / user_path(config.client_ca)
        self._seen = self._stamps()
        self._newest = self._load()
        self.context = self._load()
        # Each new connection gets the newest context, so that removals of authorities take effect.
        self.context.sni_callback = self._set_newest
        if self._client_ca is not None:
            # A resumed session would skip the check of the client certificate. Python can disable
            # resumption for TLS 1.3, but not for TLS 1.2.
            self.context.minimum_version = ssl.TLSVersion.TLSv1_3
            self.context.num_tickets = 0

    def reload(self) -> bool:
        """Reload the files if they have changed; return whether new files are in use.

        If the new files are invalid, this is logged, and the old files stay in use.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        try:
            newest = self._load()
        except SpecError as exc:
            # The files may be half written; the next check tries again.
            _log.error("the changed TLS files cannot be used", reason=exc.problems[0])
            return False
        self._seen = stamps
        self._newest = newest
        _log.info("TLS files read again", certificate=str(self._certificate))
        return True

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Reload changed files while the ``with`` block runs."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(_TLS_CHECK_S)
                await asyncio.to_thread(self.reload)

        watcher = asyncio.create_task(watch(), name="TLS files")
        try:
            yield
        finally:
            watcher.cancel()

    def _set_newest(
        self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            for file in (self._certificate, self._key):
                file.open().close()  # OpenSSL's error does not name the file.
            # Without a password OpenSSL would ask for the one of an encrypted key on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ssl.SSLError) as exc:
            raise SpecError(f"tls: the certificate or key cannot be used: {exc}") from exc
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ssl.SSLError) as exc:
                raise SpecError(f"tls.client_ca: cannot be used: {exc}") from exc
            required = self._config.require_client_certificate
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        return context

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        files = (self._certificate, self._key, self._client_ca)
        return [None if file is None else _stamp(file) for file in files]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
