"""Rate limits per client and per address."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Annotated

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import AfterValidator, Field

from fedone_sdk.aggregator.http.requests import Handler
from fedone_sdk.aggregator.runtime import Bucket
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import PROTOCOL_HEADER, check_protocol
from fedone_sdk.spec import Spec

_BYTES_PER_REQUEST = 64 * 1024


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
    """Limits of request rates and connection times. Null is unlimited.

    Attributes:
        requests_per_minute_per_ip: Requests per address (for IPv6, per /64), except those of known
            clients: many devices may share an address.
        requests_per_minute_per_client: Requests per enrolled client. A body counts as one more for
            each 64 KiB.
        enrolments_per_minute_per_ip: Enrolments per address, with a valid token.
        failures_per_minute_per_ip: Failed authentications per address. Above the limit, only known
            clients are served.
        trusted_proxies: Addresses and networks of proxies whose ``X-Forwarded-For`` is used.
        keepalive_s: Maximal idle time of a connection between requests, seconds.
        first_request_s: Maximal time until a new connection has sent the head of a request,
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


class Limiter:
    """Counts requests and refuses those above the limits."""

    def __init__(self, limits: Limits, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._proxies = [ip_network(network) for network in limits.trusted_proxies]
        self._by_address = Bucket(limits.requests_per_minute_per_ip)
        self._by_client = Bucket(limits.requests_per_minute_per_client)
        self._enrolments = Bucket(limits.enrolments_per_minute_per_ip)
        self._failures = Bucket(limits.failures_per_minute_per_ip)

    def address(self, request: web.Request) -> str:
        """Return the address that a request counts for: IPv4, or the /64 of IPv6."""
        peer = _address(request.remote or "")
        if peer is None:
            return ""  # A Unix socket.
        if self._proxies and self._is_proxy(peer):
            # The last entry is from the trusted proxy; earlier ones may be forged.
            for line in reversed(request.headers.getall("X-Forwarded-For", ())):
                for entry in reversed(line.split(",")):
                    found = _address(entry.strip())
                    if found is None:
                        return _network_key(peer)
                    peer = found
                    if not self._is_proxy(peer):
                        return _network_key(peer)
        return _network_key(peer)

    def unknown_caller(self, address: str) -> None:
        """Count a request of an unknown caller, or refuse it (``rate_limited``)."""
        now = self._now()
        wait_s = self._failures.wait_s(address, now)
        if wait_s > 0:
            raise ProblemError(
                "rate_limited", "too many failed authentications", retry_after_s=wait_s
            )
        self._by_address.admit(address, now)

    def client(self, index: int) -> None:
        """Count a request of an enrolled client, or refuse it (``rate_limited``)."""
        self._by_client.admit(index, self._now())

    def body(self, index: int, num_bytes: int) -> None:
        """Count a client's body before it is read, or refuse it (``rate_limited``).

        It takes memory and time in proportion to its size.
        """
        self._by_client.admit(index, self._now(), num_bytes // _BYTES_PER_REQUEST)

    def enrolment(self, address: str) -> None:
        """Count an enrolment, or refuse it (``rate_limited``)."""
        self._enrolments.admit(address, self._now())

    def failed(self, address: str) -> None:
        """Count a failed authentication; one above the limit does not extend the wait."""
        now = self._now()
        if self._failures.wait_s(address, now) <= 0:
            self._failures.take(address, now)

    def _is_proxy(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._proxies)


LIMITER: web.AppKey[Limiter] = web.AppKey("limiter", Limiter)


def guarding(
    limiter: Limiter, known: Callable[[web.Request], bool], *, free: Iterable[str] = ()
) -> Middleware:
    """Return the middleware that applies the limits, to run inside of `problems`.

    A request of a `known` client has a limit of its own. Probes at the `free` paths have none.
    """
    free = frozenset(free)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in free:
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
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


@lru_cache(maxsize=4096)
def _network_key(address: IPv4Address | IPv6Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    # An IPv6 host usually controls its whole /64.
    return str(IPv6Network((address, 64), strict=False))
